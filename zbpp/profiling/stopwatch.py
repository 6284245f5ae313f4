"""Time pieces of work on one device; means and quartiles of the times.

A step is a sum of passes, so its expectation follows from the mean of each pass's
time. These times are skewed: most passes are about as fast as the machine can be, and
some wait for a core. A median leaves these out, and steps are then predicted short.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from statistics import fmean, quantiles
from typing import Any, TypeVar

import torch

from zbpp.runtime.job_times import JobTimes
from zbpp.runtime.overlap import marked

__all__ = ["Stopwatch", "robust_mean"]

_T = TypeVar("_T")
_MS = 1e3
_FAR = 5.0
"""Quartile ranges above the upper quartile; exponential times lose .2 % there."""


def robust_mean(values: Sequence[float]) -> float:
    """Mean of times, where those that are far out count as no more than far.

    Far is five quartile ranges above the upper quartile (Tukey's far out is three): a
    tail of slow passes counts, and a spell in which the machine was elsewhere hardly
    does. Nothing gives 0.

    >>> robust_mean([1.0, 2.0, 3.0, 4.0, 100.0])
    4.8
    """
    if len(values) < 2:
        return values[0] if values else 0.0
    low, _, high = quantiles(values, method="inclusive")
    far = high + _FAR * (high - low)
    return fmean(min(value, far) for value in values)


class Stopwatch:
    """Notes when pieces of work run, by name; on GPUs with events, read at the end."""

    def __init__(self, device: torch.device) -> None:
        self._times = JobTimes(device)
        self._marks: dict[Hashable, list[tuple[Any, ...]]] = defaultdict(list)

    def time(self, name: Hashable, action: Callable[..., _T], *args: Any) -> _T:
        """Call something, and note its time."""
        start = self._times.now()
        result = action(*args)
        self._marks[name].append((start, self._times.now()))
        return result

    def time_pass(
        self, name: Hashable, action: Callable[..., _T], *args: Any, is_forward: bool
    ) -> _T:
        """Call an F or a B; note also when it communicates, see `parts`."""
        now = self._times.now
        start = now()
        with marked(now, is_forward=is_forward) as points:
            result = action(*args)
        self._marks[name].append((start, *points, now()))
        return result

    def forget(self) -> None:
        """Count nothing of what has been timed so far: it was the warm-up."""
        self._marks.clear()

    def mean(self, name: Hashable) -> float:
        """Robust mean of the times of one piece of work, in ms."""
        return robust_mean([_ms(marks[0], marks[-1]) for marks in self._marks[name]])

    def parts(self, name: Hashable) -> list[float]:
        """Mean times, in ms, of what a pass computes, communicates, computes, ...

        One alone where it communicates nothing, or not equally often in all calls.
        """
        calls = self._marks[name]
        if len(set(map(len, calls))) != 1:
            return [self.mean(name)]
        columns = zip(*calls, strict=True)
        return [
            robust_mean([*map(_ms, starts, ends)]) for starts, ends in pairwise(columns)
        ]


def _ms(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return _MS * (float(end) - start)
    end.synchronize()
    return float(start.elapsed_time(end))
