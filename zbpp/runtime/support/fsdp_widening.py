"""Gradients of 16 bits that `fully_shard` sums in 32: when they are widened.

Torch widens what a backward leaves. Here a backward is B, whose turn it may not be, and
W follows later: who adds gradients in order has them widened after each micro-batch.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

__all__ = ["WIDENED", "Widening", "widening_of"]

WIDENED = (
    *("reduce_dtype", "unsharded_accumulated_grad"),
    *("to_accumulated_grad_if_needed", "accumulate_unsharded_grad_if_needed"),
)
"""Names of a parameter of torch's that are used here."""


class Widening:
    """Widens the gradients of one module.

    Args:
        parameters: torch's, of the module.
    """

    def __init__(self, parameters: Iterable[Any]) -> None:
        self._parameters = [x for x in parameters if x.reduce_dtype is not None]

    @property
    def is_needed(self) -> bool:
        """Some gradients may have fewer bits than their sums."""
        return len(self._parameters) > 0

    def take_over(self) -> None:
        """Let no backward widen by itself."""
        for one in self._parameters:
            one.accumulate_unsharded_grad_if_needed = _nothing
            one.to_accumulated_grad_if_needed = _nothing

    @torch.no_grad()
    def add(self) -> None:
        """Add the gradients that are there to the sums."""
        for one in self._parameters:
            gradient = one._unsharded_param.grad
            if gradient is None or gradient.dtype == one.reduce_dtype:
                continue
            one._unsharded_param.grad = None
            if one.unsharded_accumulated_grad is None:
                one.unsharded_accumulated_grad = gradient.to(one.reduce_dtype)
            else:
                one.unsharded_accumulated_grad += gradient


def widening_of(modules: Sequence[Widening]) -> Callable[[], None] | None:
    """Make a call that widens the gradients of several modules; None: none needs it."""
    own = [one for one in modules if one.is_needed]

    def widen() -> None:
        for one in own:
            one.add()

    return widen if own else None


def _nothing() -> None:
    """Leave it to the order of sums."""
