"""Figures of a schedule, as numbers."""

from dataclasses import dataclass, replace

from zbpp.core import Check, Costs, Schedule, format_memory
from zbpp.schedules import post_validated
from zbpp.simulator import (
    bubble_rate,
    lower_bounds,
    makespan,
    peak_memory,
    simulate,
    span,
    steady_step_time,
    step_time,
    with_rollback,
)

_ROUNDING = 1e-9  # relative


@dataclass(frozen=True)
class Summary:
    """The figures of one schedule; times and memory in the units of the costs."""

    mode: str
    n_stages: int
    n_microbatches: int
    placement: list[int]
    bubble_rate: float
    span: float
    makespan: float
    step_time: float
    peak_memory: list[float]
    """Per stage."""
    memory_bound: float | list[float]
    """The memory per stage that the lower bound assumes."""
    lower_bound: float
    """Of the span: no schedule with this placement and memory is shorter."""
    lower_bound_by: str
    gap: float
    """span / lower_bound - 1."""
    split: list[int] | None = None
    """Layers of each chunk that it was planned for; None: any."""
    recompute: list[bool | list[int]] | None = None
    """For each chunk all layers (true), none, or these; None: nothing."""


def summarize(schedule: Schedule, costs: Costs) -> Summary:
    """Simulate a schedule and compare it with the lower bound.

    The bound is for all schedules with the same placement and costs within the
    memory limit; if there is none, within the largest memory that this one takes.
    """
    timeline = simulate(schedule, costs)
    peaks = peak_memory(timeline, costs)
    limit = max(peaks) if costs.memory_limit is None else costs.memory_limit
    bounds = lower_bounds(
        schedule.placement, schedule.n_microbatches, replace(costs, memory_limit=limit)
    )
    by, bound = max(bounds.items(), key=lambda item: item[1])
    longest = span(timeline)
    if bound <= longest * (1 + _ROUNDING):
        bound = min(bound, longest)
    return Summary(
        mode=schedule.name,
        n_stages=schedule.n_stages,
        n_microbatches=schedule.n_microbatches,
        placement=list(schedule.placement.stage_of),
        bubble_rate=bubble_rate(timeline),
        span=longest,
        makespan=makespan(timeline),
        step_time=step_time(timeline),
        peak_memory=peaks,
        memory_bound=list(limit) if isinstance(limit, tuple) else limit,
        lower_bound=bound,
        lower_bound_by=by,
        gap=longest / bound - 1 if bound > 0 else 0.0,
        split=None if schedule.split is None else list(schedule.split),
        recompute=None
        if not schedule.recomputing
        else [
            which if isinstance(which, bool) else list(which)
            for which in schedule.recompute or ()
        ],
    )


def short_memory(amount: float) -> str:
    """Write a memory in four digits."""
    return format_memory(float(f"{amount:.4g}"))


@dataclass(frozen=True)
class Steady:
    """Times of one step among many, in the unit of the costs."""

    step_time_barrier: float
    """Every step waits for the sum over all stages."""
    step_time_post_validation: float
    """The sum is awaited in the next step's warm-up."""
    rollback_time: float
    """Delay of all that follows if one validation fails."""


def steady(schedule: Schedule, costs: Costs) -> Steady:
    """Simulate steps until they repeat: some ten times the work of `summarize`."""
    barrier = steady_step_time(schedule.without(Check), costs)
    return Steady(barrier, *with_rollback(post_validated(schedule), costs))
