"""Plan passes in parts: list schedules by many settings, the best ones changed.

    compute  0F0.0        0B1.1   0F0.2         0W1.0
    network        0F0.1~   0B1.2~      0F0.3~

While a pass occupies the network, others of its stage compute (`list_scheduler`).

1. The rules of `seeds`, with settings of what is open at once.
2. One to three settings are changed at a time; what is not worse is kept. So the best
   few, for a while, then the best two of them.
3. Orders of whole passes, laid out: the plan for passes in one piece, DualPipeV and
   combined 1F1B where they fit. No plan is longer than one of these.

Effort is counted in parts placed, so that a plan depends on nothing but the request;
``best:SECONDS`` goes on changing for a time.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random

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
from zbpp.schedules.patterns.interleaved import plan_combined_1f1b
from zbpp.schedules.patterns.waves import plan_dual_pipe_v
from zbpp.schedules.planner.limits import Budget, parse_effort
from zbpp.schedules.planner.list_scheduler import Settings, climb, list_schedule
from zbpp.schedules.planner.problem import PlacementProblem, Plan, Row, Rows
from zbpp.schedules.planner.seeds import rules

_PARTS = {"fast": 4e5, "default": 1e7, "best": 1e7}
"""Parts that list schedules place, by effort."""
_LEAST, _MOST = 20, 6_000  # plans of any size: more gain a small one nothing
_TRIED = 0.3  # share of the parts that go to the rules
_KEPT, _LAST = 8, 2  # of these plans the best are changed, then the best of them
_WORSE = 1.05  # a plan is given up beyond the best
_OPEN = (
    (2, 2, 1, 1.0),
    (2, 2, 99, 0.0),
    (3, 2, 4, 0.5),
    (2, 1, 2, 20.0),
    (1, 1, 99, 0.0),
)
"""``most_open``, ``most_b``, ``most_w`` and ``go_on``, in rounds, of each rule."""
_KINDS = (
    *("offset", "rank", "rank", "early", "overrun", "overrun_tail", "max_in_flight"),
    *("most_w", "most_b", "go_on", "most_open"),
)


def plan_in_parts(
    whole: Schedule, costs: Costs, problem: PlacementProblem, *, effort: str
) -> Schedule:
    """Plan the parts of passes, given a plan of the passes in one piece."""
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
        if schedule.parts is None:
            return JobGraph(rows, problem.costs).run().span
        starts, ends, _ = in_segments(schedule, costs)[1]
        return max(end[-1] - start[0] for start, end in zip(starts, ends, strict=True))

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
        for index, (lane, _) in enumerate(problem.pieces[q])
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
    size = problem.rows_from[-1]
    n_parts = min(max(n_parts, _LEAST * size), _MOST * size)
    best, budget = math.inf, Budget(_TRIED * n_parts)
    plans: list[tuple[Plan, Settings]] = []
    for settings in _settings(problem):
        plan = list_schedule(problem, settings, _WORSE * best, budget)
        if plan is not None:
            plans.append((plan, settings))
            best = min(best, plan.span)
        if best <= problem.target or not budget.is_left:
            break
    if not plans:
        return None
    draws = Random(0)
    for n_kept in (_KEPT, _LAST):
        share = (1 - _TRIED) / 2 * n_parts / n_kept
        plans = [
            climb(problem, *each, Budget(share), draws, _KINDS)
            for each in sorted(plans, key=lambda each: each[0].span)[:n_kept]
        ]
    plan, settings = min(plans, key=lambda each: each[0].span)
    if seconds:
        plan, _ = climb(
            problem, plan, settings, Budget(math.inf, seconds), draws, _KINDS
        )
    return plan.rows


def _settings(problem: PlacementProblem) -> Iterator[Settings]:
    """The rules for passes in one piece, each with settings of parts."""
    p = problem.n_stages
    for most_open, most_b, most_w, go_on in _OPEN:
        for settings in rules(problem):
            yield replace(
                settings,
                most_open=most_open,
                most_b=(most_b,) * p,
                most_w=(most_w,) * p,
                go_on=go_on * problem.unit,
            )
