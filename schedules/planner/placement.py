"""Plan any placement: one chunk a stage, the V, interleaved chunks, or any other.

Two stages with one chunk each, four micro-batches, F = B = W = 1, for three memory
limits in micro-batches of a stage:

    limit 1  0 | F0 .  .  B0 W0 F1 .  .  B1 W1 F2 .  .  B2 W2 F3 .  .  B3 W3
             1 | .  F0 B0 W0 .  .  F1 B1 W1 .  .  F2 B2 W2 .  .  F3 B3 W3

    limit 2  0 | F0 F1 .  B0 W0 F2 B1 W1 F3 B2 W2 B3 W3
             1 | .  F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3

    limit 3  0 | F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3
             1 | .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

Two stages with two chunks each (placement 0 1 1 0), three micro-batches,
F = B = W = 1 for each chunk, for three memory limits in micro-batches of a stage:

    limit 1
    0 | 0F0 .   .   3F0 3B0 3W0 0F1 0B0 0W0 .   .   3F1 3B1 3W1 0F2 0B1 0W1 .   .   ...
    1 | .   1F0 2F0 .   .   2B0 1B0 1F1 2W0 1W0 2F1 .   .   2B1 1B1 1F2 2W1 1W1 2F2 ...

    limit 1.5
    0 | 0F0 0F1 .   3F0 3B0 3W0 0F2 0B0 0W0 3F1 3B1 3W1 .   0B1 3F2 3B2 0W1 3W2 ...
    1 | .   1F0 2F0 1F1 .   2B0 1B0 2F1 2W0 1W0 1F2 2B1 1B1 2F2 2W1 1W1 2B2 1B2 ...

    limit 2
    0 | 0F0 0F1 0F2 3F0 3B0 3W0 3F1 3B1 3W1 0B0 0W0 3F2 3B2 0B1 3W2 0B2 0W1 0W2
    1 | .   1F0 2F0 1F1 2F1 2B0 2W0 1F2 1B0 1W0 2F2 2B1 1B1 2B2 1B2 2W1 1W1 2W2 1W2

Many plans are made, and the plan whose longest span of a stage is smallest is kept:

1. `seeds`: list schedules by a few rules, and known orders.
2. `critical_path` moves single passes of the best plan.
3. `hill_climb` changes settings, `critical_path` moves passes of the best three plans,
   and then travels.

``effort`` chooses the steps: ``fast`` is 1 and 2, ``default`` adds 3, and ``best``
repeats 3 for a time. All end when the plan reaches a lower bound. The amount of search
is counted in passes, so the first two depend on nothing but the arguments.

**Passes in parts** are planned with these as a start.

    compute  0F0.0        0B1.1   0F0.2         0W1.0
    network        0F0.1~   0B1.2~      0F0.3~

While a pass occupies the network, others of its stage compute (`list_scheduler`).

1. `seeds`: the rules, with settings of what is open at once.
2. One to three settings are changed at a time; what is not worse is kept. So the best
   few, for a while, then the best two of them.
3. Orders of whole passes, laid out: the plan for passes in one piece, DualPipeV and
   combined 1F1B where they fit. No plan is longer than any of these.

Effort is counted in parts placed; ``best:SECONDS`` continues for a time.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

from zbpp.core import (
    ChunkCosts,
    Job,
    JobGraph,
    Order,
    Part,
    Pass,
    PassKind,
    Schedule,
    Step,
    peaks,
)
from zbpp.schedules.passes.parts import in_segments
from zbpp.schedules.planner.critical_path import (
    improve,
    improve_top_k,
    n_moves,
    search_on,
    timed,
    travel,
)
from zbpp.schedules.planner.list_scheduler import climb
from zbpp.schedules.planner.problem import (
    Budget,
    PlacementProblem,
    Plan,
    Row,
    Rows,
    check_limits,
    needs,
    parse_effort,
)
from zbpp.schedules.planner.seeds import Seed, laid_out, seeds

_MARGIN = 0.01


def plan_placement(
    costs: ChunkCosts,
    n_microbatches: int,
    *,
    effort: str = "default",
    name: str = "planned",
) -> Schedule:
    """Plan any placement within its memory limits; infinite ones are no constraint.

    Passes are planned in one piece, and then their parts, where the costs tell them.

    Args:
        costs: on a placement: a wave, interleaved, or any other; every limit must fit
            one micro-batch.
        n_microbatches: micro-batches in a step, at least 1.
        effort: ``fast``, ``default``, ``best`` or ``best:SECONDS``.
        name: the mode, for people.

    Raises:
        LimitError: no micro-batch fits a limit; it names the smallest that works.
        RequestError: the effort is none of these.
    """
    check_limits(name, needs(costs), costs, n_microbatches)
    costs = costs.above_fixed()
    problem = PlacementProblem(replace(costs, parts=()), n_microbatches)
    plan = _search(problem, "fast" if costs.parts else effort)
    orders = problem.orders(plan.rows)
    schedule = Schedule(name, costs.placement, n_microbatches, orders)
    if not costs.parts:
        return schedule
    return plan_in_parts(schedule, PlacementProblem(costs, n_microbatches), effort)


def hill_climb(problem: PlacementProblem, ranked_seeds: Sequence[Seed]) -> list[Plan]:
    """Change the settings of the best list schedule; return plans, best first.

    A run of the list scheduler changes much of a plan at once, and is given up as soon
    as it cannot be better; moves of single passes change little.
    """
    plans = [seed.plan for seed in ranked_seeds]
    plan, settings = next(
        (seed for seed in ranked_seeds if seed.settings), ranked_seeds[0]
    )
    if settings is None:  # known orders are all
        return plans
    budget = Budget(min(200 * problem.n_passes, 1e6 + 30 * problem.n_passes))
    plan, _ = climb(problem, plan, settings, budget, Random(0))
    return sorted([timed(problem, plan.rows), *plans], key=lambda plan: plan.span)


def _search(problem: PlacementProblem, effort: str) -> Plan:
    kind, seconds = parse_effort(effort)
    n = problem.n_passes
    if kind == "fast":
        tries, moves = Budget(min(24 * n, 1.5e6)), Budget(min(60 * n, 1e5))
        plans = [seed.plan for seed in seeds(problem, tries)]
        return improve_top_k(problem, plans, moves)[0]
    tries = Budget(max(2e6, min(16 * n, 4e6)))
    moves = Budget(min(max(3e4, 40 * n), 1e5 + 8 * n, 2e6))
    ranked_seeds = seeds(problem, tries, margin=_MARGIN)
    plan = improve(problem, ranked_seeds[0].plan, moves, 0)
    others = hill_climb(problem, ranked_seeds) if plan.span > problem.target else []
    plan = travel(problem, improve_top_k(problem, [plan, *others], Budget(n_moves(n))))
    if kind == "best":
        plan = search_on(problem, plan, Budget(math.inf, seconds))
    return plan


# ---- Passes in parts.


_PARTS = {"fast": 4e5, "default": 1e7, "best": 1e7}
"""Parts that list schedules place, by effort."""
_LEAST, _MOST = 20, 6_000  # plans of any size: more gain a small one nothing
_TRIED = 0.3  # share of the parts that go to the rules
_KEPT, _LAST = 8, 2  # of these plans the best are changed, then the best of them
_WORSE = 0.05  # a plan is given up beyond the best
_KINDS = (
    *("offset", "rank", "rank", "early", "overrun", "overrun_tail", "max_in_flight"),
    *("most_w", "most_b", "go_on", "most_open"),
)


def plan_in_parts(whole: Schedule, problem: PlacementProblem, effort: str) -> Schedule:
    """Plan the parts of passes, given a plan of the passes in one piece."""
    kind, seconds = parse_effort(effort)
    plans = [*laid_out(problem, whole)]
    n_parts = _PARTS.get(kind, _PARTS["default"])
    rows = _search_parts(problem, n_parts, seconds if kind == "best" else 0.0)
    if rows is not None:
        plans.append(_schedule(problem, rows, whole.name))

    def span(schedule: Schedule) -> float:
        rows = schedule.rows_for(problem.costs)
        needed = peaks(rows, problem.costs)
        if any(a > b for a, b in zip(needed, problem.limits, strict=True)):
            return math.inf
        if schedule.parts is None:
            return JobGraph(rows, problem.costs).run().span
        starts, ends, _ = in_segments(schedule, problem.costs)[1]
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


def _search_parts(
    problem: PlacementProblem, n_parts: float, seconds: float
) -> "Rows | None":
    """The shortest rows of all rules that are tried; None: no rule gives whole rows."""
    size = problem.rows_from[-1]
    n_parts = min(max(n_parts, _LEAST * size), _MOST * size)
    tries = Budget(_TRIED * n_parts)
    ranked_seeds = seeds(problem, tries, margin=_WORSE)
    plans = [(seed.plan, seed.settings) for seed in ranked_seeds if seed.settings]
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
