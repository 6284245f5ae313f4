"""Graphs of a CPU, for tests: they do to memory what a GPU's graphs do.

    record     the function runs, and all its calls are noted; then everything is as if
               it had not run, and what it has made is NaN
    replay     the same calls, on the memory of the first run

So a pass that reads what no graph has written, or memory of another micro-batch, ends
with other numbers. As on a GPU, nobody is told of a replay: no version is counted.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["TapePool"]

Calls = list[tuple[Any, Any, Any, Any]]


class TapePool:
    """A pool; its graphs must be run in the order in which they were recorded."""

    def __init__(self) -> None:
        self.n_replays: list[int] = []

    def record(self, action: Callable[[], None]) -> Callable[[], None]:
        """Record what an action does, and undo it; return what does it again."""
        tape = _Tape()
        with tape:  # type: ignore[no-untyped-call]
            action()
        tape.undo()
        place = len(self.n_replays)
        self.n_replays.append(0)

        def replay() -> None:
            before = self.n_replays[:place]
            assert all(n > self.n_replays[place] for n in before), self.n_replays
            self.n_replays[place] += 1
            _replay(tape.calls)

        return replay


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Calls = []
        self._own: dict[int, Tensor] = {}
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a graph cannot wait for the device")
        for x in _written(func, args, kwargs or {}):
            key = _storage(x)
            if key not in self._own and key not in self._before:
                self._before[key] = x.data, x.data.clone()
        known = {_storage(x) for x in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for y in _tensors(result):
            if _storage(y) not in known:
                self._own[_storage(y)] = y.data
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def undo(self) -> None:
        """Give the memory of others its values, and own memory none."""
        for x, copy in self._before.values():
            x.copy_(copy)
        for y in self._own.values():
            if y.is_floating_point():
                y.fill_(float("nan"))


def _replay(calls: Calls) -> None:
    with torch.no_grad():
        for func, args, kwargs, results in calls:
            own_args, own_kwargs = tree_map(_data, (args, kwargs))
            found = _tensors(func(*own_args, **own_kwargs))
            for y, new in zip(_tensors(results), found, strict=True):
                if _storage(y) != _storage(new):
                    y.data.copy_(new)


def _data(x: Any) -> Any:
    return x.data if isinstance(x, Tensor) else x


def _tensors(thing: Any) -> list[Tensor]:
    return [x for x in tree_leaves(thing) if isinstance(x, Tensor)]


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Tensors that a call writes to."""
    found = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            found += _tensors(given)
    return found
