"""Time pieces of work on one device; medians and quartiles of the times."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import torch

from zbpp.runtime.job_times import Event, JobTimes

__all__ = ["Spread", "Stopwatch", "spread"]

_T = TypeVar("_T")
_MS = 1e3


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of some times, in ms."""

    median: float
    low: float
    high: float

    def scaled(self, factor: float) -> "Spread":
        """Return it times a factor."""
        return Spread(self.median * factor, self.low * factor, self.high * factor)

    def __add__(self, more: float) -> "Spread":
        return Spread(self.median + more, self.low + more, self.high + more)


def spread(seconds: Iterable[float]) -> Spread:
    """Median and quartiles, in ms; nothing gives zeros.

    >>> spread([0.001, 0.002, 0.003, 0.004, 0.1])
    Spread(median=3.0, low=2.0, high=4.0)
    """
    ordered = sorted(_MS * one for one in seconds)
    if not ordered:
        return Spread(0.0, 0.0, 0.0)
    return Spread(median(ordered), _at(ordered, 0.25), _at(ordered, 0.75))


def _at(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


class Stopwatch:
    """Notes when pieces of work run, by name; on GPUs with events, read at the end.

    Args:
        device: where the work runs.
        make_event: as for `JobTimes`.
    """

    def __init__(
        self, device: torch.device, *, make_event: Callable[[], Event] | None = None
    ) -> None:
        self._times = JobTimes(device, make_event=make_event)
        self._marks: dict[Hashable, list[tuple[Any, Any]]] = defaultdict(list)

    def time(self, name: Hashable, action: Callable[..., _T], *args: Any) -> _T:
        """Call something, and note its time; by several names in a tuple of them."""
        start = self._times.now()
        result = action(*args)
        self._marks[name].append((start, self._times.now()))
        return result

    def forget(self) -> None:
        """Count nothing of what has been timed so far: it was the warm-up."""
        self._marks.clear()

    def seconds(self, name: Hashable) -> list[float]:
        """The times of one piece of work, in the order of the calls."""
        return [_between(start, end) for start, end in self._marks[name]]


def _between(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return float(end) - start
    end.synchronize()
    return float(start.elapsed_time(end)) / _MS
