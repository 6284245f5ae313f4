"""Times of jobs: by the host's clock on CPUs, by events on GPUs.

    host   F0 B0 W0 ...                    issues kernels, and runs ahead
    GPU    |e   F0   e|e   B0   e| ...     events in the stream, around each job

To record an event makes nobody wait. Who asks for the times waits for one more event:
the host's clock then says when that was, and all others are counted back from it. So
processes of one machine share a time axis.
"""

import platform
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.profiler import record_function

from zbpp.core import Job, Slot
from zbpp.runtime.support.devices import runs_ahead
from zbpp.runtime.support.streams import recorded_event
from zbpp.runtime.support.torch_internals import profiling

__all__ = ["JobTimes", "Timed", "clock_offsets"]

_WINDOW = 10
"""Steps that are kept."""

Mark = tuple[Job, Any, Any]
"""A job, and what was noted before and after it: seconds, or events."""


def clock_offsets(gather: Callable[[Any], list[Any]]) -> list[float]:
    """Seconds by which the clock of each process is ahead of the first one's.

    Every rank must call. Processes of one machine read one clock; those of several are
    read behind a barrier, so an offset is as exact as all leave it together.
    """
    gather(None)
    readings = gather((platform.node(), time.perf_counter()))
    ahead: dict[str, float] = {}
    for machine, now in readings:
        ahead.setdefault(machine, now - readings[0][1])
    return [ahead[machine] for machine, _ in readings]


class JobTimes:
    """Notes when the jobs of one stage run.

    Args:
        device: where they run.
    """

    def __init__(self, device: torch.device) -> None:
        self._has_events = runs_ahead(device)
        self.now: Callable[[], Any] = time.perf_counter
        """Note the present: a number on CPUs, an event on GPUs."""
        if self._has_events:
            self.now = partial(recorded_event, device)
        self.is_profiled = False
        """A profiler records the step that runs."""
        self._steps: deque[tuple[list[Mark], list[tuple[Any, Any]]]]
        self._steps = deque(maxlen=_WINDOW)
        self.marks: list[Mark] = []
        """Of the step that runs; `Timed` and collectives append to it."""
        self.norms: list[tuple[Any, Any]] = []
        """Before and after the norms of the step that runs, which are in no job."""
        self._norms_began: Any = None

    def begin(self, *, training: bool) -> None:
        """Start a step; what an evaluation notes is forgotten."""
        self.marks, self.norms, self._norms_began = [], [], None
        self.is_profiled = profiling()
        if training:
            self._steps.append((self.marks, self.norms))

    def begin_norms(self) -> None:
        """Note that the norms of a step begin, unless they have begun."""
        if self._norms_began is None:
            self._norms_began = self.now()

    def end_norms(self) -> None:
        """Note that they have ended."""
        self.norms.append((self._norms_began, self.now()))
        self._norms_began = None

    def forget(self) -> None:
        """Forget the steps so far: those to come are of another schedule."""
        self._steps.clear()

    def steps(self, n: int = 1) -> list[list[Slot]]:
        """The jobs of the last steps, oldest first, in seconds; no more than are kept.

        On a GPU this waits until the jobs have run.
        """
        in_s = self._reader()
        return [
            [Slot(job, in_s(start), in_s(end)) for job, start, end in marks]
            for marks, _ in self._last(n)
        ]

    def norm_seconds(self, n: int = 1) -> list[float]:
        """Times of the gradients' norms in the last steps; as `steps`."""
        in_s = self._reader()
        return [
            in_s(end) - in_s(start)
            for _, norms in self._last(n)
            for start, end in norms
        ]

    def _last(self, n: int) -> list[tuple[list[Mark], list[tuple[Any, Any]]]]:
        return list(self._steps)[-n:] if n > 0 else []

    def _reader(self) -> Callable[[Any], float]:
        """Return what tells when something was noted, by the host's clock."""
        if not self._has_events:
            return float
        last = self.now()
        last.synchronize()
        now_s = time.perf_counter()
        return lambda event: now_s - event.elapsed_time(last) / 1e3


class Timed:
    """Within it a job runs: it leaves its times, and a range under a profiler.

    A job that ends by an exception leaves no times.

    Args:
        times: of the stage.
        job: whose work it is.
    """

    __slots__ = ("_job", "_range", "_start", "_times")

    def __init__(self, times: JobTimes, job: Job) -> None:
        self._times, self._job = times, job
        self._range = record_function(str(job)) if times.is_profiled else None

    def __enter__(self) -> None:
        self._start = self._times.now()
        if self._range is not None:
            self._range.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if self._range is not None:
            self._range.__exit__(kind, *error)
        if kind is None:
            times = self._times
            times.marks.append((self._job, self._start, times.now()))
