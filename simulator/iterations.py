"""Iterations that follow one another, behind a barrier or post-validated.

Two stages under ZB-H2 and the start of their second iteration; O and V take 1:

    barrier          0 | F0 F1 F2 B0 W0 B1 W1 B2 W2 .  O  F0 F1 F2 B0 W0
                     1 | .  F0 B0 F1 B1 F2 B2 W0 W1 W2 O  .  F0 B0 F1 B1
                                      the sum is known ^ here

    post-validation  0 | F0 F1 F2 V  B0 W0 B1 W1 B2 W2 O  F0 F1 F2 V  B0
                     1 | .  F0 V  B0 F1 B1 F2 B2 W0 W1 W2 O  F0 V  B0 F1
                                          it must be known here ^

The sum of the gradient norms starts when a stage has ended its last pass, and is known
`Costs.reduction` after the last stage has. Behind a barrier O waits for it. In a
schedule with V (see `zbpp.schedules.post_validated`) O starts at once, and V of the
next iteration waits. A stage starts an iteration when its own O has ended.

If V finds the step invalid, every stage rolls it back, steps again and replays its
passes before V. These read nothing that is computed after a V, so they form a part of
their own: the first attempts end, then the second ones begin.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from zbpp.core import (
    Check,
    Costs,
    Job,
    PassTimes,
    RequestError,
    Schedule,
    Slot,
    Step,
    Timeline,
    kind_of,
    off_lane,
    replay,
)

__all__ = [
    "IteratedSchedule",
    "IterationState",
    "SyncRule",
    "join",
    "simulate_iterations",
    "timeline_of",
]

_UNIT = Costs()

SyncRule = Callable[[PassTimes, Sequence[float]], tuple[list[float], list[float]]]
"""From the end of each stage's passes: when it may step, when its V knows the sum."""


@dataclass(frozen=True)
class IterationState:
    """State that an iteration leaves to the next one, per stage."""

    free: tuple[float, ...]
    """End of the stage's O."""
    known: tuple[float, ...]
    """Time from which its V knows the sum."""


def simulate_iterations(
    schedule: Schedule,
    costs: Costs = _UNIT,
    n_iterations: int = 2,
    *,
    rolled_back: Collection[int] = (),
) -> list[Timeline]:
    """Time iterations that follow one another on one time axis, a timeline each.

    Args:
        schedule: with V's, O waits for nobody; without, O stands behind a barrier. A
            schedule without O steps at its end.
        costs: times of the jobs, of messages, and of the sum over the stages.
        n_iterations: how many; the first one finds every stage free at 0.
        rolled_back: iterations, from 1, whose V undoes the step before them.

    Raises:
        RequestError: the costs do not fit the placement, or there is no such V.
    """
    run = IteratedSchedule(schedule, costs)
    if rolled_back and not (
        run.has_checks and all(0 < i < n_iterations for i in rolled_back)
    ):
        raise RequestError(
            f"iterations {sorted(rolled_back)} cannot be rolled back; the schedule "
            f"needs a V on every stage, and the iterations are 1 to {n_iterations - 1}"
        )
    left, timelines = run.start, []
    for i in range(n_iterations):
        rows, left = run.iterate(left, rolled_back=i in rolled_back)
        timelines.append(timeline_of(schedule, rows, run.times))
    return timelines


def timeline_of(
    schedule: Schedule, rows: Sequence[Sequence[Slot]], times: PassTimes
) -> Timeline:
    """Make a timeline of what a replay has timed: collectives apart from jobs."""
    kept, lanes = off_lane(rows)
    return Timeline(
        schedule.name,
        schedule.placement,
        schedule.n_microbatches,
        kept,
        schedule.recomputing,
        collectives=lanes,
        sending=times.sending,
    )


def join(timelines: Sequence[Timeline], *, name: str | None = None) -> Timeline:
    """Make one timeline of iterations on one time axis, for pictures and traces."""
    first = timelines[0]
    rows, lanes = (
        tuple(
            tuple(slot for row in parts for slot in row)
            for parts in zip(*of_each, strict=True)
        )
        for of_each in (
            [timeline.rows for timeline in timelines],
            [timeline.collectives for timeline in timelines],
        )
    )
    return Timeline(
        name or first.name,
        first.placement,
        first.n_microbatches,
        rows,
        first.recomputing,
        collectives=lanes,
        sending=first.sending,
    )


class IteratedSchedule:
    """One schedule, iterated.

    Args:
        schedule: as for `simulate_iterations`.
        costs: as there.
        protocol: who waits for what between iterations; None: post-validation for a
            schedule with V's, else the barrier.
    """

    def __init__(
        self, schedule: Schedule, costs: Costs, protocol: SyncRule | None = None
    ) -> None:
        self.times = costs.on(schedule.placement)
        self.has_checks = schedule.is_post_validated
        self._protocol = protocol or (post_validation if self.has_checks else barrier)
        self._n_microbatches = schedule.n_microbatches
        self._orders = [
            [job for job in order if not isinstance(job, Step)]
            for order in schedule.orders
        ]

    @property
    def start(self) -> IterationState:
        """All stages are free at 0, and know all they need."""
        nothing = (0.0,) * len(self._orders)
        return IterationState(nothing, nothing)

    def iterate(
        self, left: IterationState, *, rolled_back: bool = False
    ) -> tuple[list[list[Slot]], IterationState]:
        """Time the next iteration; returns its rows and what it leaves."""
        rows = self._attempts(left) if rolled_back else self._passes(left)
        ends = [_end(row) for row in rows]
        steps, known = self._protocol(self.times, ends)
        for stage, row in enumerate(rows):
            job, start = Step(stage), max(ends[stage], steps[stage])
            row.append(Slot(job, start, start + self.times.of(job)))
        return rows, IterationState(tuple(row[-1].end for row in rows), tuple(known))

    def _passes(self, left: IterationState) -> list[list[Slot]]:
        return replay(
            self._orders,
            self.times,
            n_microbatches=self._n_microbatches,
            free=left.free,
            known=left.known,
        )

    def _attempts(self, left: IterationState) -> list[list[Slot]]:
        """Every stage up to its V; then O again, and all passes."""
        first: list[Sequence[Job]] = []
        second: list[Sequence[Job]] = []
        for stage, order in enumerate(self._orders):
            cut = order.index(Check(stage))
            first.append(order[: cut + 1])
            second.append([*order[:cut], *order[cut + 1 :]])
        m = self._n_microbatches
        rows = replay(
            first, self.times, n_microbatches=m, free=left.free, known=left.known
        )
        for stage, row in enumerate(rows):
            job, start = Step(stage), _end(row)
            row.append(Slot(job, start, start + self.times.of(job)))
        free = [row[-1].end for row in rows]
        again = replay(second, self.times, n_microbatches=m, free=free)
        return [before + after for before, after in zip(rows, again, strict=True)]


def _end(row: Sequence[Slot]) -> float:
    """The time at which a stage is free; what goes on beside jobs does not count."""
    for slot in reversed(row):
        if not kind_of(slot.job).is_async:
            return slot.end
    return 0.0


def barrier(times: PassTimes, ends: Sequence[float]) -> tuple[list[float], list[float]]:
    """No stage steps before the sum over all stages is known."""
    known = [max(ends) + times.reduction] * len(ends)
    return known, known


def post_validation(
    times: PassTimes, ends: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Every stage steps at once; the next iteration's V waits for the sum."""
    return list(ends), barrier(times, ends)[1]
