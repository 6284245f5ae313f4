"""Matrix products and convolutions in an autograd graph, and their weight gradients.

A node of these kinds has two jobs, and autograd would do both at once:

    Mm       y = x w          dx = dy w^T        dw = x^T dy
    Addmm    y = b + x w
    Bmm      the same, batched; Baddbmm too
    Convolution               dx = conv^T(dy)    dw, db = conv(x, dy)

Each rule here reads what the second job needs from a node that is about to run, and
returns the call that does it later. The calls are the ones that torch's own formulas
make (derivatives.yaml), with the same layouts: the results are equal to the last bit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["RULES", "Compute", "Rule"]

Compute = Callable[[Tensor], tuple[Tensor | None, ...]]
"""From the gradient of a node's output to those of its deferred operands."""


@dataclass(frozen=True)
class Rule:
    """How one kind of node is split.

    Args:
        choices: operands that may be deferred together, as positions in the node's
            ``next_functions``; those after the first may need no gradient. The first
            choice that fits is taken.
        reads: for each choice, the saved tensors that its gradients are computed from.
        prepare: called before the node runs, with the node, the operands, and the
            tensors read.
    """

    choices: tuple[tuple[int, ...], ...]
    reads: tuple[tuple[str, ...], ...]
    prepare: Callable[..., Compute]


def _is_column_major(sizes: Any, strides: Any) -> bool:
    return bool(strides[0] == 1 and strides[1] == sizes[0])


def _scaled(gradient: Tensor, factor: float) -> Tensor:
    return gradient if factor == 1 else gradient * factor


def _right(
    left: Tensor, factor: float, sizes: Any, strides: Any
) -> Callable[[Tensor], tuple[Tensor]]:
    """The gradient of the right matrix, which torch computes in the matrix's layout."""
    if _is_column_major(sizes, strides):
        return lambda dy: (_scaled(dy.t().mm(left.conj()).t(), factor),)
    return lambda dy: (_scaled(left.t().conj().mm(dy), factor),)


def _left(
    right: Tensor, factor: float, sizes: Any, strides: Any
) -> Callable[[Tensor], tuple[Tensor]]:
    """The gradient of the left matrix."""
    if _is_column_major(sizes, strides):
        return lambda dy: (_scaled(right.conj().mm(dy.t()).t(), factor),)
    return lambda dy: (_scaled(dy.mm(right.t().conj()), factor),)


def _mm(node: Any, operands: tuple[int, ...], other: Tensor) -> Compute:
    if operands == (1,):
        sizes, strides = node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides
        return _right(other, 1, sizes, strides)
    sizes, strides = node._saved_self_sym_sizes, node._saved_self_sym_strides
    return _left(other, 1, sizes, strides)


def _addmm(node: Any, operands: tuple[int, ...], other: Tensor) -> Compute:
    alpha = node._saved_alpha
    if operands == (2,):
        sizes, strides = node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides
        return _right(other, alpha, sizes, strides)
    sizes, strides = node._saved_mat1_sym_sizes, node._saved_mat1_sym_strides
    return _left(other, alpha, sizes, strides)


def _batched(other: Tensor, factor: float, *, is_right: bool) -> Compute:
    if is_right:
        return lambda dy: (_scaled(other.transpose(1, 2).conj().bmm(dy), factor),)
    return lambda dy: (_scaled(dy.bmm(other.transpose(1, 2).conj()), factor),)


def _bmm(node: Any, operands: tuple[int, ...], other: Tensor) -> Compute:
    return _batched(other, 1, is_right=operands == (1,))


def _baddbmm(node: Any, operands: tuple[int, ...], other: Tensor) -> Compute:
    return _batched(other, node._saved_alpha, is_right=operands == (2,))


def _convolution(
    node: Any, operands: tuple[int, ...], x: Tensor, weight: Tensor
) -> Compute:
    settings = (
        *(node._saved_stride, node._saved_padding, node._saved_dilation),
        *(node._saved_transposed, node._saved_output_padding, node._saved_groups),
    )
    bias_sizes = node._saved_bias_sym_sizes_opt
    with_bias = 2 in operands

    def compute(dy: Tensor) -> tuple[Tensor | None, ...]:
        _, dw, db = torch.ops.aten.convolution_backward(
            dy, x, weight, bias_sizes, *settings, [False, True, with_bias]
        )
        return (dw, db) if with_bias else (dw,)

    return compute


_MATRICES = ("self", "mat2")
_ADDED = ("mat1", "mat2")
_BATCHES = ("batch1", "batch2")


def _of_matrices(left: str, right: str, first: int, prepare: Any) -> Rule:
    """Try the right matrix, then the left one; each needs the other."""
    return Rule(((first + 1,), (first,)), ((left,), (right,)), prepare)


RULES = {
    "MmBackward0": _of_matrices(*_MATRICES, 0, _mm),
    "AddmmBackward0": _of_matrices(*_ADDED, 1, _addmm),
    "BmmBackward0": _of_matrices(*_MATRICES, 0, _bmm),
    "BaddbmmBackward0": _of_matrices(*_BATCHES, 1, _baddbmm),
    # One kernel computes both gradients, so the bias goes with the weight.
    "ConvolutionBackward0": Rule(((1, 2),), (("input", "weight"),), _convolution),
}
"""By the name of the node's type. Nodes of other kinds run in B as a whole."""
