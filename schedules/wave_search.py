"""Improve a greedy plan by changing its settings: take every result not worse.

A step changes one to three settings: the cap, the W's lateness or the hold of a stage
(or of all stages from it on), or how early a number of the chain comes (on a stage or
everywhere). A run of the greedy planner ends as soon as it cannot be better, so most
steps are cheap.
"""

from dataclasses import replace
from random import Random

from zbpp.schedules.effort import Budget
from zbpp.schedules.wave_greedy import Knobs, greedy
from zbpp.schedules.wave_problem import Plan, WaveProblem

__all__ = ["search"]

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
SHIFTS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
LISTS = ("late", "late_tail", "hold", "hold_later")


def search(
    problem: WaveProblem,
    plan: Plan,
    knobs: Knobs,
    target: float,
    budget: Budget,
    rng: Random,
) -> Plan:
    """Climb from settings that gave a plan; stop at the target span.

    Or when the budget is spent.
    """
    slack = 1 + 1e-12
    while plan.span > target and budget.is_left:
        budget.spend(problem.n_stages)
        trial = knobs
        for _ in range(rng.choice((1, 1, 2, 3))):
            trial = _changed(problem, trial, rng)
        result = greedy(problem, trial, plan.span * slack, budget)
        if result is not None and result.span <= plan.span * slack:
            plan, knobs = result, trial
    return plan


def _changed(problem: WaveProblem, knobs: Knobs, rng: Random) -> Knobs:
    p, m = problem.n_stages, problem.n_microbatches
    first = rng.randrange(p)
    stages = {first} if rng.random() < 0.6 else set(range(first, p))
    what = rng.choice(("caps", "fresh", "shift", "shift", *LISTS))
    if what in ("caps", "fresh"):
        change = rng.choice((-2, -1, 1, 2))
        counts = tuple(
            min(m, max(1, old + change)) if stage in stages else old
            for stage, old in enumerate(getattr(knobs, what))
        )
        if what == "caps":
            return replace(knobs, caps=counts)
        return replace(knobs, fresh=counts)
    if what == "shift":
        shift = rng.choice(SHIFTS) * rng.choice((-1, 1)) * max(problem.work) / m
        place = rng.randrange(len(problem.numbers[first]))
        rows = [problem.numbers[stage] for stage in stages]
        moved = {row[place] for row in rows if place < len(row)}
        shifts = tuple(
            old + shift if q in moved else old for q, old in enumerate(knobs.shift)
        )
        return replace(knobs, shift=shifts)
    share = rng.choice(SHARES)
    changed = tuple(
        share if stage in stages else old
        for stage, old in enumerate(getattr(knobs, what))
    )
    match what:
        case "late":
            return replace(knobs, late=changed)
        case "late_tail":
            return replace(knobs, late_tail=changed)
        case "hold":
            return replace(knobs, hold=changed)
        case _:
            return replace(knobs, hold_later=changed)
