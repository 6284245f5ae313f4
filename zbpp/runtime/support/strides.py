"""Strides that a copy of a tensor keeps: how sums are rounded depends on them.

conv(x.mT).mT      4 3 | strides 1 4     transposed: kept
x.expand(4, 3)     4 3 | strides 0 1     expanded: kept
x.real             4 3 | strides 6 2     every other number: kept
x[:, 0]            4 3 | strides 30 1    a small part: contiguous
"""

from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["Strides", "copy_of", "strides_of", "with_strides"]

Strides = tuple[int, ...]


def strides_of(tensor: Tensor) -> Strides | None:
    """Return the strides that a copy should have; None: it may be contiguous.

    It is for contiguous tensors, for those whose elements share memory in another way
    than by `expand`, and for those that are less than half of what they span.
    """
    if tensor.is_contiguous():
        return None
    size, span = 1, 1  # of the dimensions with smaller strides
    for step, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if step and n > 1:
            if step < span:
                return None
            size, span = size * n, span + step * (n - 1)
    return tuple(tensor.stride()) if span <= 2 * size else None


def with_strides(tensor: Tensor, strides: Strides) -> Tensor:
    """Copy a tensor into memory of these strides, which `strides_of` has told."""
    once = tensor[tuple([slice(None) if step else slice(1) for step in strides])]
    copy = torch.empty_strided(
        once.shape, strides, dtype=tensor.dtype, device=tensor.device
    )
    return copy.copy_(once).expand(tensor.shape)


def copy_of(tensor: Tensor) -> Tensor:
    """Copy a tensor, with its strides; gradients go through."""
    strides = strides_of(tensor)
    if strides is None:
        return tensor.clone()
    if 0 not in strides or not tensor.requires_grad:
        return with_strides(tensor, strides)
    apply: Any = _ExpandedCopy.apply  # typed from torch 2.14 on
    return cast(Tensor, apply(tensor, strides))


class _ExpandedCopy(torch.autograd.Function):
    """A copy whose gradient is that of the tensor, as it is.

    Autograd would sum it over what is expanded before it is added to the gradients of
    other uses of the tensor, where a backward without the copy sums behind that.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, strides: Strides) -> Tensor:
        return with_strides(tensor, strides)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
