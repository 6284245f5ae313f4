"""Improve list schedules by changing their settings: take every result not worse.

A step changes one to three settings: the cap, the W's lateness or the hold of a stage
(or of all stages from it on), or how early a number of the chain comes (on a stage or
everywhere). A run of the list scheduler ends as soon as it cannot be better, so most
steps are cheap.
"""

import math
from dataclasses import replace
from random import Random

from zbpp.schedules.planner.budget import Budget
from zbpp.schedules.planner.draws import Draws
from zbpp.schedules.planner.multi.compiled import improve, list_schedule, retime
from zbpp.schedules.planner.multi.iterated import improve_in_turns
from zbpp.schedules.planner.multi.list_scheduler import Settings
from zbpp.schedules.planner.multi.problem import PlacementProblem, Plan
from zbpp.schedules.planner.multi.seeds import seeds

__all__ = ["climb_again"]

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
SHIFTS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
LISTS = ("late", "late_tail", "hold", "hold_later")


def climb_again(problem: PlacementProblem, plan: Plan, budget: Budget) -> Plan:
    """Climb from good settings, again and again; stop at the lower bound.

    The best plan of each turn goes on to `improve` and `improve_in_turns`. The budget
    must have an end in time: all is drawn at random, always in the same order.
    """
    found = seeds(problem, Budget(math.inf, budget.seconds_left), margin=0.05)
    starts = [seed for seed in found if seed.settings is not None]
    n_passes = problem.n_passes
    rng, draws = Random(1), Draws(1)
    while starts and plan.span > problem.target and budget.is_left:
        seed = starts[min(int(rng.expovariate(0.5)), len(starts) - 1)]
        assert seed.settings is not None
        turn = Budget(200 * n_passes, budget.seconds_left)
        other = retime(problem, _climb(problem, seed.plan, seed.settings, turn, rng))
        plan = min(plan, other, key=lambda one: one.span)
        turn = Budget(60 * n_passes, budget.seconds_left)
        plan = improve(problem, plan, turn, draws)
        turn = Budget(600 * n_passes, budget.seconds_left)
        plan = improve_in_turns(problem, plan, turn, draws)
    return plan


def _climb(
    problem: PlacementProblem,
    plan: Plan,
    settings: Settings,
    budget: Budget,
    rng: Random,
) -> Plan:
    """Climb from settings that gave a plan; stop at the lower bound.

    Or when the budget is spent.
    """
    slack = 1 + 1e-12
    while plan.span > problem.target and budget.is_left:
        budget.spend(problem.n_stages)
        trial = settings
        for _ in range(rng.choice((1, 1, 2, 3))):
            trial = _changed(problem, trial, rng)
        result = list_schedule(problem, trial, plan.span * slack, budget)
        if result is not None and result.span <= plan.span * slack:
            plan, settings = result, trial
    return plan


def _changed(problem: PlacementProblem, settings: Settings, rng: Random) -> Settings:
    p, m = problem.n_stages, problem.n_microbatches
    first = rng.randrange(p)
    reach = rng.choice((1, 1, 2, 3, 4))
    stages = {1: {first}, 2: set(range(first, p)), 3: set(range(first + 1))}.get(
        reach, set(range(p))
    )
    what = rng.choice(("caps", "fresh", "shift", "shift", *LISTS))
    if what in ("caps", "fresh"):
        change = rng.choice((-2, -1, 1, 2))
        counts = tuple(
            min(m, max(1, old + change)) if stage in stages else old
            for stage, old in enumerate(getattr(settings, what))
        )
        if what == "caps":
            return replace(settings, caps=counts)
        return replace(settings, fresh=counts)
    if what == "shift":
        shift = rng.choice(SHIFTS) * rng.choice((-1, 1)) * max(problem.work) / m
        place = rng.randrange(len(problem.numbers[first]))
        rows = [problem.numbers[stage] for stage in stages]
        moved = {row[place] for row in rows if place < len(row)}
        shifts = tuple(
            old + shift if q in moved else old for q, old in enumerate(settings.shift)
        )
        return replace(settings, shift=shifts)
    share = rng.choice(SHARES)
    changed = tuple(
        share if stage in stages else old
        for stage, old in enumerate(getattr(settings, what))
    )
    match what:
        case "late":
            return replace(settings, late=changed)
        case "late_tail":
            return replace(settings, late_tail=changed)
        case "hold":
            return replace(settings, hold=changed)
        case _:
            return replace(settings, hold_later=changed)
