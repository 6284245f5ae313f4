"""Effort: the work that a planner may do.

Work is counted in passes placed, not in seconds: the same request gives the same
schedule on every machine. Only ``best`` looks at the clock, at that of the CPU time of
its thread: what else runs on the machine takes nothing from it.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from zbpp.core import RequestError

_BEST_S = 60.0


def parse_effort(effort: str) -> tuple[str, float]:
    """Read ``fast``, ``default``, ``best`` or ``best:SECONDS``; seconds of the last.

    >>> parse_effort("best:2.5")
    ('best', 2.5)

    Raises:
        RequestError: it is none of these.
    """
    name, colon, number = effort.partition(":")
    try:
        seconds = float(number) if colon else _BEST_S
    except ValueError:
        seconds = math.nan
    if name == "best" and 0 <= seconds < math.inf:
        return name, seconds
    if name in ("fast", "default") and not colon:
        return name, math.inf
    raise RequestError(
        f"effort {effort!r} is not known; choose fast, default, best ({_BEST_S:g} s) "
        "or best:SECONDS"
    )


@dataclass
class Budget:
    """A number of passes, and CPU time of this thread, to spend."""

    passes: float
    seconds: float = math.inf
    spent: float = 0.0
    _end: float = field(init=False)

    def __post_init__(self) -> None:
        # reading the clock of a thread is a system call: only where it is needed
        is_timed = self.seconds < math.inf
        self._end = time.thread_time() + self.seconds if is_timed else math.inf

    def spend(self, passes: float) -> None:
        """Take some of it."""
        self.spent += passes

    @property
    def seconds_left(self) -> float:
        """Seconds until the time is over."""
        if self.seconds == math.inf:
            return math.inf
        return max(0.0, self._end - time.thread_time())

    @property
    def is_left(self) -> bool:
        """True if there is anything left to spend."""
        return self.spent < self.passes and self.seconds_left > 0


def shares(effort: str, n: int) -> Iterator[str]:
    """Efforts of plans that are made in turn; those of ``best`` share its seconds.

    What a plan leaves of its share is there for those after it.

    >>> list(shares("fast", 2))
    ['fast', 'fast']
    """
    kind, seconds = parse_effort(effort)
    budget = Budget(math.inf, seconds)
    for left in range(n, 0, -1):
        yield effort if kind != "best" else f"best:{budget.seconds_left / left:g}"
