"""Amounts of memory as text.

A memory has the unit of its costs (``memory_unit``): bytes, or any one other, such as
M_B or GB. What may be compared with what: `zbpp.core.costs.units`.
"""

import math

__all__ = ["BYTES_FROM", "format_bytes", "format_memory"]

BYTES_FROM = 2**20
"""Nobody counts so many of M_B."""
_POWERS = (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10))


def format_bytes(amount: float, *, round_up: bool = False) -> str:
    """Write bytes with a unit, three digits or more.

    >>> format_bytes(0), format_bytes(1536), format_bytes(42949672960)
    ('0 B', '1.50 KiB', '40.0 GiB')
    >>> format_bytes(1537), format_bytes(1537, round_up=True)
    ('1.50 KiB', '1.51 KiB')
    """
    for unit, power in _POWERS:
        if abs(amount) >= 2**power:
            number = amount / 2**power
            digits = 2 if abs(number) < 10 else 1 if abs(number) < 100 else 0
            if round_up:
                number = math.ceil(number * 10**digits * (1 - 1e-12)) / 10**digits
            return f"{number:.{digits}f} {unit}"
    return f"{math.ceil(amount) if round_up else amount:.0f} B"


def format_memory(amount: float, unit: str | None, *, round_up: bool = False) -> str:
    """Write a memory in its unit.

    Args:
        amount: to write.
        unit: ``memory_unit`` of the costs: "bytes", or None for any other one.
        round_up: for limits to be typed again.

    >>> format_memory(8.0, None), format_memory(3 * 2**30, "bytes")
    ('8', '3.00 GiB')
    """
    if unit == "bytes" and math.isfinite(amount):
        return format_bytes(amount, round_up=round_up)
    return f"{amount:g}"
