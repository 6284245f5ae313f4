"""Load the compiled loops."""

import ctypes
import logging
import os
from hashlib import sha256
from pathlib import Path

__all__ = ["check", "library"]

_GIVEN_UP = 1  # as in loops.h
_LOG = logging.getLogger("zbpp")


def _is_stale(found: ctypes.CDLL) -> bool:
    """True if a checkout's sources are not those that the loops were built of."""
    files = sorted(Path(__file__).parent.glob("*.[ch]"))
    if not files:  # installed from a wheel
        return False
    stamp = sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    try:
        built = ctypes.c_char_p.in_dll(found, "zbpp_stamp")
    except ValueError:
        return True
    return built.value != stamp.encode()


def _load() -> ctypes.CDLL | None:
    """The loops as they were built; None without, or if they are switched off."""
    if os.environ.get("ZBPP_COMPILED") == "0":
        return None
    path = Path(__file__).with_name("loops.shared")
    try:
        found = ctypes.CDLL(str(path))
    except OSError:  # there was no compiler, or it is of another machine
        return None
    if _is_stale(found):
        _LOG.warning(
            "the compiled planner was built of other sources, so Python plans, slower; "
            "install the checkout again (pip install -e .)"
        )
        return None
    for name in ("list_schedule", "time_rows", "improve"):
        getattr(found, f"zbpp_{name}").restype = ctypes.c_int64
    return found


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
