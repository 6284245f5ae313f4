"""Searches that better plans, each by its own kind of change.

`improve_top_k`          the best plan is not always the one that can be made best:
                         the moves of the best three are worth more than all on one
`hill_climb`             the settings of the list scheduler change, run by run
`travel`                 moves that may be worse for a while, in turns with other draws
`search_on`              the same until the time ends

Budgets are in passes placed, and bounded for large plans, whose moves take long each.
`benchmarks/planner/ablation.py` measures what each search gives.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any, TypeVar

from zbpp.schedules.planner.budget import Budget
from zbpp.schedules.planner.search.critical_path import improve, timed
from zbpp.schedules.planner.search.list_scheduler import Settings, list_schedule
from zbpp.schedules.planner.search.problem import PlacementProblem, Plan
from zbpp.schedules.planner.search.seeds import Seed

_SMALL = 3000  # passes; larger plans get 2 turns


def shortest(plans: Sequence[Plan]) -> Plan:
    """The plan of the smallest span, of equal ones the first."""
    return min(plans, key=lambda plan: plan.span)


def n_moves(n_passes: float) -> float:
    """Passes placed by moves of effort ``default``: .05 s for 500, .1 s for more."""
    return min(max(2e5, 200 * n_passes), 4e5)


def improve_top_k(
    problem: PlacementProblem, plans: Sequence[Plan], budget: Budget, k: int = 3
) -> Plan:
    """Move the passes of the first k plans, best first; return the best that comes.

    The plans share the budget; what one leaves is there for those after it. None is
    moved whose like was moved before.
    """
    chosen: list[Plan] = []
    for plan in plans:
        if len(chosen) < k and all(plan.span != same.span for same in chosen):
            chosen.append(plan)
    best = chosen[0]
    for number, plan in enumerate(chosen):
        if best.span <= problem.target:
            break
        share = Budget((budget.passes - budget.spent) / (len(chosen) - number))
        better = improve(problem, plan, share, number)
        budget.spend(share.spent)
        best = shortest([best, better])
    return best


_CLIMB = 200  # passes placed for each pass of a plan
_KINDS = "offset", "early", "overrun"
_LEAST = {"max_in_flight": 1, "most_b": 1}
_GO_ON = (0.0, 0.25, 0.5, 1.0, 2.0, 20.0)  # in the work of a micro-batch
_OVERRUNS = (0.0, 0.25, 0.5, 0.75, 1.0)
_T = TypeVar("_T")


def hill_climb(problem: PlacementProblem, ranked_seeds: Sequence[Seed]) -> list[Plan]:
    """Change the settings of the best list schedule; return plans, best first.

    A run of the list scheduler changes much of a plan at once, and is given up as soon
    as it cannot be better; moves of single passes change little.
    """
    plans = [seed.plan for seed in ranked_seeds]
    plan, settings = next(
        (seed for seed in ranked_seeds if seed.settings), ranked_seeds[0]
    )
    if settings is None:  # known orders alone have come to their end
        return plans
    budget = Budget(min(_CLIMB * problem.n_passes, 1e6 + 30 * problem.n_passes))
    plan, _ = climb(problem, plan, settings, budget, Random(0))
    return sorted([timed(problem, plan.rows), *plans], key=lambda plan: plan.span)


def climb(
    problem: PlacementProblem,
    plan: Plan,
    settings: Settings,
    budget: Budget,
    draws: Random,
    kinds: Sequence[str] = _KINDS,
) -> tuple[Plan, Settings]:
    """Change settings while plans are not worse.

    Kinds of changes are fields of the settings, or "rank" of any pass of a stage.
    """
    while budget.is_left and plan.span > problem.target:
        tried = _changed(problem, settings, draws, kinds)
        budget.spend(problem.n_stages)
        better = list_schedule(problem, tried, plan.span * (1 + 1e-12), budget)
        if better is not None and better.span <= plan.span * (1 + 1e-9):
            plan, settings = better, tried
    return plan, settings


def _changed(
    problem: PlacementProblem, settings: Settings, draws: Random, kinds: Sequence[str]
) -> Settings:
    """Change one to three entries, of a stage or of all from it on."""
    p, numbers = problem.n_stages, problem.numbers
    for _ in range(_one_of((1, 1, 2, 3), draws)):
        first = _one_of(range(p), draws)
        stages = range(first, _one_of((p, first + 1, first + 1), draws))
        step, kind = _one_of((-2, -1, -1, 1, 1, 2), draws), _one_of(kinds, draws)
        after: Any
        if kind in ("offset", "rank"):
            at, share = 0, 1.0
            if kind == "rank":
                at = _one_of(range(len(numbers[first])), draws)
                share = _one_of((0.25, 1.0), draws)
            moved = {numbers[stage][at] for stage in stages if at < len(numbers[stage])}
            kind, by = "offset", step * share * problem.unit
            after = tuple(
                old - by * (q in moved) for q, old in enumerate(settings.offset)
            )
        elif kind == "go_on":
            after = _one_of(_GO_ON, draws) * problem.unit
        elif kind == "most_open":
            after = _one_of((1, 2, 3, 4), draws)
        else:
            entries = list(getattr(settings, kind))
            if kind in ("overrun", "overrun_tail"):
                entries[first : stages.stop] = [_one_of(_OVERRUNS, draws)] * len(stages)
            else:
                for stage in stages:
                    entries[stage] = max(_LEAST.get(kind, 0), entries[stage] + step)
            after = tuple(entries)
        settings = replace(settings, **{kind: after})
    return settings


def _one_of(choices: Sequence[_T], draws: Random) -> _T:
    """Draw one; `Random` keeps but `random` the same in all versions of Python."""
    return choices[int(draws.random() * len(choices))]


_TURNS = 20
_DETOURS = 0.025, 0.1
"""Shares by which a step may be longer than the best plan at first, in turns.

Large ones find what small plans lack: many passes that change places at once.
"""


def travel(problem: PlacementProblem, plan: Plan) -> Plan:
    """Move passes by record-to-record travel, which gets past what no move betters."""
    for turn in range(_TURNS if problem.n_passes < _SMALL else 2):
        moves = Budget(n_moves(problem.n_passes))
        plan = improve(problem, plan, moves, turn, _DETOURS[turn % 2])
    return plan


def search_on(problem: PlacementProblem, plan: Plan, budget: Budget) -> Plan:
    """Travel with ever other draws, until the budget's time is over."""
    for turn in count(_TURNS):
        if plan.span <= problem.target or not budget.is_left:
            break
        moves = Budget(200 * problem.n_passes)
        plan = improve(problem, plan, moves, turn, _DETOURS[turn % 2])
    return plan
