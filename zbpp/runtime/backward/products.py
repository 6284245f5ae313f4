"""Products whose weight gradients can wait: the operands of W, and its formula.

    Mm             y = x w           dx = dy w^T         dw = x^T dy
    Addmm          y = b + x w
    Bmm            the same, batched; Baddbmm too
    GroupedMm      the same, one matrix for each group of rows
    Convolution    dx = conv^T(dy)   dw, db = conv(x, dy)

The formulas are torch's (derivatives.yaml), with the same layouts, so the results
are equal to the last bit.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Sizes = Sequence[int]


class Rule(NamedTuple):
    """The second half of one kind of product's backward."""

    gradients: Callable[..., Sequence[Tensor | None]]
    """Takes the gradient of the product, the operands and the settings; returns the
    gradients of the weights."""
    weights: tuple[int, ...] = ()
    """The node's operands whose gradients may wait; all but the first may need none."""
    operands: tuple[str, ...] = ()
    """Attributes of the node: the saved tensors that W needs."""
    settings: tuple[str, ...] = ()
    """Attributes with other saved values."""
    adds: bool = False
    """`gradients` can add the only weight's gradient to a `total` in its kernel."""
    slot: int | None = None
    """Number of a compiled node's result; None: an eager node."""


def _is_column_major(sizes: Sizes, strides: Sizes) -> bool:
    return strides[-2] == 1 and strides[-1] == sizes[-2]


def _scaled(gradient: Tensor, alpha: Any) -> Tensor:
    return gradient if alpha == 1 else gradient * alpha.conjugate()


def _right(
    dy: Tensor,
    x: Tensor,
    sizes: Sizes,
    strides: Sizes,
    alpha: Any = 1,
    total: Tensor | None = None,
) -> tuple[Tensor]:
    """y = x w; torch computes a gradient in the layout of the weight."""
    x = x.conj()
    if total is not None:
        return (total.addmm_(x.t(), dy, alpha=alpha.conjugate()),)
    if _is_column_major(sizes, strides):
        return (_scaled(dy.t().mm(x), alpha).t(),)
    return (_scaled(x.t().mm(dy), alpha),)


def _left(dy: Tensor, x: Tensor, *layout: Any, **total: Any) -> tuple[Tensor]:
    """y = w x: the same with the transposes of x and dy in each other's places."""
    return _right(x.conj().t(), dy.conj().t(), *layout, **total)


def _batched_right(dy: Tensor, x: Tensor, alpha: Any = 1) -> tuple[Tensor]:
    return (_scaled(x.transpose(1, 2).conj().bmm(dy), alpha),)


def _batched_left(dy: Tensor, x: Tensor, alpha: Any = 1) -> tuple[Tensor]:
    return (_scaled(dy.bmm(x.transpose(1, 2).conj()), alpha),)


def _grouped_right(
    dy: Tensor, x: Tensor, ends: Tensor | None, sizes: Sizes, strides: Sizes
) -> tuple[Tensor]:
    if _is_column_major(sizes, strides):
        return (torch._grouped_mm(dy.mT, x, offs=ends).mT,)
    return (torch._grouped_mm(x.mT, dy, offs=ends),)


def _grouped_left(dy: Tensor, x: Tensor, *layout: Any) -> tuple[Tensor]:
    return _grouped_right(x.mT, dy.mT, *layout)


def _convolution(
    dy: Tensor, x: Tensor, w: Tensor, bias_sizes: Any, *window: Any
) -> tuple[Tensor | None, ...]:
    if w.untyped_storage().nbytes() == 0:  # only its shape is read: it may be freed
        w = torch.empty_strided(w.shape, w.stride(), dtype=w.dtype, device=w.device)
    mask = [False, True, bias_sizes is not None]
    gradients = torch.ops.aten.convolution_backward(dy, x, w, bias_sizes, *window, mask)
    return tuple(gradients[1:])


def _saved(*names: str) -> tuple[str, ...]:
    return tuple(f"_saved_{name}" for name in names)


def _layout(name: str) -> tuple[str, str]:
    return f"{name}_sym_sizes", f"{name}_sym_strides"


def _matrices(left: str, right: str, first: int, *factor: str) -> tuple[Rule, Rule]:
    layouts = [_saved(*_layout(weight), *factor) for weight in (right, left)]
    return (
        Rule(_right, (first + 1,), _saved(left), layouts[0], adds=True),
        Rule(_left, (first,), _saved(right), layouts[1], adds=True),
    )


RULES: dict[str, Sequence[Rule]] = {
    "MmBackward0": _matrices("self", "mat2", 0),
    "AddmmBackward0": _matrices("mat1", "mat2", 1, "alpha"),
    "BmmBackward0": (
        Rule(_batched_right, (1,), _saved("self")),
        Rule(_batched_left, (0,), _saved("mat2")),
    ),
    "BaddbmmBackward0": (
        Rule(_batched_right, (2,), _saved("batch1"), _saved("alpha")),
        Rule(_batched_left, (1,), _saved("batch2"), _saved("alpha")),
    ),
    "GroupedMmBackward0": (
        Rule(_grouped_right, (1,), _saved("self", "offs"), _saved(*_layout("mat2"))),
        Rule(_grouped_left, (0,), _saved("mat2", "offs"), _saved(*_layout("self"))),
    ),
    "ConvolutionBackward0": (
        Rule(
            _convolution,
            (1, 2),  # one kernel computes both
            _saved("input"),
            _saved("weight", "bias_sym_sizes_opt", "stride", "padding", "dilation",
                   "transposed", "output_padding", "groups"),
        ),
    ),
}  # fmt: skip
"""By the name of the node; the first rule that fits is taken."""
