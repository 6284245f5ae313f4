"""The moves of single passes: their number, and the plans that get them.

The best plan is not always the one that can be made best: the moves of the best three
are worth more than all of them on one. Where no move makes that one better, other ways
do: groups, turns that shift many passes at once, and moves that are worse for a while,
in rounds that end with the first that gains nothing. Budgets are in passes placed, and
bounded for large plans, whose moves take long each.
"""

from collections.abc import Sequence

from zbpp.schedules.planner.budget import Budget
from zbpp.schedules.planner.draws import Draws
from zbpp.schedules.planner.multi.compiled import improve
from zbpp.schedules.planner.multi.critical_path import DETOUR
from zbpp.schedules.planner.multi.groups import plan_in_groups
from zbpp.schedules.planner.multi.iterated import improve_in_turns
from zbpp.schedules.planner.multi.problem import PlacementProblem, Plan

__all__ = [
    "few_moves",
    "improve_further",
    "improve_several",
    "moves_of",
]

_SEVERAL = 3
_NEAR = 0.003  # a plan so near to the lower bound has little to gain
_MARGIN = 0.05
_SMALL, _LARGE = 400, 5000  # passes
_ROUNDS = 4


def few_moves(n_passes: float) -> float:
    """Moves of effort ``fast``, in passes, for a plan of some passes."""
    return min(60 * n_passes, 1e5)


def moves_of(n_passes: float) -> float:
    """Moves of effort ``default``."""
    return min(max(2e5, 200 * n_passes), 4e5)


def improve_further(problem: PlacementProblem, plan: Plan) -> Plan:
    """Try groups, turns and detours on a plan of effort ``default``.

    Never longer than the plan that is given. Small plans get the first two even if they
    are near their bound, large ones not at all.
    """
    n_passes = problem.n_passes
    near = problem.target * (1 if n_passes < _SMALL else 1 + _NEAR)
    if n_passes <= _LARGE and plan.span > near:
        tries = Budget(min(1000 * n_passes, 1.5e5))
        found = plan_in_groups(problem, tries, plan.span * (1 + _MARGIN))
        if found is not None and found.span < plan.span:
            plan = found
        turns = Budget(4e5 if n_passes < _SMALL else 1.5e5)
        plan = improve_in_turns(problem, plan, turns, Draws(0))
    for number in range(_ROUNDS):
        if plan.span <= problem.target * (1 + _NEAR):
            break
        detours = Budget(min(max(2e5, 300 * n_passes), 5e5))
        found = improve(problem, plan, detours, Draws(number), DETOUR)
        if found.span >= plan.span:
            break
        plan = found
    return plan


def improve_several(
    problem: PlacementProblem,
    plans: Sequence[Plan],
    budget: Budget,
    heat: float = 0.0,
) -> Plan:
    """Move the passes of the first plans, best first; return the best that comes of it.

    The plans share the budget; what one leaves is there for those after it. None is
    moved whose like was moved before.
    """
    chosen: list[Plan] = []
    for plan in plans:
        if len(chosen) < _SEVERAL and all(plan.span != one.span for one in chosen):
            chosen.append(plan)
    best = chosen[0]
    for number, plan in enumerate(chosen):
        if best.span <= problem.target:
            break
        share = Budget((budget.passes - budget.spent) / (len(chosen) - number))
        found = improve(problem, plan, share, Draws(number), heat)
        budget.spend(share.spent)
        best = min(best, found, key=lambda one: one.span)
    return best
