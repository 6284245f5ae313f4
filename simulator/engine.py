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
next iteration waits. A stage starts an iteration when its O has ended.

If V finds the step invalid, every stage rolls it back, steps again and replays its
passes before V. These read nothing that is computed after a V, so they form a separate
part: the first attempts end, then the second ones begin.

The time of a step among many is the period of the iterations. The next iteration
depends on two times of each stage: when it is free, and when its V knows the sum. If
all of these are later by the same time than some iterations ago, the stages lead and
lag as they did then; all starts are sums and maxima of earlier ends, so from then on
everything repeats, that much later. The period is that time for one iteration. Every
stage waits for every other one between two iterations (in its O or in its V), so there
is one period, wherever the stages begin (F. Baccelli et al., "Synchronization and
Linearity", 1992, chapter 3).

**The critical path** goes from the job that ends last back to the wait that ended last,
and so on (`zbpp.core.graph`):

    stage 0 | F0  F1  ..........  B0          path: 0F0 1F0 1B0 0B0
    stage 1 |     F0  B0  F1
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from itertools import chain
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from zbpp.core import (
    Check,
    Costs,
    Job,
    JobGraph,
    JobTimes,
    Kind,
    RequestError,
    Schedule,
    Slot,
    Step,
    Timeline,
    a_kind,
    kind_of,
)

if TYPE_CHECKING:
    from networkx import DiGraph

_UNIT = Costs()
_SAME = 1e-9  # of a step time
_PATIENCE = 6  # iterations before a leap
_LEAPS = 50
_P = ParamSpec("_P")
_R = TypeVar("_R")


class Planned(Protocol):
    """A plan: a schedule, and the costs that it was made for."""

    @property
    def schedule(self) -> Schedule:
        """The orders of all stages."""

    @property
    def costs(self) -> Costs:
        """Of the chunks."""


def takes_plans(
    function: Callable[Concatenate[Schedule, _P], _R],
) -> Callable[Concatenate[Schedule | Planned, _P], _R]:
    """Let a function of a schedule and costs take a plan, which has both."""

    @wraps(function)
    def taking(schedule: Any, *args: Any, **more: Any) -> Any:
        if not isinstance(schedule, Schedule):
            if not isinstance(getattr(schedule, "schedule", None), Schedule):
                raise RequestError(
                    f"{function.__name__} takes a Schedule or a Plan, not "
                    f"{a_kind(schedule)}; zbpp.plan(mode, n_stages=.., "
                    "n_microbatches=..) returns a Schedule"
                )
            if not args:
                more.setdefault("costs", schedule.costs)
            schedule = schedule.schedule
        return function(schedule, *args, **more)

    return cast(Callable[Concatenate[Schedule | Planned, _P], _R], taking)


@takes_plans
def simulate(schedule: Schedule, costs: Costs = _UNIT) -> Timeline:
    """Time every job of a schedule; the first one starts at 0, in the unit of costs.

    O waits for the last weight gradient of every stage, but the time of the sum over
    the stages is counted between iterations only. In a schedule with V's this is the
    first iteration: O and V do not wait. UNSHARD and REDUCE_GRAD overlap with the
    jobs of their stage, one after the other. The result has the same type as a
    measured run.

    >>> from zbpp.core import Pass, PassKind, Placement
    >>> row = (Pass(PassKind.F, 0, 0), Pass(PassKind.BW, 0, 0))
    >>> timeline = simulate(Schedule("tiny", Placement.single(1), 1, (row,)))
    >>> [(slot.start, slot.end) for slot in timeline.rows[0]]
    [(0.0, 1.0), (1.0, 3.0)]

    Raises:
        RequestError: the costs do not fit the placement.
    """
    return schedule.timeline(first_step(schedule, costs).slots())


def first_step(schedule: Schedule, costs: Costs) -> JobTimes:
    """Starts and ends of the jobs of `simulate`."""
    if schedule.is_post_validated:
        iterated = _Iterations(schedule, costs)
        return iterated.after(iterated.start)[0][0]
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
        schedule: with V's, O does not wait; without, O comes after a barrier. A
            schedule without O steps at its end.
        costs: times of the jobs, of messages, and of the sum over the stages.
        n_iterations: how many; the first one finds every stage free at 0.
        rolled_back: iterations, from 1, whose V undoes the step before them.

    Raises:
        RequestError: the costs do not fit the placement, or there is no such V.
    """
    iterations = _Iterations(schedule, costs)
    if rolled_back and not (
        iterations.has_checks and all(0 < i < n_iterations for i in rolled_back)
    ):
        raise RequestError(
            f"iterations {sorted(rolled_back)} cannot be rolled back; the schedule "
            f"needs a V on every stage, and the iterations are 1 to {n_iterations - 1}"
        )
    state, timelines = iterations.start, []
    for i in range(n_iterations):
        runs, state = iterations.after(state, rolled_back=i in rolled_back)
        rows = _end_to_end([run.slots() for run in runs])
        timelines.append(schedule.timeline(rows))
    return timelines


def join(timelines: Sequence[Timeline], *, name: str | None = None) -> Timeline:
    """Make one timeline of iterations on one time axis, for pictures and traces."""
    first = timelines[0]
    return replace(
        first,
        name=name or first.name,
        slots=_end_to_end([timeline.slots for timeline in timelines]),
    )


def _end_to_end(
    parts: Sequence[Sequence[Sequence[Slot]]],
) -> tuple[tuple[Slot, ...], ...]:
    """Rows that go on in the next part."""
    return tuple(tuple(chain.from_iterable(rows)) for rows in zip(*parts, strict=True))


_State = NDArray[np.float64]
"""Ends of each stage's O, and the time from which the V's know the sum."""


class _Iterations:
    """One schedule, iterated: post-validated if it has V's, else behind a barrier."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.times = costs.on(schedule.placement)
        self.has_checks = schedule.is_post_validated
        self._rows = [
            row if Step(stage) in row[-1:] else (*row, Step(stage))
            for stage, row in enumerate(schedule.rows_for(self.times))
        ]
        self._graph = JobGraph(self._rows, self.times, barrier=not self.has_checks)
        self.start: _State = np.zeros(len(self._rows) + 1)
        """All stages are free at 0, and know all they need."""

    def after(
        self, state: _State, *, rolled_back: bool = False
    ) -> tuple[list[JobTimes], _State]:
        """Times of the next iteration, two attempts if it rolls a step back."""
        *free, verdict = state.tolist()
        runs: list[JobTimes] = []
        for graph in self._attempts if rolled_back else [self._graph]:
            reduction = self.times.reduction
            runs.append(graph.run(free=free, verdict=verdict, reduction=reduction))
            free = runs[-1].row_ends
        return runs, np.array([*free, runs[-1].all_gradients])

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

    def settle(self) -> tuple[float, _State]:
        """Iterate until everything repeats; the period, and a state that repeats."""
        seen = [self.start]
        for _ in range(_LEAPS):
            while len(seen) <= _PATIENCE:
                state = self.after(seen[-1])[1]
                for back, earlier in enumerate(reversed(seen), start=1):
                    if _is_even(state - earlier):
                        return (state[:-1].max() - earlier[:-1].max()) / back, state
                seen.append(state)
            # Stages that slowly fall behind are far behind at once: one that is a
            # little faster than the slowest gains on it for many iterations until it
            # must wait. Where all begin changes nothing in the end.
            late = state - seen[0]
            moved = state - 10 * late.max() * (late.max() - late) / np.ptp(late)
            seen = [moved - moved.min()]
        raise RequestError(
            f"no period is found within {_LEAPS * _PATIENCE} iterations, so there is "
            "no time of a step among many; round the costs, or leave the smallest "
            "out"
        )


def _is_even(late: _State) -> bool:
    """True if all is later by the same time."""
    return bool(np.ptp(late) <= _SAME * late.max())


@takes_plans
def steady_step_time(schedule: Schedule, costs: Costs = _UNIT) -> float:
    """Time of an iteration among many, optimizer included, in the unit of the costs.

    With V's in the schedule O does not wait; without, it comes after a barrier
    (see `simulate_iterations`).

    Raises:
        RequestError: the costs do not fit the placement.
    """
    return float(_Iterations(schedule, costs).settle()[0])


@takes_plans
def with_rollback(schedule: Schedule, costs: Costs = _UNIT) -> tuple[float, float]:
    """`steady_step_time`, and the time by which one failed validation delays all.

    Every stage steps again and replays its passes before V; stages that had to wait
    anyway may lose less than that.

    Raises:
        RequestError: there is no V, or the costs do not fit the placement.
    """
    iterations = _Iterations(schedule, costs)
    if not iterations.has_checks:
        raise RequestError(f"{schedule.name} has no V that could fail; place V's first")
    period, state = iterations.settle()
    late = iterations.after(state, rolled_back=True)[1]
    state = iterations.after(state)[1]
    for _ in range(_PATIENCE):  # lateness spreads, and slack takes some of it away
        if _is_even(late - state):
            break
        late, state = iterations.after(late)[1], iterations.after(state)[1]
    return float(period), float((late - state).max())


# ---- The critical path.

Node = tuple[int, int]
"""A job: its stage, and its place in the order of the stage."""


@dataclass(frozen=True)
class CriticalPath:
    """The jobs that fix the time of a step: each waits for the one before it."""

    slots: tuple[Slot, ...]

    @property
    def length(self) -> float:
        """Time from the start of the first job to the end of the last one."""
        return self.slots[-1].end - self.slots[0].start

    def time_of(self, kind: Kind) -> float:
        """Time that the path spends in jobs of one kind."""
        return sum(slot.duration for slot in self.slots if slot.job.kind is kind)

    @property
    def time_in_messages(self) -> float:
        """Time that the path spends on the way from stage to stage."""
        return self.length - sum(slot.duration for slot in self.slots)


@takes_plans
def critical_path(schedule: Schedule, costs: Costs = _UNIT) -> CriticalPath:
    """Find a longest path of the simulated jobs; its length is the step time.

    Where several paths are longest, one of them is returned.

    Raises:
        RequestError: the costs do not fit the placement.
    """
    run = first_step(schedule, costs)
    jobs = run.graph
    path = run.path(max(range(len(run.starts)), key=run.ends.__getitem__))
    slots = (Slot(jobs.job(x), run.starts[x], run.ends[x]) for x in path)
    shown = (slot for slot in slots if kind_of(slot.job).times)
    return CriticalPath(tuple(shown))


@takes_plans
def job_graph(schedule: Schedule, costs: Costs = _UNIT) -> "DiGraph[Node]":
    """Return the jobs of one step as a directed graph without circles.

    A node is ``(stage, place in its order)``, with the attributes ``job``, ``start``
    and ``end``. An edge leads from a job to one that waits for it, with the attributes
    ``reason`` (``"lane"``, ``"value"``, ``"state"`` or ``"part"``) and ``time``: from
    the start of the first to the earliest start of the second. A job starts at the
    largest sum of a start and a time that leads to it. So the critical path is
    ``networkx.dag_longest_path(graph, weight="time")``, but for the time of its last
    job.

    Args:
        schedule: a schedule or a plan.
        costs: times of its jobs; those of a plan come with it.

    Raises:
        RequestError: the costs do not fit the placement.
    """
    import networkx as nx

    run = first_step(schedule, costs)
    jobs, exported = run.graph, nx.DiGraph()
    for node, (start, end) in enumerate(zip(run.starts, run.ends, strict=False)):
        place = jobs.place(node)
        exported.add_node(place, job=jobs.job(node), start=start, end=end)
    for node in range(len(run.starts)):
        for wait in jobs.waits(node):
            is_sum = wait.source == jobs.all_gradients
            for source in jobs.gradients if is_sum else [wait.source]:
                if source >= len(run.starts):
                    continue  # the verdict is known from the start
                time = jobs.times.of(jobs.job(source)) + wait.delay
                time = 0.0 if wait.from_start else time
                edge = jobs.place(source), jobs.place(node)
                known = exported.get_edge_data(*edge)
                if known is None or known["time"] < time:
                    exported.add_edge(*edge, reason=wait.reason, time=time)
    return exported
