"""Matrix products and convolutions in an autograd graph, and their weight gradients.

A node of these kinds has two jobs, and autograd would do both at once:

    Mm       y = x w          dx = dy w^T        dw = x^T dy
    Addmm    y = b + x w
    Bmm      the same, batched; Baddbmm too
    GroupedMm                 the same, one matrix for each group of rows
    Convolution               dx = conv^T(dy)    dw, db = conv(x, dy)

Each rule here reads what the second job needs from a node that is about to run, and
returns the call that does it later. The calls are the ones that torch's own formulas
make (derivatives.yaml), with the same layouts: the results are equal to the last bit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["RULES", "Gradients", "OfMatrix", "Rule"]


class Gradients(Protocol):
    """The second job of one node, to be done in W."""

    def of(self, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Turn the gradient of the node's output into those of its operands."""

    def add_to(self, total: Tensor, dy: Tensor) -> bool:
        """Add the first operand's gradient in the product's own kernel, if it can."""


@dataclass(frozen=True)
class Rule:
    """The way to split one kind of node.

    Args:
        choices: operands that may be deferred together, as positions in the node's
            ``next_functions``; those after the first may need no gradient. The first
            choice that fits is taken.
        reads: for each choice, the saved tensors that its gradients are computed from.
        settings: what else ``prepare`` reads from a node.
        prepare: called before the node runs, with the node, the operands, and the
            tensors read; None for an optional one that is not there.
        n_kept: how many of the tensors read are kept until W. (A convolution's weight
            gives its shape only.)
    """

    choices: tuple[tuple[int, ...], ...]
    reads: tuple[tuple[str, ...], ...]
    settings: tuple[str, ...]
    prepare: Callable[..., Gradients]
    n_kept: int = 1


class OfMatrix(NamedTuple):
    """The gradient of one factor of ``factor * (left @ right)``, other being known.

    torch computes it in the layout of the matrix, so a transposed weight's gradient is
    a transposed product.
    """

    other: Tensor
    factor: float
    is_right: bool
    is_turned: bool

    def of(self, dy: Tensor) -> tuple[Tensor]:
        """Return the gradient."""
        if self.is_turned:
            return (self.turned(dy).t(),)
        other = self.other.t().conj()
        product = other.mm(dy) if self.is_right else dy.mm(other)
        return (product if self.factor == 1 else product * self.factor,)

    def turned(self, dy: Tensor) -> Tensor:
        """Return the transpose of the gradient."""
        other, factor, is_right, is_turned = self
        if not is_turned:
            return self.of(dy)[0].t()
        if other.dtype.is_complex:
            other = other.conj()
        product = dy.t().mm(other) if is_right else other.mm(dy.t())
        return product if factor == 1 else product * factor

    def add_to(self, total: Tensor, dy: Tensor) -> bool:
        """Add it within the product."""
        other = self.other.t().conj()
        left, right = (other, dy) if self.is_right else (dy, other)
        total.addmm_(left, right, alpha=self.factor)
        return True


def _is_column_major(sizes: Any, strides: Any) -> bool:
    return bool(strides[0] == 1 and strides[1] == sizes[0])


class _OfBatch(NamedTuple):
    """The same for batches of matrices."""

    other: Tensor
    factor: float
    is_right: bool

    def of(self, dy: Tensor) -> tuple[Tensor]:
        other = self.other.transpose(1, 2).conj()
        gradient = other.bmm(dy) if self.is_right else dy.bmm(other)
        return (gradient if self.factor == 1 else gradient * self.factor,)

    def add_to(self, total: Tensor, dy: Tensor) -> bool:
        other = self.other.transpose(1, 2).conj()
        left, right = (other, dy) if self.is_right else (dy, other)
        total.baddbmm_(left, right, alpha=self.factor)
        return True


class _OfGroups(NamedTuple):
    """The gradient of one factor of a grouped product, whose groups end at ``ends``.

    As for matrices, in the layout of that factor.
    """

    other: Tensor
    ends: Tensor | None
    is_right: bool
    is_column_major: bool

    def of(self, dy: Tensor) -> tuple[Tensor]:
        other = self.other
        pair = (other.mT, dy) if self.is_right else (dy, other.mT)
        if not self.is_column_major:
            return (torch._grouped_mm(*pair, offs=self.ends),)
        left, right = (one.mT for one in reversed(pair))
        return (torch._grouped_mm(left, right, offs=self.ends).mT,)

    def add_to(self, total: Tensor, dy: Tensor) -> bool:
        return False


def _groups(
    node: Any, operands: tuple[int, ...], other: Tensor, ends: Tensor | None
) -> _OfGroups:
    is_right = operands == (1,)
    name = "mat2" if is_right else "self"
    sizes, strides = (getattr(node, f"_saved_{name}_sym_{x}") for x in _LAYOUT)
    is_column_major = _is_column_major(sizes[-2:], strides[-2:])
    return _OfGroups(other, ends, is_right, is_column_major)


class _OfConvolution(NamedTuple):
    """The gradients of a convolution's weight and bias, from one kernel.

    It is asked for the shape of the weight alone, whose numbers may be gone: those of
    a sharded layer are, once its B has ended.
    """

    x: Tensor
    weight: Tensor
    bias_sizes: Any
    settings: tuple[Any, ...]
    with_bias: bool

    def of(self, dy: Tensor) -> tuple[Tensor | None, ...]:
        wanted = [False, True, self.with_bias]
        weight = self.weight
        if weight.untyped_storage().nbytes() == 0:
            weight = torch.empty_strided(
                *(weight.shape, weight.stride()),
                dtype=weight.dtype,
                device=weight.device,
            )
        _, dw, db = torch.ops.aten.convolution_backward(
            dy, self.x, weight, self.bias_sizes, *self.settings, wanted
        )
        return (dw, db) if self.with_bias else (dw,)

    def add_to(self, total: Tensor, dy: Tensor) -> bool:
        return False


def _convolution(
    node: Any, operands: tuple[int, ...], x: Tensor, weight: Tensor
) -> _OfConvolution:
    settings = tuple(getattr(node, f"_saved_{name}") for name in _WINDOW)
    bias_sizes = node._saved_bias_sym_sizes_opt
    return _OfConvolution(x, weight, bias_sizes, settings, 2 in operands)


def _of_matrices(left: str, right: str, first: int, *factor: str) -> Rule:
    """Try the right matrix, then the left one; each needs the other."""

    def prepare(node: Any, operands: tuple[int, ...], other: Tensor) -> OfMatrix:
        is_right = operands[0] == first + 1
        sizes, strides = names[is_right]
        is_turned = _is_column_major(getattr(node, sizes), getattr(node, strides))
        if is_right and other.layout is not torch.strided:
            is_turned = False
        return OfMatrix(other, _factor(node, alpha), is_right, is_turned)

    alpha = tuple(f"_saved_{name}" for name in factor)

    names = [[f"_saved_{name}_sym_{x}" for x in _LAYOUT] for name in (left, right)]
    shapes = (f"{name}_sym_{what}" for name in (left, right) for what in _LAYOUT)
    settings = (*shapes, *factor)
    return Rule(((first + 1,), (first,)), ((left,), (right,)), settings, prepare)


def _of_batches(left: str, right: str, first: int, *factor: str) -> Rule:
    def prepare(node: Any, operands: tuple[int, ...], other: Tensor) -> _OfBatch:
        return _OfBatch(other, _factor(node, alpha), operands == (first + 1,))

    alpha = tuple(f"_saved_{name}" for name in factor)

    return Rule(((first + 1,), (first,)), ((left,), (right,)), factor, prepare)


def _factor(node: Any, names: tuple[str, ...]) -> Any:
    """The factor of a product's gradients: the conjugate of its own."""
    return getattr(node, names[0]).conjugate() if names else 1


_LAYOUT = ("sizes", "strides")
_WINDOW = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")

RULES = {
    "MmBackward0": _of_matrices("self", "mat2", 0),
    "AddmmBackward0": _of_matrices("mat1", "mat2", 1, "alpha"),
    "BmmBackward0": _of_batches("self", "mat2", 0),
    "BaddbmmBackward0": _of_batches("batch1", "batch2", 1, "alpha"),
    "GroupedMmBackward0": Rule(
        ((1,), (0,)),
        (("self", "offs"), ("mat2", "offs")),
        tuple(f"{name}_sym_{what}" for name in ("self", "mat2") for what in _LAYOUT),
        _groups,
        n_kept=2,
    ),
    # One kernel computes both gradients, so the bias goes with the weight.
    "ConvolutionBackward0": Rule(
        ((1, 2),),
        (("input", "weight"),),
        (*_WINDOW, "bias_sym_sizes_opt"),
        _convolution,
    ),
}
"""By the name of the node's type. Nodes of other kinds run in B as a whole."""
