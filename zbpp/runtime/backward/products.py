"""Matrix products and convolutions of a graph, and their weight gradients in W.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zbpp.runtime.backward.grads import (
    GradTarget,
    Root,
    WeightGradients,
    adds_only,
)
from zbpp.runtime.backward.paths import find_target
from zbpp.runtime.backward.queue import DeferredWork, WeightQueue
from zbpp.runtime.support.autograd_internals import can_read_saved

__all__ = [
    "RULES",
    "Edges",
    "Product",
    "ProductWork",
    "Rule",
    "SplitSite",
    "can_read",
    "check_versions",
    "versions_of",
]

_STRIDED = torch.strided

Edges = Sequence[tuple[Any, int]]
"""Nodes and outputs: `GradientEdge`s, which torch is slow to make."""

Taken = tuple[WeightGradients, list[Tensor]]
"""The values of a node that W needs, and the tensors among them, held until then."""


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
    prepare: Callable[..., WeightGradients]
    n_kept: int = 1


class Product(NamedTuple):
    """The way to split a node; equal in all graphs that are alike.

    Args:
        rule: of the node's kind.
        operands: those whose gradients wait.
        reads: names of the saved tensors that W needs.
        saved: the attributes of the node that hold them.
        target: where the only operand's gradient is added; None: it is looked for in
            W.
    """

    rule: Rule
    operands: tuple[int, ...]
    reads: tuple[str, ...]
    saved: tuple[str, ...]
    target: GradTarget | None = None

    def take(self, node: Any, queue: WeightQueue) -> Taken:
        """Read what W needs; called before the node runs, which frees it.

        An operand is cut off its graph, which leads to the chunk's input and would keep
        it until W.
        """
        values = [getattr(node, name) for name in self.saved]
        saved = [None if x is None else x.detach() for x in values]
        for i in range(self.rule.n_kept if queue.lent else 0):
            if (x := saved[i]) is not None:
                saved[i] = queue.own(x)
        gradients = self.rule.prepare(node, self.operands, *saved)
        kept = saved[: self.rule.n_kept]
        if kept[-1] is None:
            kept.pop()
        return gradients, kept  # type: ignore[return-value]  # the first is there

    def work(self, edges: Edges, dy: Tensor, taken: Taken) -> "ProductWork":
        """Return the work for W.

        Args:
            edges: where the gradients go.
            dy: gradient of the product.
            taken: from before the node has run.
        """
        gradients, operands = taken
        return ProductWork(edges, gradients, [dy, *operands], self.target)


SplitSite = tuple[Any, Product, Edges]
"""A node of one graph to be split, how, and the edges of its waiting operands; a plain
tuple, as some are made in every B."""


def can_read(sites: Sequence[SplitSite]) -> bool:
    """True if what their nodes have saved may be read once more than autograd does."""
    return all(
        can_read_saved(node, name)
        for node, product, _ in sites
        for name in product.reads
    )


class ProductWork(DeferredWork):
    """The weight gradients of one product.

    Args:
        edges: where they go.
        gradients: computes them.
        kept: the gradient of the product, and the operands.
        target: see `Product`.
        dtype: of the only gradient; None: that of the product's.
    """

    __slots__ = ("_dtype", "_gradients", "_target", "_versions")

    def __init__(
        self,
        edges: Edges,
        gradients: WeightGradients,
        kept: list[Tensor],
        target: GradTarget | None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.roots, self.kept = edges, kept
        self._gradients, self._target, self._dtype = gradients, target, dtype
        self._versions = versions_of(kept)

    def run(self, *, in_place: bool) -> Sequence[tuple[Root, Tensor | None]]:
        """Add the gradient to its leaf, or return all; see `DeferredWork.run`.

        Raises:
            RuntimeError: an operand was changed in place after B.
        """
        target, kept = self._target, self.kept
        check_versions(kept, self._versions)
        if target is None:
            target = find_target(self.roots)
        dy = kept[0]
        if (
            target is None
            or not target.leaf.requires_grad
            or any([x.layout is not _STRIDED for x in kept])
            or not adds_only(target.leaf, self._dtype or dy.dtype)
        ):
            return list(zip(self.roots, self._gradients.of(dy), strict=True))
        target.add(self._gradients, dy, in_place=in_place)
        return ()


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often each was changed in place."""
    try:
        return [x._version for x in tensors]
    except RuntimeError:  # made in inference mode: rare, so not asked for each time
        return [0 if x.is_inference() else x._version for x in tensors]


def check_versions(kept: Sequence[Tensor], versions: list[int]) -> None:
    """Compare how often each was changed in place with what it was.

    Raises:
        RuntimeError: something was changed.
    """
    if versions_of(kept) != versions:
        raise RuntimeError(
            "a tensor that W needs was changed in place after B; change a copy"
        )


@dataclass(slots=True)
class _MatrixGrad(WeightGradients):
    """The gradient of one factor of ``factor * (left @ right)``, given the other one.

    torch computes it in the layout of that matrix, so a transposed weight's gradient is
    a transposed product.
    """

    operand: Tensor
    factor: float
    is_right: bool
    is_column_major: bool

    def of(self, dy: Tensor) -> tuple[Tensor]:
        if self.is_column_major:
            return (self.transposed(dy).t(),)
        operand = self.operand.t().conj()
        product = operand.mm(dy) if self.is_right else dy.mm(operand)
        return (product if self.factor == 1 else product * self.factor,)

    def transposed(self, dy: Tensor) -> Tensor:
        if not self.is_column_major:
            return self.of(dy)[0].t()
        operand, factor = self.operand, self.factor
        if operand.dtype.is_complex:
            operand = operand.conj()
        product = dy.t().mm(operand) if self.is_right else operand.mm(dy.t())
        return product if factor == 1 else product * factor

    def add_to(self, total: Tensor, dy: Tensor) -> bool:
        operand = self.operand.t().conj()
        left, right = (operand, dy) if self.is_right else (dy, operand)
        total.addmm_(left, right, alpha=self.factor)
        return True


@dataclass(slots=True)
class _BatchGrad(WeightGradients):
    """The gradient of one factor of a product of batches of matrices."""

    operand: Tensor
    factor: float
    is_right: bool

    def of(self, dy: Tensor) -> tuple[Tensor]:
        operand = self.operand.transpose(1, 2).conj()
        gradient = operand.bmm(dy) if self.is_right else dy.bmm(operand)
        return (gradient if self.factor == 1 else gradient * self.factor,)

    def add_to(self, total: Tensor, dy: Tensor) -> bool:
        operand = self.operand.transpose(1, 2).conj()
        left, right = (operand, dy) if self.is_right else (dy, operand)
        total.baddbmm_(left, right, alpha=self.factor)
        return True


@dataclass(slots=True)
class _GroupedGrad(WeightGradients):
    """The gradient of one factor of a grouped product, whose groups end at ``ends``.

    As for matrices, in the layout of that factor.
    """

    operand: Tensor
    ends: Tensor | None
    is_right: bool
    is_column_major: bool

    def of(self, dy: Tensor) -> tuple[Tensor]:
        operand = self.operand
        left, right = (operand.mT, dy) if self.is_right else (dy, operand.mT)
        if not self.is_column_major:
            return (torch._grouped_mm(left, right, offs=self.ends),)
        return (torch._grouped_mm(right.mT, left.mT, offs=self.ends).mT,)


@dataclass(slots=True)
class _ConvolutionGrad(WeightGradients):
    """The gradients of a convolution's weight and bias, from one kernel.

    It is asked for the shape of the weight alone, whose elements may be gone: those of
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
                weight.shape, weight.stride(), dtype=weight.dtype, device=weight.device
            )
        _, dw, db = torch.ops.aten.convolution_backward(
            dy, self.x, weight, self.bias_sizes, *self.settings, wanted
        )
        return (dw, db) if self.with_bias else (dw,)


def _is_column_major(sizes: Any, strides: Any) -> bool:
    return bool(strides[0] == 1 and strides[1] == sizes[0])


_LAYOUT = ("sizes", "strides")
_WINDOW = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")


def _layout_settings(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}_sym_{what}" for name in names for what in _LAYOUT)


def _matrices(left: str, right: str, first: int, *factor: str) -> Rule:
    """Try the right matrix, then the left one; each needs the other one."""
    settings = _layout_settings(left, right)
    left_sizes, left_strides, right_sizes, right_strides = (
        f"_saved_{name}" for name in settings
    )
    alpha = tuple(f"_saved_{name}" for name in factor)

    def prepare(node: Any, operands: tuple[int, ...], operand: Tensor) -> _MatrixGrad:
        if operands[0] == first + 1:
            sizes, strides = getattr(node, right_sizes), getattr(node, right_strides)
            is_column_major = operand.layout is _STRIDED and _is_column_major(
                sizes, strides
            )
            return _MatrixGrad(operand, _factor(node, alpha), True, is_column_major)
        sizes, strides = getattr(node, left_sizes), getattr(node, left_strides)
        is_column_major = _is_column_major(sizes, strides)
        return _MatrixGrad(operand, _factor(node, alpha), False, is_column_major)

    return Rule(
        ((first + 1,), (first,)), ((left,), (right,)), (*settings, *factor), prepare
    )


def _batches(left: str, right: str, first: int, *factor: str) -> Rule:
    alpha = tuple(f"_saved_{name}" for name in factor)

    def prepare(node: Any, operands: tuple[int, ...], operand: Tensor) -> _BatchGrad:
        return _BatchGrad(operand, _factor(node, alpha), operands == (first + 1,))

    return Rule(((first + 1,), (first,)), ((left,), (right,)), factor, prepare)


def _factor(node: Any, names: tuple[str, ...]) -> Any:
    """The factor of a product's gradients: the conjugate of the product's."""
    return getattr(node, names[0]).conjugate() if names else 1


def _grouped(
    node: Any, operands: tuple[int, ...], operand: Tensor, ends: Tensor | None
) -> _GroupedGrad:
    is_right = operands == (1,)
    name = "mat2" if is_right else "self"
    sizes, strides = (getattr(node, f"_saved_{name}_sym_{x}") for x in _LAYOUT)
    return _GroupedGrad(
        operand, ends, is_right, _is_column_major(sizes[-2:], strides[-2:])
    )


def _convolution(
    node: Any, operands: tuple[int, ...], x: Tensor, weight: Tensor
) -> _ConvolutionGrad:
    settings = tuple(getattr(node, f"_saved_{name}") for name in _WINDOW)
    bias_sizes = node._saved_bias_sym_sizes_opt
    return _ConvolutionGrad(x, weight, bias_sizes, settings, 2 in operands)


RULES = {
    "MmBackward0": _matrices("self", "mat2", 0),
    "AddmmBackward0": _matrices("mat1", "mat2", 1, "alpha"),
    "BmmBackward0": _batches("self", "mat2", 0),
    "BaddbmmBackward0": _batches("batch1", "batch2", 1, "alpha"),
    "GroupedMmBackward0": Rule(
        choices=((1,), (0,)),
        reads=(("self", "offs"), ("mat2", "offs")),
        settings=_layout_settings("self", "mat2"),
        prepare=_grouped,
        n_kept=2,
    ),
    # One kernel computes both gradients, so the bias goes with the weight.
    "ConvolutionBackward0": Rule(
        choices=((1, 2),),
        reads=(("input", "weight"),),
        settings=(*_WINDOW, "bias_sym_sizes_opt"),
        prepare=_convolution,
    ),
}
"""By the name of the node's type. Nodes of other kinds run in B as a whole."""
