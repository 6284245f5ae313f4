"""Times of jobs: by the host's clock on CPUs, by events on GPUs.

    host   F0 B0 W0 ...                    issues kernels, and runs ahead
    GPU    |e   F0   e|e   B0   e| ...     events in the stream, around each job

Recording an event blocks nothing. Reading the times waits for one more event, notes the
host's clock then, and counts the other events back from it. So processes of one machine
share a time axis.
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

_WINDOW = 10
"""Steps whose times stay in memory."""

Mark = tuple[Job | None, Any, Any]
"""A job, or None for norms, and the seconds or events of its start and end."""


def clock_offsets(gather: Callable[[Any], list[Any]]) -> list[float]:
    """Seconds by which the clock of each process is ahead of the first one's.

    Processes of one machine share a clock. The clocks of several machines are read
    after a barrier: an offset is as exact as they leave it together.
    """
    gather(None)
    readings = gather((platform.node(), time.perf_counter()))
    ahead: dict[str, float] = {}
    for machine, now in readings:
        ahead.setdefault(machine, now - readings[0][1])
    return [ahead[machine] for machine, _ in readings]


class JobTimes:
    """Times of the jobs of one stage, and of its norms, over the last steps."""

    def __init__(self, device: torch.device) -> None:
        self._has_events = runs_ahead(device)
        self.now: Callable[[], Any] = time.perf_counter
        """The present: a number on CPUs, a recorded event on GPUs."""
        if self._has_events:
            self.now = partial(recorded_event, device)
        self.is_profiled = False
        """A profiler records the present step."""
        self._steps: deque[list[Mark]] = deque(maxlen=_WINDOW)
        self.marks: list[Mark] = []
        """Of the present step; `Timed` and collectives append to it."""
        self._norms_began: Any = None

    def begin(self, *, training: bool) -> None:
        """Start a step; the times of an evaluation are not stored."""
        self.marks, self._norms_began = [], None
        self.is_profiled = profiling()
        if training:
            self._steps.append(self.marks)

    def begin_norms(self) -> None:
        """Note the start of the norms of a step, unless it is noted."""
        if self._norms_began is None:
            self._norms_began = self.now()

    def end_norms(self) -> None:
        """Note the end of the norms."""
        self.marks.append((None, self._norms_began, self.now()))
        self._norms_began = None

    def forget(self) -> None:
        """Drop the steps so far, when the schedule changes."""
        self._steps.clear()

    def steps(self, n: int = 1) -> list[list[Slot]]:
        """The jobs of at most ``n`` last steps, oldest first, in seconds.

        On a GPU this waits until the jobs have run.
        """
        return [
            [Slot(job, start, end) for job, start, end in step if job is not None]
            for step in self._read(n)
        ]

    def norm_seconds(self, n: int = 1) -> list[float]:
        """Times of the gradients' norms in the last steps."""
        marks = [mark for step in self._read(n) for mark in step]
        return [end - start for job, start, end in marks if job is None]

    def _read(self, n: int) -> list[list[tuple[Job | None, float, float]]]:
        """The marks of the last steps, in seconds of the host's clock."""
        in_s: Callable[[Any], float] = float
        if self._has_events:
            last = self.now()
            last.synchronize()
            now_s = time.perf_counter()
            in_s = lambda event: now_s - event.elapsed_time(last) / 1e3  # noqa: E731
        steps = list(self._steps)[-n:] if n > 0 else []
        return [[(job, in_s(a), in_s(b)) for job, a, b in marks] for marks in steps]


class Timed:
    """Context of a job: notes its times, and names it to a profiler that records.

    A job that raises has no times.
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
