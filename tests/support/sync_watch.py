"""Find what makes the host wait for a device, or would on one with memory of its own.

Two modes look at a run. One sees operators that bring a number to the host (below
``.item()``, ``float(x)``, ``bool(x)``, ``.tolist()`` it is one of aten's), or whose
result has a size that only the device knows; the other sees calls that copy between
host and device, which do nothing where there is only a host. Each is noted by the
function of zbpp that calls it.
"""

import sys
from collections import Counter
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READS = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::_unique2",
}
"""Operators whose result the host waits for."""

COPIES = {"cpu", "cuda", "numpy", "to", "tolist"}
"""Methods of tensors; ``to`` counts if it is given a device."""


class SyncWatch:
    """Within this, waits are counted: ``found["file.py:function", "what"]``."""

    def __init__(self) -> None:
        self.found: Counter[tuple[str, str]] = Counter()
        self._modes = _Reads(self.found), _Copies(self.found)

    def __enter__(self) -> Self:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(kind, error, trace)


class _Reads(TorchDispatchMode):
    def __init__(self, found: Counter[tuple[str, str]]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ):
        name = func._schema.name
        masked = name in ("aten::index.Tensor", "aten::index_put_") and any(
            isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1]
        )
        if name in READS or masked:
            self._found[_caller(), name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


class _Copies(TorchFunctionMode):
    def __init__(self, found: Counter[tuple[str, str]]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ):
        name = getattr(func, "__name__", "")
        if name in COPIES and isinstance(args[0], Tensor):
            to = (*args[1:], *(kwargs or {}).values())
            names = name != "to" or any(
                isinstance(x, torch.device | str | Tensor) for x in to
            )
            if names:
                self._found[_caller(), name] += 1
        return func(*args, **(kwargs or {}))


def _caller() -> str:
    """The innermost function of zbpp that is running."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/zbpp/" in path or "small_model" in path:
            file = path.rpartition("/")[2]
            return f"{file}:{frame.f_code.co_qualname}"
        frame = frame.f_back
    return "elsewhere"


def waits_of(step: Any, *args: Any) -> Counter[tuple[str, str]]:
    """Count the waits within one call."""
    with SyncWatch() as watch:
        step(*args)
    return watch.found
