"""Plan any placement; waves go down the stages and up again, V first of all.

Two stages with two chunks each (placement 0 1 1 0), three micro-batches,
F = B = W = 1 for each chunk, for three memory limits in micro-batches of a stage:

    limit 1
    0 | 0F0 .   .   3F0 3B0 3W0 .   0B0 0F1 0W0 .   3F1 3B1 3W1 .   0B1 0F2 0W1 . ...
    1 | .   1F0 2F0 .   .   2B0 1B0 2W0 1W0 1F1 2F1 .   .   2B1 1B1 2W1 1W1 1F2 ...

    limit 1.5
    0 | 0F0 0F1 .   3F0 3B0 3W0 .   0B0 3F1 3B1 0F2 0W0 3W1 0B1 3F2 3B2 0W1 3W2 ...
    1 | .   1F0 2F0 1F1 .   2B0 1B0 2F1 2W0 1W0 2B1 1F2 1B1 2F2 2W1 1W1 2B2 1B2 ...

    limit 2
    0 | 0F0 0F1 0F2 3F0 3B0 3W0 3F1 3B1 3W1 0B0 0W0 3F2 3B2 0B1 3W2 0B2 0W1 0W2
    1 | .   1F0 2F0 1F1 2F1 2B0 2W0 1F2 1B0 1W0 2F2 2B1 1B1 2B2 1B2 2W1 1W1 2W2 1W2

Many plans are made and the one with the smallest largest span of a stage is kept:

1. `wave_seeds`: greedy plans by a few rules, rounds, and known orders.
2. `wave_search` changes the settings of the best greedy plan.
3. `wave_critical` moves single passes of the best plan.

``effort`` says how much of it, counted in passes: ``fast`` is 1 and a little of 3,
``default`` has about ten times that for small pipelines and less for large ones,
``best`` goes on for a time. All end when the plan reaches a lower bound; the first two
depend on nothing but the arguments.
"""

import math
from collections.abc import Sequence
from random import Random

from zbpp.core import (
    Costs,
    MemoryModel,
    Placement,
    Schedule,
    lower_bound,
)
from zbpp.schedules.effort import Budget, parse_effort
from zbpp.schedules.limits import capped, check_one_fits
from zbpp.schedules.request import check_sizes
from zbpp.schedules.wave_critical import improve
from zbpp.schedules.wave_problem import Plan, WaveProblem
from zbpp.schedules.wave_search import search
from zbpp.schedules.wave_seeds import Seed, seeds
from zbpp.schedules.wave_times import retime

__all__ = ["plan_placement", "plan_wave"]

_UNIT = Costs()
_NO_LIMIT = MemoryModel()


def plan_wave(
    *,
    n_stages: int,
    n_microbatches: int,
    chunks_per_stage: int = 2,
    costs: Costs = _UNIT,
    memory: MemoryModel = _NO_LIMIT,
    effort: str = "default",
    name: str = "wave",
    most: float = math.inf,
    usual: float = math.inf,
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
        most: likewise.
        usual: likewise.

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
        most=most,
        usual=usual,
    )


def plan_placement(
    *,
    placement: Placement,
    n_microbatches: int,
    costs: Costs = _UNIT,
    memory: MemoryModel = _NO_LIMIT,
    effort: str = "default",
    name: str = "planned",
    most: float = math.inf,
    usual: float = math.inf,
) -> Schedule:
    """Plan any placement under the memory limit; without one, memory is no constraint.

    Args:
        placement: chunk to stage: a wave, interleaved, or any other.
        n_microbatches: micro-batches in a step, at least 1.
        costs: one entry per chunk, or numbers for whole stages.
        memory: likewise; every limit must hold one micro-batch.
        effort: ``fast``, ``default``, ``best`` or ``best:SECONDS``.
        name: the mode, for people.
        most: a further limit on every stage, in M_B of that stage.
        usual: the same, only where ``memory`` has no limit.

    Raises:
        LimitError: a limit holds no micro-batch; it names the smallest that works.
        RequestError: a number is wrong.
    """
    check_sizes(placement.n_stages, n_microbatches)
    check_one_fits(name, placement, memory, n_microbatches)
    limited = capped(memory, placement, most=most, usual=usual)
    problem = WaveProblem.of(placement, n_microbatches, costs, limited)
    plan = _best(problem, costs, effort)
    return Schedule(
        name,
        placement,
        n_microbatches,
        problem.orders(plan.rows),
        memory=None if memory.limit is None else memory,
    )


def _best(problem: WaveProblem, costs: Costs, effort: str) -> Plan:
    kind, seconds = parse_effort(effort)
    memory = problem.memory_model
    bound = lower_bound(problem.placement, problem.n_microbatches, costs, memory)
    target = bound * (1 + 1e-9)
    n_passes = 3.0 * problem.n_chunks * problem.n_microbatches
    if kind == "fast":
        tries = Budget(min(24 * n_passes, max(2e6, n_passes)))
        plan = seeds(problem, target, 0.0, tries)[0].plan
        few = Budget(min(12 * n_passes, 5e4 + n_passes))
        return improve(problem, plan, target, few, Random(0))
    found = seeds(problem, target, 0.05, Budget(math.inf))
    plan = found[0].plan
    passes = min(120 * n_passes, 6e5 + 35 * n_passes)
    plan = _improved(problem, found, plan, target, Budget(passes), 0)
    if kind == "best":
        end = Budget(math.inf, seconds)
        turn = 0
        while plan.span > target and end.is_left:
            turn += 1
            budget = Budget(300 * n_passes, end.seconds_left)
            plan = _improved(problem, found, plan, target, budget, turn)
    return plan


def _improved(
    problem: WaveProblem,
    found: Sequence[Seed],
    plan: Plan,
    target: float,
    budget: Budget,
    turn: int,
) -> Plan:
    """Search from settings with half of the budget; then move passes of the plan.

    The first turn begins at the best settings, later ones at any good ones.
    """
    rng = Random(turn)
    starts = [seed for seed in found if seed.knobs is not None]
    if starts and plan.span > target:
        rank = int(rng.expovariate(0.5)) if turn else 0
        seed = starts[min(rank, len(starts) - 1)]
        assert seed.knobs is not None
        half = Budget(budget.passes / 2, budget.seconds_left)
        result = search(problem, seed.plan, seed.knobs, target, half, rng)
        budget.spend(half.spent)
        plan = min(plan, retime(problem, result), key=lambda one: one.span)
    return improve(problem, plan, target, budget, rng)
