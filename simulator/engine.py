"""Times of a schedule's jobs: of one iteration, and of several that follow.

A job starts as soon as its stage is free and its inputs have arrived (`zbpp.core.graph`
has the rules); nothing is reordered. Between iterations there are two protocols. Two
stages under ZB-H2 and the start of their second iteration; O and V take 1:

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

The time of a step among many is the period of the iterations. What an iteration leaves
to the next is, for each stage, when it is free and when its V knows the sum. If all of
these are later by the same time than some iterations ago, the stages lead and lag as
they did then; all starts are sums and maxima of earlier ends, so from then on
everything repeats, that much later. The period is that time for one iteration. Every
stage waits for every other one between two iterations (in its O or in its V), so there
is one period, wherever the stages begin (F. Baccelli et al., "Synchronization and
Linearity", 1992, chapter 3).
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from zbpp.core import (
    Check,
    Costs,
    Job,
    JobGraph,
    JobTimes,
    RequestError,
    Schedule,
    Slot,
    Step,
    Timeline,
)
from zbpp.simulator.arguments import takes_plans

__all__ = [
    "IteratedSchedule",
    "IterationState",
    "expected_step_time",
    "first_step",
    "join",
    "rollback_time",
    "simulate",
    "simulate_iterations",
    "steady_step_time",
    "with_rollback",
]

_UNIT = Costs()
_SAME = 1e-9  # of a step time
_PATIENCE = 6  # iterations before a leap
_LEAPS = 50


@takes_plans
def simulate(schedule: Schedule, costs: Costs = _UNIT) -> Timeline:
    """Time every job of a schedule; the first one starts at 0, in the unit of costs.

    O waits for the last weight gradient of every stage, but the time of the sum over
    the stages is counted between iterations only. In a schedule with V's this is the
    first iteration: O and V wait for nobody. UNSHARD and REDUCE_GRAD go on beside the
    jobs of their stage, one after the other. A pass whose message occupies its stage
    (`Costs.send_occupies`) ends with that time, see `Timeline.sending`. The result has
    the same type as a measured run.

    >>> from zbpp.core import Pass, PassKind, Placement
    >>> row = (Pass(PassKind.F, 0, 0), Pass(PassKind.BW, 0, 0))
    >>> timeline = simulate(Schedule("tiny", Placement.single(1), 1, (row,)))
    >>> [(slot.start, slot.end) for slot in timeline.rows[0]]
    [(0.0, 1.0), (1.0, 3.0)]

    Raises:
        RequestError: the costs do not fit the placement.
    """
    run = first_step(schedule, costs)
    return schedule.timeline(run.slots(), run.graph.times.sending)


def first_step(schedule: Schedule, costs: Costs) -> JobTimes:
    """Starts and ends of the jobs of `simulate`."""
    if schedule.is_post_validated:
        iterated = IteratedSchedule(schedule, costs)
        return iterated.iterate(iterated.start)[0][0]
    times = costs.on(schedule.placement)
    return JobGraph(schedule.rows_for(times), times).run()


@takes_plans
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
    state, timelines = run.start, []
    for i in range(n_iterations):
        runs, state = run.iterate(state, rolled_back=i in rolled_back)
        rows = _end_to_end([one.slots() for one in runs])
        timelines.append(schedule.timeline(rows, run.times.sending))
    return timelines


def join(timelines: Sequence[Timeline], *, name: str | None = None) -> Timeline:
    """Make one timeline of iterations on one time axis, for pictures and traces."""
    first = timelines[0]
    return replace(
        first,
        name=name or first.name,
        rows=_end_to_end([timeline.rows for timeline in timelines]),
        collectives=_end_to_end([timeline.collectives for timeline in timelines]),
    )


_Rows = Sequence[Sequence[Slot]]


def _end_to_end(parts: Sequence[_Rows]) -> tuple[tuple[Slot, ...], ...]:
    """Rows that go on in the next part."""
    return tuple(tuple(chain.from_iterable(rows)) for rows in zip(*parts, strict=True))


class IterationState(NamedTuple):
    """State that an iteration leaves to the next one."""

    free: tuple[float, ...]
    """End of each stage's O."""
    verdict: float
    """Time from which the V's know the sum."""


class IteratedSchedule:
    """One schedule, iterated: post-validated if it has V's, else behind a barrier.

    Args:
        schedule: as for `simulate_iterations`.
        costs: as there.
    """

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.times = costs.on(schedule.placement)
        self.has_checks = schedule.is_post_validated
        self._rows = [
            row if Step(stage) in row[-1:] else (*row, Step(stage))
            for stage, row in enumerate(schedule.rows_for(self.times))
        ]
        self._graph = JobGraph(self._rows, self.times, barrier=not self.has_checks)

    @property
    def start(self) -> IterationState:
        """All stages are free at 0, and know all they need."""
        return IterationState((0.0,) * len(self._rows), 0.0)

    def iterate(
        self, state: IterationState, *, rolled_back: bool = False
    ) -> tuple[list[JobTimes], IterationState]:
        """Time the next iteration, two attempts if it rolls a step back.

        Returns:
            The times of each attempt, and what the iteration leaves.
        """
        graphs = self._attempts if rolled_back else [self._graph]
        runs: list[JobTimes] = []
        for graph in graphs:
            free = runs[-1].row_ends if runs else state.free
            reduction = self.times.reduction
            run = graph.run(free=free, verdict=state.verdict, reduction=reduction)
            runs.append(run)
        return runs, IterationState(tuple(run.row_ends), run.all_gradients)

    @cached_property
    def _attempts(self) -> list[JobGraph]:
        """Every stage up to its V, then O again; and all passes."""
        first: list[Sequence[Job]] = []
        second: list[Sequence[Job]] = []
        for stage, row in enumerate(self._rows):
            cut = row.index(Check(stage))
            first.append([*row[: cut + 1], Step(stage)])
            second.append([*row[:cut], *row[cut + 1 :]])
        return [JobGraph(rows, self.times, barrier=False) for rows in (first, second)]


@takes_plans
def steady_step_time(schedule: Schedule, costs: Costs = _UNIT) -> float:
    """Time of an iteration among many, optimizer included, in the unit of the costs.

    With V's in the schedule O waits for nobody; without, it stands behind a barrier
    (see `simulate_iterations`).

    Raises:
        RequestError: the costs do not fit the placement.
    """
    return _settle(IteratedSchedule(schedule, costs))[0]


@takes_plans
def rollback_time(schedule: Schedule, costs: Costs = _UNIT) -> float:
    """Time by which one failed validation delays all that follows.

    Every stage steps again and replays its passes before V; stages that had to wait
    anyway may lose less than that.

    Raises:
        RequestError: there is no V, or the costs do not fit the placement.
    """
    return with_rollback(schedule, costs)[1]


@takes_plans
def with_rollback(schedule: Schedule, costs: Costs = _UNIT) -> tuple[float, float]:
    """`steady_step_time` and `rollback_time`, from one search for what repeats.

    Raises:
        RequestError: as `rollback_time`.
    """
    run = IteratedSchedule(schedule, costs)
    if not run.has_checks:
        raise RequestError(f"{schedule.name} has no V that could fail; place V's first")
    period, state = _settle(run)
    late = run.iterate(state, rolled_back=True)[1]
    state = run.iterate(state)[1]
    for _ in range(_PATIENCE):  # lateness spreads, and slack takes some of it away
        if _repeats(late, state):
            break
        late, state = run.iterate(late)[1], run.iterate(state)[1]
    return period, max(_lateness(late, state))


@takes_plans
def expected_step_time(
    schedule: Schedule, costs: Costs = _UNIT, *, failure_rate: float
) -> float:
    """Mean time of an iteration if a share of the validations fails, one by one.

    Raises:
        RequestError: the rate is none, there is no V, or the costs do not fit.
    """
    if not 0.0 <= failure_rate <= 1.0:
        raise RequestError(f"failure_rate is {failure_rate}; it must be from 0 to 1")
    period, lost = with_rollback(schedule, costs)
    return period + failure_rate * lost


def _settle(run: IteratedSchedule) -> tuple[float, IterationState]:
    """Iterate until everything repeats; the period, and a state that repeats."""
    seen = [run.start]
    for _ in range(_LEAPS):
        while len(seen) <= _PATIENCE:
            state = run.iterate(seen[-1])[1]
            for back, earlier in enumerate(reversed(seen), start=1):
                if _repeats(state, earlier):
                    return (max(state.free) - max(earlier.free)) / back, state
            seen.append(state)
        seen = [_leap(seen[0], seen[-1])]
    raise RequestError(
        f"no period is found within {_LEAPS * _PATIENCE} iterations, so there is no "
        "time of a step among many; round the costs, or leave the tiniest ones out"
    )


def _repeats(state: IterationState, earlier: IterationState) -> bool:
    lateness = _lateness(state, earlier)
    return max(lateness) - min(lateness) <= _SAME * max(lateness)


def _leap(earlier: IterationState, state: IterationState) -> IterationState:
    """Let stages that slowly fall behind be far behind at once.

    A stage that is a little faster than the slowest one gains on it for many
    iterations until it must wait. Where all begin changes nothing in the end.
    """
    lateness = _lateness(state, earlier)
    slowest, spread = max(lateness), max(lateness) - min(lateness)
    moved = [
        time - 10 * slowest * (slowest - late) / spread
        for time, late in zip((*state.free, state.verdict), lateness, strict=True)
    ]
    origin = min(moved)
    *free, verdict = (time - origin for time in moved)
    return IterationState(tuple(free), verdict)


def _lateness(state: IterationState, earlier: IterationState) -> list[float]:
    pairs = zip(
        (*state.free, state.verdict), (*earlier.free, earlier.verdict), strict=True
    )
    return [after - before for after, before in pairs]
