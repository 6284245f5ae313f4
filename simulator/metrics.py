"""Figures of a timeline, simulated or measured: spans, bubble rate, memory.

Times are in the unit of the timeline: that of its costs, or of the clock of the run.
Spans and work count passes only: the optimizer is no part of the bubble rate, but of
the step time.

             |<---------- span of stage 0 --------->|
    stage 0  | F0  F1  .   B0  F2  B1  W0  B2  W1  W2  O
    stage 1  | .   F0  B0  F1  B1  F2  B2  W0  W1  W2  O
             |<-------------- step time --------------->|
"""

from collections.abc import Callable
from functools import wraps
from itertools import chain
from operator import itemgetter
from typing import ParamSpec, TypeVar

from zbpp.core import (
    Costs,
    Job,
    Part,
    RequestError,
    Slot,
    Step,
    Timeline,
    a_kind,
    passes_in,
    peaks,
)
from zbpp.core.timeline import extent

_P = ParamSpec("_P")
_R = TypeVar("_R")


def takes_timelines(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let a function refuse anything but a timeline or a list of timelines."""

    @wraps(function)
    def taking(*args: _P.args, **more: _P.kwargs) -> _R:
        first = args[0] if args else ()
        for entry in first if isinstance(first, list | tuple) else [first]:
            if not isinstance(entry, Timeline):
                raise RequestError(
                    f"{function.__name__} takes a Timeline, not {a_kind(entry)}; "
                    "zbpp.simulator.simulate(schedule, costs) returns one"
                )
        return function(*args, **more)

    return taking


@takes_timelines
def stage_span(timeline: Timeline, stage: int) -> float:
    """Time from the start of a stage's first pass to the end of its last one."""
    return extent(x for x in timeline.slots[stage] if passes_in(x.job))


@takes_timelines
def span(timeline: Timeline) -> float:
    """Largest span of a stage: the time of a step if steps could follow tightly.

    They can where each step is validated during the next one (`steady_step_time`).
    """
    return max(stage_span(timeline, stage) for stage in _stages(timeline))


@takes_timelines
def makespan(timeline: Timeline) -> float:
    """Time from the first start to the last end of a pass, over all stages."""
    return extent(chain.from_iterable(map(timeline.passes, _stages(timeline))))


@takes_timelines
def step_time(timeline: Timeline) -> float:
    """Time from the first start to the last end of any job, optimizer included.

    Collectives count too. Of one iteration alone: among many it may be less
    (`steady_step_time`).
    """
    return extent(chain.from_iterable(timeline.lines))


@takes_timelines
def work(timeline: Timeline) -> list[float]:
    """Time that each stage computes passes."""
    return [
        sum(slot.duration for slot in timeline.passes(stage))
        for stage in _stages(timeline)
    ]


@takes_timelines
def idle(timeline: Timeline) -> list[float]:
    """Time that each stage computes nothing, within its span."""
    stages = enumerate(work(timeline))
    return [stage_span(timeline, stage) - busy for stage, busy in stages]


@takes_timelines
def bubble_rate(timeline: Timeline) -> float:
    """Bubble of the bottleneck, 0 to 1 (Qi et al., arXiv 2401.10241); of one iteration.

    (largest span - work of the busiest stage) / largest span: the share of the time
    that a perfect order of the same passes could save. Of unequal stages these are two
    stages, so no stage need be idle for that share; `idle` tells of each. It is not
    taken from the makespan: stages may start and end at different times without losing
    any.
    """
    longest = span(timeline)
    return _above_zero(longest - max(work(timeline)), longest)


@takes_timelines
def waste(timeline: Timeline) -> tuple[str, float]:
    """Return the figure in a picture's title: bubble rate; of several iterations, idle.

    Between iterations O and V are no bubble: of all the time that the slowest stage
    takes, idle is what it spends in no job.
    """
    steps = [slot for slot in timeline.rows[0] if isinstance(slot.job, Step)]
    if len(steps) < 2:
        return "bubble rate", bubble_rate(timeline)
    longest = max(extent(row) for row in timeline.rows)
    most = max(sum(slot.duration for slot in row) for row in timeline.rows)
    return "idle", _above_zero(longest - most, longest)


def _above_zero(part: float, whole: float) -> float:
    """Share of a whole; where a sum was rounded below zero, zero."""
    return max(0.0, part) / whole if whole > 0 else 0.0


@takes_timelines
def memory_over_time(
    timeline: Timeline, costs: Costs
) -> list[list[tuple[float, float]]]:
    """List for each stage when its memory changes, and its memory from then on.

    Times are those of the timeline, memory is in the unit of the costs. What is fixed
    is there from the first start. F takes its memory when it starts; B, W
    and BW leave less, or more, when they end; and inside each is its peak:

      memory |          peak_f
             |        ____
             |       |    |__m_b__ ...
             | fixed |
             |_______F____________ time

    Raises:
        RequestError: the costs do not fit the placement.
    """
    times = costs.on(timeline.placement)
    origin = min((row[0].start for row in timeline.rows if row), default=0.0)
    curves = []
    for stage, memory in enumerate(times.fixed):
        jobs: dict[Job | Slot, tuple[Job, float, float]] = {}
        for slot in timeline.slots[stage]:
            job: Job = slot.job.of if isinstance(slot.job, Part) else slot.job
            key = job if isinstance(slot.job, Part) else slot  # parts of a pass are one
            _, start, _ = jobs.get(key, (job, slot.start, slot.end))
            jobs[key] = job, start, slot.end
        changes = []
        for job, start, end in jobs.values():
            peak = times.peak(job)
            changes += [(start, peak), (end, times.change(job) - peak)]
        changes.sort(key=itemgetter(0))  # at one time a job ends before the next starts
        curve = [(origin, memory)] if memory else []
        for time, change in changes:
            memory += change
            if change:
                if curve and curve[-1][0] == time and curve[-1][1] <= memory:
                    curve.pop()  # a peak stays, even of a job that takes no time
                curve.append((time, memory))
        curves.append(curve)
    return curves


@takes_timelines
def peak_memory(timeline: Timeline, costs: Costs) -> list[float]:
    """Largest memory of each stage, fixed memory and peaks included.

    In the unit of the costs.

    Raises:
        RequestError: the costs do not fit the placement.
    """
    orders = [[slot.job for slot in row] for row in timeline.slots]
    return peaks(orders, costs.on(timeline.placement))


def _stages(timeline: Timeline) -> range:
    return range(timeline.placement.n_stages)
