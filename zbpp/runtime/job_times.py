"""Times of jobs: by the host's clock on CPUs, by events on GPUs.

    host   F0 B0 W0 ...                    issues kernels, and runs ahead
    GPU    |e   F0   e|e   B0   e| ...     events in the stream, around each job

To record an event makes nobody wait. What the events say is read when somebody asks for
it; each step begins with one of its own, from which the others are counted, so that the
float32 of an elapsed time is fine enough. The first one is waited for, to learn what
the host's clock read when it passed: so processes of one machine share a time axis.
"""

import platform
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.profiler import record_function

from zbpp.core import Job, Slot
from zbpp.runtime.support.devices import runs_ahead
from zbpp.runtime.support.streams import Event, MakeEvent, timed_event
from zbpp.runtime.support.torch_internals import profiling

__all__ = ["JobTimes", "Timed", "clock_offsets"]

_WINDOW = 10


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
        make_event: gives an event; None: torch's where the device has them.
        window: steps that are kept.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        make_event: MakeEvent | None = None,
        window: int = _WINDOW,
    ) -> None:
        if make_event is None and runs_ahead(device):
            make_event = partial(timed_event, device)
        self._make_event = make_event
        self.now: Callable[[], Any] = time.perf_counter
        """Note the present: a number on CPUs."""
        if make_event is not None:
            self.now = self._record
        self.is_profiled = False
        """A profiler records the step that runs."""
        self._base: _Base | None = None
        self._steps: deque[_Noted] = deque(maxlen=window)
        self.marks: list[Mark] = []
        """Of the step that runs; `Timed` and collectives append to it."""
        self.norms: list[tuple[Any, Any]] = []
        """Before and after the norms of the step that runs, which are in no job."""
        self._norms_began: Any = None

    def begin(self, *, training: bool) -> None:
        """Start a step; what an evaluation notes is forgotten."""
        self.marks, self.norms, self._norms_began = [], [], None
        self.is_profiled = profiling()
        if not training:
            return
        if self._make_event is not None:
            before, event = self._base, self._record()
            self._base = _Base(event, before)
            if before is None:
                event.synchronize()
                self._base.start(time.perf_counter())
            elif before.event.query():
                before.time_s()  # so that no long chain builds up
        self._steps.append(_Noted(self._base, self.marks, self.norms))

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
        return [_read(step.base, step.marks) for step in self._last(n)]

    def norm_seconds(self, n: int = 1) -> list[float]:
        """Times of the gradients' norms in the last steps; as `steps`."""
        times_s = []
        for step in self._last(n):
            if step.base is None:
                times_s += [end - start for start, end in step.norms]
            elif step.norms:
                step.norms[-1][1].synchronize()
                times_s += [start.elapsed_time(end) / 1e3 for start, end in step.norms]
        return times_s

    def _last(self, n: int) -> "list[_Noted]":
        return list(self._steps)[-n:] if n > 0 else []

    def _record(self) -> Event:
        assert self._make_event is not None
        event = self._make_event()
        event.record()
        return event


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


@dataclass(frozen=True)
class _Noted:
    base: "_Base | None"
    marks: list[Mark]
    norms: list[tuple[Any, Any]]


class _Base:
    """An event whose time on the host's clock is known, or follows from another's."""

    def __init__(self, event: Event, before: "_Base | None") -> None:
        self.event = event
        self._before = before
        self._time_s: float | None = None

    def start(self, time_s: float) -> None:
        self._time_s, self._before = time_s, None

    def time_s(self) -> float:
        if self._time_s is None:
            before = self._before
            assert before is not None, "the first event knows its time"
            self.start(before.time_s() + before.event.elapsed_time(self.event) / 1e3)
        assert self._time_s is not None
        return self._time_s


def _read(base: _Base | None, marks: list[Mark]) -> list[Slot]:
    if base is None:
        return [Slot(job, start, end) for job, start, end in marks]
    if marks:
        marks[-1][2].synchronize()  # the stream has then passed all before it
    zero = base.time_s()
    return [
        Slot(
            job,
            zero + base.event.elapsed_time(start) / 1e3,
            zero + base.event.elapsed_time(end) / 1e3,
        )
        for job, start, end in marks
    ]
