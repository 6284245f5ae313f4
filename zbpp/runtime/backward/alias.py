"""A leaf's data under another name, that a function may change in place."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["alias_of"]


class _Alias(torch.autograd.Function):
    """The same data, but no leaf."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return dx


def alias_of(leaf: Tensor) -> Tensor:
    """Return a leaf's data as a tensor that may be changed in place."""
    return _Alias.apply(leaf)  # type: ignore[no-untyped-call, no-any-return]
