"""Time pieces of work on one device; means, medians and quartiles of the times.

A step is a sum of passes, so its expectation follows from the mean of each pass's
time. These times are skewed: most passes are about as fast as the machine can be, and
some wait for a core. A median leaves these out, and steps are then predicted short.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise
from operator import add
from statistics import fmean, median, quantiles
from typing import Any, TypeVar

import numpy as np
import torch

from zbpp.runtime.job_times import JobTimes
from zbpp.runtime.overlap import marked

__all__ = ["Spread", "Stopwatch", "robust_mean", "spread"]

_T = TypeVar("_T")
_MS = 1e3
_FAR = 5.0
"""Quartile ranges above the upper quartile; exponential times lose .2 % there."""


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of some times, in ms, and the mean that costs are made of.

    ``mean`` is that of `robust_mean`.
    """

    median: float
    low: float
    high: float
    mean: float

    def scaled(self, factor: float) -> "Spread":
        """Return it times a factor."""
        return Spread(*(factor * statistic for statistic in astuple(self)))

    def with_mean(self, mean: float) -> "Spread":
        """Return it times what makes the mean another."""
        return self.scaled(mean / self.mean) if self.mean > 0 else self + mean

    def __add__(self, more: "float | Spread") -> "Spread":
        others = astuple(more) if isinstance(more, Spread) else (more,) * 4
        return Spread(*map(add, astuple(self), others))


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


def spread(seconds: Iterable[float]) -> Spread:
    """Median, quartiles and mean, in ms; nothing gives zeros.

    >>> spread([0.001, 0.002, 0.003, 0.004, 0.1])
    Spread(median=3.0, low=2.0, high=4.0, mean=4.8)
    """
    ordered = sorted(_MS * duration for duration in seconds)
    if not ordered:
        return Spread(0.0, 0.0, 0.0, 0.0)
    return Spread(
        median=median(ordered),
        low=float(np.quantile(ordered, 0.25)),
        high=float(np.quantile(ordered, 0.75)),
        mean=robust_mean(ordered),
    )


class Stopwatch:
    """Notes when pieces of work run, by name; on GPUs with events, read at the end."""

    def __init__(self, device: torch.device) -> None:
        self._times = JobTimes(device)
        self._marks: dict[Hashable, list[tuple[Any, ...]]] = defaultdict(list)

    def time(self, name: Hashable, action: Callable[..., _T], *args: Any) -> _T:
        """Call something, and note its time; by several names in a tuple of them."""
        start = self._times.now()
        result = action(*args)
        self._marks[name].append((start, self._times.now()))
        return result

    def time_pass(
        self, kind: str, name: Hashable, action: Callable[..., _T], *args: Any
    ) -> _T:
        """Call an F or a B; note also when it communicates, see `parts`."""
        now = self._times.now
        start = now()
        with marked(now, is_forward=kind == "F") as points:
            result = action(*args)
        self._marks[name].append((start, *points, now()))
        return result

    def forget(self) -> None:
        """Count nothing of what has been timed so far: it was the warm-up."""
        self._marks.clear()

    def seconds(self, name: Hashable) -> list[float]:
        """The times of one piece of work, in the order of the calls."""
        return [_between(marks[0], marks[-1]) for marks in self._marks[name]]

    def parts(self, name: Hashable) -> list[float]:
        """Mean times, in ms, of what a pass computes, communicates, computes, ...

        One alone where it communicates nothing, or not equally often in all calls.
        """
        calls = self._marks[name]
        if len(set(map(len, calls))) != 1:
            return [spread(self.seconds(name)).mean]
        columns = zip(*calls, strict=True)
        return [
            spread(map(_between, starts, ends)).mean
            for starts, ends in pairwise(columns)
        ]


def _between(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return float(end) - start
    end.synchronize()
    return float(start.elapsed_time(end)) / _MS
