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
from itertools import product
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
    readings = []
    for _ in range(rounds):
        start = time.perf_counter()
        gather(None)
        readings.append((start, time.perf_counter()))
    by_rank: list[list[tuple[float, float]]] = gather(readings)
    of_clock: dict[str, list[list[tuple[float, float]]]] = {}
    for name, row in zip(names, by_rank, strict=True):
        of_clock.setdefault(name, []).append(row)
    first = of_clock[names[0]]
    bounds = {name: _bounds(rows, first) for name, rows in of_clock.items()}
    bounds[names[0]] = (0.0, 0.0)
    return Clocks(
        tuple(sum(bounds[name]) / 2 for name in names),
        max((high - low) / 2 for low, high in bounds.values()),
    )


def _bounds(
    rows: Sequence[Sequence[tuple[float, float]]],
    first: Sequence[Sequence[tuple[float, float]]],
) -> tuple[float, float]:
    """Least and most by which one clock can be ahead of the first one.

    Args:
        rows: starts and ends of each round, of the processes that read the clock.
        first: the same, of the processes that read the first one.
    """
    rounds = [pair for a, b in product(rows, first) for pair in zip(a, b, strict=True)]
    low = max(start - first_end for (start, _), (_, first_end) in rounds)
    high = min(end - first_start for (_, end), (first_start, _) in rounds)
    return low, high
