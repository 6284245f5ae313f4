"""Load the compiled loops, and hand them structures and arrays."""

import ctypes
import logging
import os
from array import array
from collections.abc import Callable, Iterable
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["Structure", "check", "doubles", "kept", "library", "pointer", "whole"]

T = TypeVar("T")
_GIVEN_UP = 1  # as in loops.h
_LOG = logging.getLogger("zbpp")


def _is_stale(loops: ctypes.CDLL) -> bool:
    """True if a checkout's sources are not those that the loops were built of."""
    files = sorted(Path(__file__).parent.glob("*.[ch]"))
    if not files:  # installed from a wheel
        return False
    stamp = sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    try:
        built = ctypes.c_char_p.in_dll(loops, "zbpp_stamp")
    except ValueError:
        return True
    return built.value != stamp.encode()


def _load() -> ctypes.CDLL | None:
    """The loops as they were built; None without, or if they are switched off."""
    if os.environ.get("ZBPP_COMPILED") == "0":
        return None
    path = Path(__file__).with_name("loops.shared")
    try:
        loops = ctypes.CDLL(str(path))
    except OSError:  # there was no compiler, or it is of another machine
        return None
    if _is_stale(loops):
        _LOG.warning(
            "the compiled planner was built of other sources, so Python plans, slower; "
            "install the checkout again (pip install -e .)"
        )
        return None
    for name in ("list_schedule", "time_rows", "improve", "schedule_lanes"):
        getattr(loops, f"zbpp_{name}").restype = ctypes.c_int64
    return loops


library = _load()
"""The compiled loops, or None."""


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


def kept(problem: T, make: Callable[[T], Structure]) -> Structure:
    """The structure of a problem, made once: it lives with it, as its properties do."""
    values = vars(problem)
    if "flat" not in values:
        values["flat"] = make(problem)
    flat: Structure = values["flat"]
    return flat


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
