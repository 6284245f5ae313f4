"""The moves of single passes: their number, and the plans that get them.

The best plan is not always the one that can be made best: the moves of the best three
are worth more than all of them on one. Where no move makes that one better, moves that
are worse for a while do: of 296 random V's they make 119 shorter, by up to 9 %; four
times as many moves without them gain a tenth of that. Budgets are in passes placed, and
bounded for large plans, whose moves take long each.
"""

from collections.abc import Sequence

from zbpp.schedules.planner.budget import Budget
from zbpp.schedules.planner.draws import Draws
from zbpp.schedules.planner.multi.compiled import improve
from zbpp.schedules.planner.multi.problem import PlacementProblem, Plan

__all__ = [
    "detours_of",
    "few_moves",
    "improve_by_detours",
    "improve_several",
    "moves_of",
]

_SEVERAL = 3
_HEAT = 0.02
_NEAR = 0.003  # a plan so near to the lower bound has little to gain


def few_moves(n_passes: float) -> float:
    """Moves of effort ``fast``, in passes, for a plan of some passes."""
    return min(60 * n_passes, 1e5)


def moves_of(n_passes: float) -> float:
    """Moves of effort ``default``."""
    return min(max(2e5, 200 * n_passes), 4e5)


def detours_of(n_passes: float) -> float:
    """Moves of effort ``default`` that may be worse for a while."""
    return 8 * moves_of(n_passes)


def improve_by_detours(problem: PlacementProblem, plan: Plan, budget: Budget) -> Plan:
    """Move passes of a plan that is not near its bound, also if that is worse at first.

    Never longer than the plan that is given.
    """
    if plan.span <= problem.target * (1 + _NEAR):
        return plan
    return improve(problem, plan, budget, Draws(0), _HEAT)


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
