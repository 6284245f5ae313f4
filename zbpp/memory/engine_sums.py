"""Sums of gradients, in place where autograd's engine adds real tensors in place.

    x ──┬── q ──┐      B: dx = dq W_q; then += dk W_k, += dv W_v, in the same memory
        ├── k ──┤         if nobody else holds it
        └── v ──┘

The engine never adds fake tensors in place: they are a subclass. What holds a sum is
counted, and compared with a sum of which it is known that the engine alone holds it.
"""

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from zbpp.runtime.support.compile_internals import current_node

__all__ = ["EngineSums"]

_Counts = tuple[int, int, int]


class EngineSums:
    """Knows which additions the engine would do in place.

    Call it from a `__torch_dispatch__`, and tell it of every storage that is made.
    """

    def __init__(self) -> None:
        self._made_by: dict[int, int | None] = {}
        self._alone = _alone()

    def note(self, storage: torch.UntypedStorage) -> None:
        """A storage is made now."""
        self._made_by[storage._cdata] = _number(current_node())

    def forget(self, storage: int) -> None:
        """A storage is freed, by its `_cdata`."""
        self._made_by.pop(storage, None)

    def in_place(self, func: Any, args: Any) -> bool:
        """True if this call is a sum of gradients that reuses its first summand.

        A node's own sums are told apart by what they add: something that the node
        itself has made.
        """
        if func is not torch.ops.aten.add.Tensor or torch.is_grad_enabled():
            return False
        old, node = args[0], current_node()
        if node is None or not (isinstance(old, Tensor) and _is_dense(old)):
            return False
        storage = old.untyped_storage()._cdata
        if storage not in self._made_by or self._made_by[storage] == _number(node):
            return False
        return _counts(args) == self._alone


@cache
def _alone() -> _Counts | None:
    """Holders of a summand that the engine alone holds, seen by a dispatch mode."""
    seen: list[_Counts | None] = []

    class Look(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.add.Tensor:
                seen.append(self.look(args))
            return func(*args, **(kwargs or {}))

        def look(self, args: Any) -> _Counts | None:
            old = args[0]  # as `in_place` holds it
            return _counts(args) if isinstance(old, Tensor) else None

    with _disable_current_modes():
        x = torch.zeros(2, requires_grad=True)
        with torch.enable_grad():
            y = torch.stack([x.sin(), x.cos()]).sum()
        with Look():  # type: ignore[no-untyped-call]
            torch.autograd.grad(y, x)
    return seen[0] if len(seen) == 1 else None


def _counts(args: Any) -> _Counts | None:
    """Holders of the first argument, of its Python object, and of its storage.

    Python's calls hold what they are given once more, or not, as an evaluator of frames
    is in place (Dynamo's stays after the first compilation). So the tensor is not given
    to a function of ours.

    Seen in torch 2.9 to 2.13. Where a name is gone, None.
    """
    of_tensor: Any = getattr(args[0], "_use_count", None)
    of_storage: Any = getattr(torch._C, "_storage_Use_Count", None)
    if of_tensor is None or of_storage is None:
        return None
    held = int(of_tensor()), int(of_storage(args[0].untyped_storage()._cdata))
    return held[0], sys.getrefcount(args[0]), held[1]


def _number(node: Any) -> int | None:
    """Number of a node, None without one.

    Not its ``id``: the Python object of a node may be made anew, where another was.
    """
    return None if node is None else int(node._sequence_nr())


def _is_dense(tensor: Tensor) -> bool:
    """True if its numbers fill a part of memory without gaps, in any order."""
    expected = 1
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(pair for pair in pairs if pair[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return True
