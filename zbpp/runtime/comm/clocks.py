"""Clocks of the processes of a pipeline, compared where they are not the same.

    process 0   start ----- gather ------- end        by its own clock
    process 1        start --- gather ---- end        by its own clock

No process leaves a gather before all have come to it. So what process 1 has read at its
start lies before the end of process 0, and what process 0 has read at its start before
the end of process 1: the difference of the clocks lies between two bounds. Of several
gathers the tightest bounds count; their middle is taken, and half their distance is
the largest error that it can have.
"""

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Clocks", "clock_name", "compare_clocks"]

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_ROUNDS = 20


@dataclass(frozen=True)
class Clocks:
    """Clocks of processes, by rank.

    Args:
        ahead_s: seconds by which each one is ahead of the first.
        error_s: the largest error of these; 0.0 where all read one clock.
    """

    ahead_s: tuple[float, ...]
    error_s: float = 0.0


def clock_name() -> str:
    """Name the clock that `time.perf_counter` reads: that of the running system.

    On Linux it counts from the boot, for all processes of a machine, and the boot has
    a number of its own; elsewhere the machine's name stands for it.
    """
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return f"{platform.node()} {platform.system()}"


def compare_clocks(
    gather: Callable[[Any], list[Any]], names: Sequence[str], rounds: int = _ROUNDS
) -> Clocks:
    """Compare the clocks of all processes (every rank must call).

    Args:
        gather: gives every process the things of all.
        names: of the clocks, by rank; where all are the same, nothing is measured.
        rounds: gathers.
    """
    if len(set(names)) < 2:
        return Clocks((0.0,) * len(names))
    own = []
    for _ in range(rounds):
        start = time.perf_counter()
        gather(None)
        own.append((start, time.perf_counter()))
    read: list[list[tuple[float, float]]] = gather(own)
    bounds = {name: _bounds(name, names, read) for name in set(names) - {names[0]}}
    bounds[names[0]] = (0.0, 0.0)
    return Clocks(
        tuple(sum(bounds[name]) / 2 for name in names),
        max((high - low) / 2 for low, high in bounds.values()),
    )


def _bounds(
    name: str, names: Sequence[str], read: Sequence[Sequence[tuple[float, float]]]
) -> tuple[float, float]:
    """Least and most that a clock can be ahead of the first one."""
    low, high = float("-inf"), float("inf")
    for one, other in zip(*_sides(name, names, read), strict=True):
        low = max(low, max(s for s, _ in one) - min(e for _, e in other))
        high = min(high, min(e for _, e in one) - max(s for s, _ in other))
    return low, high


def _sides(
    name: str, names: Sequence[str], read: Sequence[Sequence[tuple[float, float]]]
) -> tuple[list[Any], list[Any]]:
    """Starts and ends of each round: of a clock's processes, and of the first one's."""
    parts = []
    for clock in (name, names[0]):
        rows = [row for row, of in zip(read, names, strict=True) if of == clock]
        parts.append(list(zip(*rows, strict=True)))
    return parts[0], parts[1]
