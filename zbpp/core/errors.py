"""Errors that the caller can correct, and words of their messages.

Memory is counted in bytes, or in any other unit in which amounts are small, such as
M_B. From 1 MiB on an amount is written as bytes.
"""

import math


class RequestError(ValueError):
    """The request was wrong or cannot be met; the message names the correction."""


class LimitError(RequestError):
    """A memory limit is too low.

    Args:
        reason: the schedule or part that needs more.
        smallest: the limit for all stages that works.
    """

    def __init__(self, reason: str, smallest: float) -> None:
        super().__init__(reason, smallest)
        self.reason = reason
        self.smallest = smallest

    def __str__(self) -> str:
        smallest = format_memory(self.smallest, round_up=True)
        return (
            f"{self.reason}; the smallest limit that works is {smallest}: take "
            f"smaller micro-batches, or raise memory_limit to {smallest} or more"
        )


class ScheduleError(RequestError):
    """A schedule breaks a rule; the message marks the place in its grid."""


class WorkerError(RuntimeError):
    """A process of a pipeline failed; the message is one line."""


# ---- Words.


def a_kind(thing: object) -> str:
    """Name the class of a thing in a message, with its article.

    A ``U`` is mostly spoken as in UNet.

    >>> a_kind(1.5), a_kind(3)
    ('a float', 'an int')
    """
    name = type(thing).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


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


def format_memory(amount: float, *, round_up: bool = False) -> str:
    """Write an amount as `parse_memory` reads it; ``round_up`` for limits.

    >>> format_memory(8.0), format_memory(3 * 2**30)
    ('8', '3.00 GiB')
    """
    if 2**20 <= amount < math.inf:
        return format_bytes(amount, round_up=round_up)
    return f"{amount:g}"
