"""Plan passes in parts: list schedules by many settings, the best ones changed.

    compute  0F0.0        0B1.1   0F0.2         0W1.0
    network        0F0.1~   0B1.2~      0F0.3~

While a pass occupies the network, others of its stage compute (`list_scheduler`).

1. Settings are drawn, and the best few kept.
2. One to three of their values are changed at a time; what is not worse is kept. So
   the best few, for a while, then the best two of them.
3. Orders of whole passes, laid out: the plan for passes in one piece, DualPipeV and
   combined 1F1B where they fit. No plan is longer than one of these.

Effort is counted in parts placed, so that a plan depends on nothing but the request;
``best:SECONDS`` goes on changing for a time.
"""

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from zbpp.core import (
    Costs,
    Job,
    JobGraph,
    Order,
    Part,
    Pass,
    PassKind,
    Placement,
    Schedule,
    Step,
    peaks,
)
from zbpp.schedules.passes.lay_out import lay_out
from zbpp.schedules.passes.segments import in_segments
from zbpp.schedules.patterns.combined_1f1b import plan_combined_1f1b
from zbpp.schedules.patterns.dual_pipe_v import plan_dual_pipe_v
from zbpp.schedules.planner.budget import Budget, parse_effort
from zbpp.schedules.planner.limits import micro_batch
from zbpp.schedules.planner.search.list_scheduler import Settings, list_schedule
from zbpp.schedules.planner.search.problem import PlacementProblem, Plan, Row, Rows

__all__ = ["plan_in_parts"]

_PARTS = {"fast": 4e5, "default": 1e7, "best": 1e7}
"""Parts that list schedules place, by effort."""
_LEAST, _MOST = 20, 6_000  # runs, of any size: more gain a small plan nothing
_DRAWN = 0.3  # share of the runs whose rules are drawn
_KEPT, _LAST = 8, 2  # of those, the best are changed, then the best of these
_WORSE = 1.05  # a drawn one is given up beyond the best


@dataclass(frozen=True)
class _Draw:
    """Settings that are drawn and changed, by stage or by pass of a stage.

    Args:
        turn: of each F and B of a stage, in the order of the chain: rounds by which it
            comes later.
        slope: what is added to that from the first stage to the last.
        stretch: share of the way through the model that counts in a rank.
        go_on: as in `Settings`, in rounds.
    """

    turn: tuple[float, ...]
    slope: tuple[float, ...]
    stretch: float
    go_on: float
    most_open: int
    cap: tuple[int, ...]
    most_b: tuple[int, ...]
    most_w: tuple[int, ...]
    overrun: tuple[float, ...]
    overrun_tail: tuple[float, ...]

    def settings(self, problem: PlacementProblem) -> Settings:
        """The settings of the list scheduler."""
        rank, p = problem.chain_starts(self.stretch), problem.n_stages
        for stage, numbers in enumerate(problem.numbers):
            each = zip(numbers, self.turn, self.slope, strict=False)
            for q, turn, slope in each:
                rank[q] += problem.unit * (turn + slope * stage / p)
        return Settings(
            offset=tuple(rank),
            max_in_flight=self.cap,
            max_without_b=(problem.n_microbatches,) * p,
            early=(0,) * p,
            overrun=self.overrun,
            overrun_tail=self.overrun_tail,
            delay_b=1.0,
            delay_f=1.0,
            go_on=self.go_on * problem.unit,
            most_open=self.most_open,
            most_b=self.most_b,
            most_w=self.most_w,
        )


def plan_in_parts(
    whole: Schedule, costs: Costs, problem: PlacementProblem, *, effort: str
) -> Schedule:
    """Plan the parts of passes.

    Args:
        whole: a plan of the passes in one piece, under the same limit.
        costs: with parts.
        problem: the same, with the limit to keep.
        effort: as that of `zbpp.schedules.plan_placement`.
    """
    kind, seconds = parse_effort(effort)
    plans = [*_laid_out(problem, costs, whole)]
    n_parts = _PARTS.get(kind, _PARTS["default"])
    rows = _search(problem, n_parts, seconds if kind == "best" else 0.0)
    if rows is not None:
        plans.append(_schedule(problem, rows, whole.name))

    def span(schedule: Schedule) -> float:
        rows = schedule.rows_for(problem.costs)
        held = peaks(rows, problem.costs)
        if any(a > b for a, b in zip(held, problem.limits, strict=True)):
            return math.inf
        if schedule.parts is not None:
            return in_segments(schedule, costs).span
        return JobGraph(rows, problem.costs).run().span

    return min(plans, key=span)


def _schedule(problem: PlacementProblem, rows: Rows, name: str) -> Schedule:
    """Write rows as orders and parts; each stage steps at its end."""
    parts: list[Order] = [
        (*_parts(problem, row), Step(stage)) for stage, row in enumerate(rows)
    ]
    orders = tuple(tuple(_passes(problem, row, s)) for s, row in enumerate(parts))
    placement, m = problem.placement, problem.n_microbatches
    return Schedule(name, placement, m, orders, parts=tuple(parts))


def _parts(problem: PlacementProblem, row: Row) -> Iterator[Part]:
    """Name the parts of a row, whose micro-batches follow one another."""
    names = [
        (q, index, lane)
        for q in range(3 * problem.n_chunks)
        for index, (lane, _) in enumerate(problem.pieces_of(q))
    ]
    n_before: Counter[int] = Counter()
    for part in row:
        q, index, lane = names[part]
        yield Part(problem.pass_of(q, n_before[part]), index, lane)
        n_before[part] += 1


def _passes(problem: PlacementProblem, row: Order, stage: int) -> Iterator[Job]:
    """The passes of a row, in the order of their starts."""
    for job in row:
        if not isinstance(job, Part):
            yield job
        elif not job.index:
            of = job.of
            if of.kind is PassKind.B and problem.joint[stage]:
                of = Pass(PassKind.BW, of.chunk, of.microbatch)
            yield of


def _laid_out(
    problem: PlacementProblem, costs: Costs, whole: Schedule
) -> Iterator[Schedule]:
    """Orders of whole passes on lanes; the first is the plan without overlap."""
    placement, m = problem.placement, problem.n_microbatches
    p = placement.n_stages
    yield whole
    yield lay_out(whole, costs)
    sizes = {"n_stages": p, "n_microbatches": m}
    if placement == Placement.wave(p):
        yield replace(lay_out(plan_dual_pipe_v(**sizes), costs), name=whole.name)
    if p > 1 and placement == Placement.interleaved(p, placement.n_chunks // p):
        chunks = placement.n_chunks // p
        combined = plan_combined_1f1b(**sizes, chunks_per_stage=chunks)
        yield replace(lay_out(combined, costs), name=whole.name)


def _search(problem: PlacementProblem, n_parts: float, seconds: float) -> "Rows | None":
    """The shortest rows of all rules that are tried; None: none comes to an end."""
    draws = random.Random(0)
    n_runs = min(_MOST, max(_LEAST, int(n_parts / problem.rows_from[-1])))
    climbs: list[_Climb] = []
    best = math.inf
    for _ in range(max(_KEPT, int(_DRAWN * n_runs))):
        drawn = _draw(problem, draws)
        plan = _run(problem, drawn, below=_WORSE * best)
        if plan is not None:
            best = min(best, plan.span)
            climbs.append(_Climb(problem, draws, drawn, plan))
        if best <= problem.target:
            break
    if not climbs:
        return None
    n_steps = int((1 - _DRAWN) / 2 * n_runs)
    for n_kept in (_KEPT, _LAST):
        climbs = sorted(climbs, key=lambda climb: climb.plan.span)[:n_kept]
        for climb in climbs:
            for _ in range(n_steps // n_kept):
                climb.step()
    best_climb = min(climbs, key=lambda climb: climb.plan.span)
    longer = Budget(math.inf, seconds)
    while seconds and longer.is_left and best_climb.plan.span > problem.target:
        best_climb.step()
    return best_climb.plan.rows


def _run(problem: PlacementProblem, drawn: _Draw, *, below: float) -> Plan | None:
    return list_schedule(problem, drawn.settings(problem), below, Budget(math.inf))


@dataclass
class _Climb:
    """Settings that get better, and the plan that they give."""

    problem: PlacementProblem
    draws: random.Random
    drawn: _Draw
    plan: Plan

    def step(self) -> None:
        """Change settings; take the change if it is not worse."""
        if self.plan.span <= self.problem.target:
            return
        changed = _change(self.drawn, self.draws)
        plan = _run(self.problem, changed, below=self.plan.span * (1 + 1e-12))
        if plan is not None and plan.span <= self.plan.span:
            self.plan, self.drawn = plan, changed


def _draw(problem: PlacementProblem, draws: random.Random) -> _Draw:
    """Draw settings, the same for all stages but for the caps."""
    p, m = problem.n_stages, problem.n_microbatches
    v = max(map(len, problem.numbers)) // 2
    share = draws.choice((0.5, 0.65, 0.75, 0.85, 0.95, 1.0, 1.2, 1.5))
    fall, more = draws.choice((0, 0.2, 0.3, 0.5, 0.8)), draws.choice((0, 0.5, 1))
    in_flight = [
        min(m, limit / held) if held > 0 else m
        for limit, held in zip(
            problem.costs.limit,
            micro_batch(problem.costs),
            strict=True,
        )
    ]
    cap = tuple(
        max(1, int(v * most * share * (1 - fall * stage / p) + more))
        for stage, most in enumerate(in_flight)
    )
    first, last = (0.0,) * (v - 1), (0.0,) * (v - 1)
    turn = draws.choice(
        (
            (0.0,) * (2 * v),
            (20.0, *first, *last, 0.0),
            (20.0, *first[:-1], -20.0, *last, 0.0) if v > 1 else (20.0, 0.0),
            (20.0, *first, *((-20.0,) * v)),
            (
                0.0,
                *first,
                *(draws.choice((-5.0, -1.0, 1.0, 3.0, 8.0)) for _ in range(v)),
            ),
        )
    )
    later = draws.choice((0.0, -12.0))
    return _Draw(
        turn=turn,
        slope=(*first, *last, 0.0, later),
        stretch=draws.choice((1.0, 1.0, 0.7, 1.3)),
        go_on=draws.choice((0.0, 0.5, 1.0, 20.0)),
        most_open=draws.choice((1, 2, 2, 2, 3, 4)),
        cap=cap,
        most_b=(draws.choice((1, 2, 2)),) * p,
        most_w=(draws.choice((0, 1, 2, 3, 4, 6, 8, 99)),) * p,
        overrun=(draws.choice((0.0, 0.5, 1.0)),) * p,
        overrun_tail=(draws.choice((0.0, 0.5, 1.0)),) * p,
    )


def _change(settings: _Draw, draws: random.Random) -> _Draw:
    """Change one to three settings, of a stage or of all from it on."""
    for _ in range(draws.choice((1, 1, 2, 3))):
        name = draws.choice(_NAMES)
        value = getattr(settings, name)
        changed: Any
        if not isinstance(value, tuple):
            changed = _other(name, value, draws)
        else:
            at = draws.randrange(len(value))
            one_pass = name in ("turn", "slope")
            end = at + 1 if one_pass else draws.choice((at + 1, at + 1, len(value)))
            new_value = _other(name, value[at], draws)
            by = new_value - value[at]
            moved = [
                max(1, x + by) if name == "cap" else x + by if one_pass else new_value
                for x in value[at:end]
            ]
            changed = (*value[:at], *moved, *value[end:])
        settings = replace(settings, **{name: changed})
    return settings


_NAMES = ("cap", "turn", "most_w", *(field.name for field in fields(_Draw)))


def _other(name: str, value: float, draws: random.Random) -> float:
    """Another value of a setting."""
    match name:
        case "cap":
            return value + draws.choice((-2, -1, 1, 2))
        case "most_w":
            return max(0, value + draws.choice((-2, -1, 1, 2, 99)))
        case "turn" | "slope":
            return value + draws.gauss(0.0, 2.0)
        case "stretch":
            return max(0.0, value + draws.gauss(0.0, 0.3))
        case "go_on":
            return draws.choice((0.0, 0.25, 0.5, 1.0, 2.0, 20.0))
        case "most_open":
            return draws.choice((1, 2, 2, 3, 4))
        case "most_b":
            return draws.choice((1, 1, 2, 2, 3))
    return draws.choice((0.0, 0.25, 0.5, 0.75, 1.0))  # overrun, overrun_tail
