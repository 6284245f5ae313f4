"""Copies of tensors and of optimizer state, whose memory is used again."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from zbpp.runtime.support.marks import Mark, mark
from zbpp.runtime.support.pytree import map_tensors

__all__ = ["Copies", "Scratch", "State", "copy_value"]

State = dict[str, Any]
"""The values that an optimizer keeps for one parameter, by name."""

_SLICE = 2**20


class Copies:
    """A copy of each tensor, made only if the one that there is may be out of date."""

    def __init__(self) -> None:
        self._of: dict[Tensor, Tensor] = {}
        self._equal_at: dict[Tensor, Mark] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """The copy, as it is."""
        return self._of[tensor]

    def take(self, tensor: Tensor) -> Tensor:
        """A copy that equals the tensor."""
        at = mark(tensor)
        if at is None or self._equal_at.pop(tensor, None) != at:
            self._room(tensor).copy_(tensor)
        return self._of[tensor]

    def take_slowly(self, tensor: Tensor) -> Iterator[None]:
        """The same, in slices."""
        at = mark(tensor)
        whole = (self._room(tensor), tensor.detach())
        parts: list[tuple[Tensor, ...]] = [(part,) for part in whole]
        if tensor.is_contiguous():
            parts = [torch.split(part.view(-1), _SLICE) for part in whole]
        for target, source in zip(*parts, strict=True):
            yield
            target.copy_(source)
        self.trust(tensor, at)

    def trust(self, tensor: Tensor, at: Mark) -> None:
        """The copy equals the tensor as it was at this `mark`."""
        self._equal_at[tensor] = at

    def forget(self) -> None:
        """Tensors may have changed in ways that leave no mark."""
        self._equal_at = {}

    def drop(self, tensor: Tensor) -> None:
        """Drop the copy of a tensor, if there is one."""
        self._of.pop(tensor, None)
        self._equal_at.pop(tensor, None)

    def keep(self, tensors: list[Tensor]) -> None:
        """Drop the copies of all others."""
        kept = set(tensors)
        self._of = {t: c for t, c in self._of.items() if t in kept}
        self._equal_at = {t: at for t, at in self._equal_at.items() if t in kept}

    def _room(self, tensor: Tensor) -> Tensor:
        if tensor not in self._of:
            self._of[tensor] = torch.empty_like(tensor, requires_grad=False)
        return self._of[tensor]


class Scratch:
    """Temporary copies of state, whose memory the next ones use again."""

    def __init__(self) -> None:
        self._free: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
        self._used: list[tuple[tuple[Any, ...], Tensor]] = []

    def copy(self, state: State) -> State:
        """A copy for use until `reuse`."""
        copied: State = copy_value(state, self._copy)
        return copied

    def reuse(self) -> None:
        """The copies so far are not needed any more."""
        for key, tensor in self._used:
            self._free[key].append(tensor)
        self._used = []

    def _copy(self, tensor: Tensor) -> Tensor:
        key = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        free = self._free[key]
        kept = free.pop().copy_(tensor) if free else tensor.clone()
        self._used.append((key, kept))
        return kept


def copy_value(value: Any, copy_tensor: Callable[[Tensor], Tensor]) -> Any:
    """A copy of a value in which tensors may be nested in dicts, lists and tuples."""
    return map_tensors(value, copy_tensor, copy.copy)
