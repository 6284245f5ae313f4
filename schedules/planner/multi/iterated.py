"""Iterated local search: shift passes of a plan in time, then move single passes again.

Moves of single passes end where a better plan differs in many of them at once. A turn
takes the starts of all F's and B's, shifts some (those of a kind, of a stage or of a
part of the chain, for one micro-batch, those from it on, or every second or third),
orders the stages by what comes of it, places the W's anew, and moves single passes for
a while. A plan little longer than the best one is where the next turn begins.

    0 | F0 F1 B0 F2 B1 F3 B2 B3      starts, F2 and F3 later
    0 | F0 F1 B0 B1 F2 F3 B2 B3      order; W's and moves follow

(Lourenco, Martin and Stuetzle, "Iterated local search", Handbook of Metaheuristics,
2003.)
"""

from collections.abc import Sequence

from zbpp.schedules.planner.budget import Budget
from zbpp.schedules.planner.draws import Draws
from zbpp.schedules.planner.multi.compiled import improve, place_weights, retime
from zbpp.schedules.planner.multi.critical_path import DETOUR
from zbpp.schedules.planner.multi.problem import PlacementProblem, Plan, Rows
from zbpp.schedules.planner.multi.timing import rows_by_starts, starts_of

__all__ = ["improve_in_turns"]

_MARGIN = 0.06  # plans longer than that are not moved
_NEARLY = 0.01  # plans longer than that are left behind
_MOVES = 60  # of a turn, in passes placed for each pass of the plan
_SHIFTS = (0.1, 0.25, 0.5, 1.0, 2.0)  # in the work of a micro-batch
_LATE = (0.0, 0.25, 0.5, 0.75, 1.0)


def improve_in_turns(
    problem: PlacementProblem, plan: Plan, budget: Budget, draws: Draws
) -> Plan:
    """Shift and move; stop at the lower bound, or when the budget is spent.

    Never longer than the plan that is given.
    """
    n_passes = problem.n_passes
    best, starts = plan, starts_of(problem, plan)
    while budget.is_left and best.span > problem.target:
        rows = _shifted(problem, starts, draws)
        late = _LATE[draws.below(len(_LATE))]
        most = best.span * (1 + _MARGIN)
        found = place_weights(problem, rows, [late] * problem.n_stages, most)
        budget.spend(n_passes)
        if found is None:
            continue
        turn = Budget(_MOVES * n_passes)
        found = improve(problem, retime(problem, found), turn, draws, DETOUR)
        budget.spend(turn.spent)
        if found.span <= best.span * (1 + _NEARLY):
            starts = starts_of(problem, found)
        if found.span < best.span * (1 - 1e-9):
            best = found
    return best


def _shifted(
    problem: PlacementProblem, starts: Sequence[Sequence[float]], draws: Draws
) -> Rows:
    m = problem.n_microbatches
    unit = max(problem.work) / m
    moved = [list(one) for one in starts]
    for _ in range((1, 1, 2, 3)[draws.below(4)]):
        numbers = _some_numbers(problem, draws)
        members = _some_microbatches(m, draws)
        shift = (1 - 2 * draws.below(2)) * _SHIFTS[draws.below(len(_SHIFTS))] * unit
        for q in numbers:
            for i in members:
                moved[q][i] += shift
    for one in moved:  # first in, first out
        for i in range(1, m):
            one[i] = max(one[i], one[i - 1])
    return rows_by_starts(problem, moved)


def _some_numbers(problem: PlacementProblem, draws: Draws) -> Sequence[int]:
    n = problem.n_chunks
    match draws.below(6):
        case 0:
            return (draws.below(2 * n),)
        case 1:
            ends = sorted((draws.below(2 * n), draws.below(2 * n)))
            return range(ends[0], ends[1] + 1)
        case 2:
            return range(draws.below(n), n)
        case 3:
            return range(n, 2 * n)
        case 4:
            return range(2 * n)
        case _:
            own = problem.numbers[draws.below(problem.n_stages)]
            half = len(own) // 2
            return (own[:half], own[half:], own)[draws.below(3)]


def _some_microbatches(m: int, draws: Draws) -> range:
    first = draws.below(m)
    return (
        range(first, first + 1),
        range(first, m),
        range(first % 2, m, 2),
        range(first % 3, m, 3),
        range(m),
    )[draws.below(5)]
