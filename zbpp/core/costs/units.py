"""Amounts of memory as people write them: ``40GiB``."""

import re

from zbpp.core.errors import RequestError

__all__ = ["Bytes", "parse_memory"]

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_FORM = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


class Bytes(float):
    """An amount of memory that was written with a unit, so it is in bytes."""


def parse_memory(text: str) -> float:
    """Read a number, in the unit of the costs, or one with a unit, as `Bytes`.

    >>> parse_memory("40GiB"), parse_memory("1.5 MB"), parse_memory("8")
    (42949672960.0, 1500000.0, 8.0)

    Raises:
        RequestError: it is neither.
    """
    found = _FORM.fullmatch(text)
    if found is not None and (not found[2] or found[2].lower() in _UNITS):
        try:
            amount = float(found[1])
            return Bytes(amount * _UNITS[found[2].lower()]) if found[2] else amount
        except ValueError:  # two points, for instance
            pass
    raise RequestError(
        f"{text!r} is no amount of memory; write 40GiB, 512MiB, 16GB, or a number in "
        "the unit of the costs"
    )
