"""The inner loops of the planner in C: loads them, and passes arrays to them.

build.py              compiles them: for setup.py, or where sources have changed
loops.h               what the loops share
list_scheduler.c      `list_scheduler`
critical_path.c       `critical_path`
"""

import ctypes
from array import array
from collections.abc import Iterable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from zbpp.core import RequestError
from zbpp.schedules.planner.compiled.build import compile_loops, sources, stamp

_GIVEN_UP = 1  # as in loops.h


@cache
def loops() -> ctypes.CDLL:
    """The compiled loops; a checkout builds them again when their sources change.

    Raises:
        RequestError: they were not built, and there is no compiler to build them now.
    """
    path = Path(__file__).with_name("loops.shared")
    is_checkout = bool(sources())
    if is_checkout and _stamp_of(path) != stamp().encode():
        _build(path)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:  # of another machine, or built without a compiler
        raise _missing() from error
    for name in ("list_schedule", "improve"):
        getattr(library, f"zbpp_{name}").restype = ctypes.c_int64
    return library


def _stamp_of(path: Path) -> bytes:
    """The hash of the sources of a library."""
    marker = b"zbpp sources "
    if not path.exists():
        return b""
    content = path.read_bytes()
    at = content.find(marker) + len(marker)
    return content[at : at + 64]


def _build(path: Path) -> None:
    try:
        fault = compile_loops(path)
    except OSError as error:
        fault = str(error)
    if fault:
        raise _missing(fault)


def _missing(fault: str = "there was no C compiler") -> RequestError:
    cause = fault.splitlines()[0]
    return RequestError(
        f"the planner's loops in C are not built ({cause}); install a C compiler or "
        "ziglang, then zbpp again; hand-made orders work without"
    )


def check(result: int) -> bool:
    """True if a loop came to its end, False if it gave up.

    Raises:
        MemoryError: it did not get the memory that it needs.
    """
    if result < 0:
        raise MemoryError("the compiled planner got no memory")
    return result != _GIVEN_UP


class Structure:
    """A structure of C, and the arrays that it points to: they live as long as it."""

    def __init__(self, **fields: "float | array[Any] | None") -> None:
        self._arrays = fields
        layout = _layout(tuple(fields), tuple(map(type, fields.values())))
        self.address = ctypes.byref(layout(*map(pointer, fields.values())))


@lru_cache
def _layout(names: tuple[str, ...], types: tuple[type, ...]) -> type[ctypes.Structure]:
    """The class of a structure: making one takes longer than scheduling few passes.

    An array's field is an address, and None is a null pointer.
    """
    numbers: dict[type, Any] = {int: ctypes.c_int64, float: ctypes.c_double}
    of_c = [numbers.get(python, ctypes.c_void_p) for python in types]
    fields = list(zip(names, of_c, strict=True))
    return type("_C", (ctypes.Structure,), {"_fields_": fields})


def pointer(value: Any) -> Any:
    """The address of an array; a number as it is."""
    is_array = isinstance(value, array)
    return ctypes.c_void_p(value.buffer_info()[0]) if is_array else value


def doubles(numbers: Iterable[float]) -> "array[float]":
    """An array of doubles."""
    return array("d", numbers)


def whole(numbers: Iterable[int]) -> "array[int]":
    """An array of whole numbers."""
    return array("q", numbers)
