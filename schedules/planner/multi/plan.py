"""Plan any placement; waves go down the stages and up again, V first of all.

Two stages with two chunks each (placement 0 1 1 0), three micro-batches,
F = B = W = 1 for each chunk, for three memory limits in micro-batches of a stage:

    limit 1
    0 | 0F0 .   .   3F0 3B0 3W0 .   0B0 0F1 0W0 .   3F1 3B1 3W1 .   0B1 0F2 0W1 . ...
    1 | .   1F0 2F0 .   .   2B0 1B0 2W0 1W0 1F1 2F1 .   .   2B1 1B1 2W1 1W1 1F2 ...

    limit 1.5
    0 | 0F0 0F1 .   3F0 3B0 3W0 0F2 0B0 0W0 3F1 3B1 3W1 .   0B1 3F2 3B2 0W1 3W2 ...
    1 | .   1F0 2F0 1F1 .   2B0 1B0 2F1 2W0 1W0 1F2 2B1 1B1 2F2 2W1 1W1 2B2 1B2 ...

    limit 2
    0 | 0F0 0F1 0F2 3F0 3B0 3W0 3F1 3B1 3W1 0B0 0W0 3F2 3B2 0B1 3W2 0B2 0W1 0W2
    1 | .   1F0 2F0 1F1 2F1 2B0 2W0 1F2 1B0 1W0 2F2 2B1 1B1 2B2 1B2 2W1 1W1 2W2 1W2

Many plans are made and the one with the smallest largest span of a stage is kept:

1. `seeds`: list schedules by a few rules, rounds, and known orders.
2. `critical_path` moves single passes of the best plan.
3. The same under less memory, as long as that could be better.
   Then more moves, `groups`, turns of `iterated`, moves that may be worse for a while.
4. `search` changes the settings of good list schedules, and goes on with 2.

``effort`` says how much of it, counted in passes: ``fast`` is 1 and a little of 2,
``default`` is 1 to 3, and ``best`` adds 4 for a time. All end when the plan reaches a
lower bound; the first two depend on nothing but the arguments.
"""

import math
from collections.abc import Sequence

from zbpp.core import (
    Costs,
    MemoryModel,
    Placement,
    Schedule,
)
from zbpp.schedules.planner.budget import LONG, Budget, parse_effort
from zbpp.schedules.planner.draws import Draws
from zbpp.schedules.planner.limits import capped, check_one_fits
from zbpp.schedules.planner.multi.compiled import improve
from zbpp.schedules.planner.multi.moves import (
    few_moves,
    improve_further,
    improve_several,
    moves_of,
)
from zbpp.schedules.planner.multi.problem import PlacementProblem, Plan
from zbpp.schedules.planner.multi.search import climb_again
from zbpp.schedules.planner.multi.seeds import Seed, seeds
from zbpp.schedules.planner.occupied import also_as_delays
from zbpp.schedules.planner.request import check_sizes

__all__ = ["plan_placement", "plan_wave"]

_UNIT = Costs()
_NO_LIMIT = MemoryModel()
_MARGIN = 0.01
_LONG = 1200  # passes placed, for each pass of the plan


def plan_wave(
    *,
    n_stages: int,
    n_microbatches: int,
    chunks_per_stage: int = 2,
    costs: Costs = _UNIT,
    memory: MemoryModel = _NO_LIMIT,
    effort: str = "default",
    name: str = "wave",
    memory_cap: float = math.inf,
    default_limit: float = math.inf,
) -> Schedule:
    """Plan a wave: `plan_placement` where chunks go to and fro.

    Args:
        n_stages: stages, at least 1.
        n_microbatches: micro-batches in a step, at least 1.
        chunks_per_stage: 2 is the V; any number is planned by the same rules.
        costs: see `plan_placement`, as the arguments below.
        memory: likewise.
        effort: likewise.
        name: likewise.
        memory_cap: likewise.
        default_limit: likewise.

    Raises:
        RequestError: as `plan_placement`.
    """
    check_sizes(n_stages, n_microbatches, chunks_per_stage)
    return plan_placement(
        placement=Placement.wave(n_stages, chunks_per_stage),
        n_microbatches=n_microbatches,
        costs=costs,
        memory=memory,
        effort=effort,
        name=name,
        memory_cap=memory_cap,
        default_limit=default_limit,
    )


def plan_placement(
    *,
    placement: Placement,
    n_microbatches: int,
    costs: Costs = _UNIT,
    memory: MemoryModel = _NO_LIMIT,
    effort: str = "default",
    name: str = "planned",
    memory_cap: float = math.inf,
    default_limit: float = math.inf,
) -> Schedule:
    """Plan any placement under the memory limit; without one, memory is no constraint.

    Args:
        placement: chunk to stage: a wave, interleaved, or any other.
        n_microbatches: micro-batches in a step, at least 1.
        costs: one entry per chunk or stage, or numbers for all stages.
        memory: likewise; every limit must hold one micro-batch.
        effort: ``fast``, ``default``, ``best`` or ``best:SECONDS``.
        name: the mode, for people.
        memory_cap: a further limit on every stage, in M_B of that stage.
        default_limit: the same, only where ``memory`` has no limit.

    Raises:
        LimitError: a limit holds no micro-batch; it names the smallest that works.
        RequestError: a number is invalid.
    """
    most_chunks = max(map(len, placement.chunks_of))
    check_sizes(placement.n_stages, n_microbatches, most_chunks)
    splits = costs.on(placement).splits
    check_one_fits(name, placement, memory, n_microbatches, splits=splits)
    limited = capped(
        memory,
        placement,
        splits=splits,
        memory_cap=memory_cap,
        default_limit=default_limit,
    )
    kept = None if memory.limit is None else memory

    def planned(costs: Costs, effort: str) -> Schedule:
        problem = PlacementProblem.of(placement, n_microbatches, costs, limited)
        orders = problem.orders(_best(problem, effort).rows)
        return Schedule(name, placement, n_microbatches, orders, memory=kept)

    return also_as_delays(planned, costs, effort)


def _best(problem: PlacementProblem, effort: str) -> Plan:
    kind, seconds = parse_effort(effort)
    n_passes = problem.n_passes
    if kind == "fast":
        tries, moves = Budget(min(24 * n_passes, 2e6)), Budget(few_moves(n_passes))
        found = seeds(problem, tries)
        plan = improve_several(problem, _plans(found), moves)
        less = Budget(min(100 * n_passes, 1.5e5))
        return _below_limit(problem, plan, tries, moves, less)
    tries = Budget(max(2e6, min(16 * n_passes, 4e6)))
    moves = Budget(min(max(3e4, 40 * n_passes), 1e5 + 8 * n_passes, 2e6))
    found = seeds(problem, tries, margin=_MARGIN)
    plan = improve(problem, found[0].plan, moves, Draws(0))
    less = Budget(min(max(2e5, 200 * n_passes), 6e5))
    plan = _below_limit(problem, plan, tries, moves, less)
    several = Budget(moves_of(n_passes))
    plan = improve_several(problem, [plan, *_plans(found)[1:]], several)
    plan = improve_further(problem, plan)
    if kind == LONG:
        plan = improve(problem, plan, Budget(min(_LONG * n_passes, 4e6)), Draws(1))
    if kind == "best":
        plan = climb_again(problem, plan, Budget(math.inf, seconds))
    return plan


def _plans(found: Sequence[Seed]) -> list[Plan]:
    return [seed.plan for seed in found]


def _below_limit(
    problem: PlacementProblem, plan: Plan, tries: Budget, moves: Budget, budget: Budget
) -> Plan:
    """Plan as if there were less memory: more should not give a longer plan.

    A plan under less memory is a plan under more. The limits are the quarters of M_B
    below what the plan holds, from the top, while the budget lasts; at the first whose
    lower bound is not below the best span, no lower one can help. Seeds that moves can
    hardly make better than the best plan are given up.
    """
    once = tries.spent + moves.spent
    for lower in problem.lower_limits(plan.rows):
        if budget.passes - budget.spent < once:
            break
        if max(problem.target, lower.target) >= plan.span:
            break
        tries, moves = Budget(tries.passes), Budget(moves.passes)
        found = seeds(lower, tries, below=1.03 * plan.span)
        other = improve(lower, found[0].plan, moves, Draws(0))
        budget.spend(tries.spent + moves.spent)
        plan = min(plan, other, key=lambda one: one.span)
    return plan
