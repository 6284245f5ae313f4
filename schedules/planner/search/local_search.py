"""Searches that better plans, each by its own kind of change.

`improve_top_k`          the best plan is not always the one that can be made best:
                         the moves of the best three are worth more than all on one
`hill_climb`             the settings of the list scheduler change, run by run
`travel`                 moves that may be worse for a while, in turns with other draws
`iterated_local_search`  many passes are shifted at once, then single ones moved
`search_on`              the last two until the time ends

Budgets are in passes placed, and bounded for large plans, whose moves take long each.
`benchmarks/planner/ablation.py` measures what each search gives.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zbpp.schedules.planner.budget import Budget
from zbpp.schedules.planner.search.critical_path import (
    Starts,
    XorShift64,
    improve,
    timed,
)
from zbpp.schedules.planner.search.list_scheduler import Settings, list_schedule
from zbpp.schedules.planner.search.problem import PlacementProblem, Plan
from zbpp.schedules.planner.search.seeds import (
    Seed,
    known_order,
    rows_by_starts,
)

__all__ = [
    "climb",
    "hill_climb",
    "improve_top_k",
    "intensify",
    "iterated_local_search",
    "n_moves",
    "search_on",
    "shortest",
    "travel",
]

_SMALL, _LARGE = 3000, 5000  # passes; larger plans get 2 turns, and no shifts
_NEAR = 0.003  # so near to its bound, a plan of more than _TINY passes is let be
_TINY = 400


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
        better = improve(problem, plan, share, XorShift64(number))
        budget.spend(share.spent)
        best = shortest([best, better])
    return best


_CLIMB = 100  # passes placed for each pass of a plan
_KINDS = "offset", "early", "overrun"
_LEAST = {"max_in_flight": 1, "most_b": 1}
_GO_ON = (0.0, 0.25, 0.5, 1.0, 2.0, 20.0)  # in the work of a micro-batch


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
    plan, _ = climb(problem, plan, settings, budget, XorShift64(0))
    return sorted([timed(problem, plan.rows)[0], *plans], key=lambda plan: plan.span)


def climb(
    problem: PlacementProblem,
    plan: Plan,
    settings: Settings,
    budget: Budget,
    draws: XorShift64,
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
    problem: PlacementProblem,
    settings: Settings,
    draws: XorShift64,
    kinds: Sequence[str],
) -> Settings:
    """Change one to three entries, of a stage or of all from it on."""
    p, numbers = problem.n_stages, problem.numbers
    for _ in range((1, 1, 2, 3)[draws.below(4)]):
        first = draws.below(p)
        stages = range(first, p if draws.below(3) == 0 else first + 1)
        step = (-2, -1, -1, 1, 1, 2)[draws.below(6)]
        kind = kinds[draws.below(len(kinds))]
        after: Any
        if kind in ("offset", "rank"):
            at, share = 0, 1.0
            if kind == "rank":
                at, share = (
                    draws.below(len(numbers[first])),
                    (0.25, 1.0)[draws.below(2)],
                )
            moved = {numbers[stage][at] for stage in stages if at < len(numbers[stage])}
            kind, by = "offset", step * share * problem.unit
            after = tuple(
                old - by * (q in moved) for q, old in enumerate(settings.offset)
            )
        elif kind == "go_on":
            after = _GO_ON[draws.below(len(_GO_ON))] * problem.unit
        elif kind == "most_open":
            after = 1 + draws.below(4)
        else:
            entries = list(getattr(settings, kind))
            if kind in ("overrun", "overrun_tail"):
                of_all = _OVERRUNS[draws.below(len(_OVERRUNS))]
                entries[stages.start : stages.stop] = [of_all] * len(stages)
            else:
                for stage in stages:
                    entries[stage] = max(_LEAST.get(kind, 0), entries[stage] + step)
            after = tuple(entries)
        settings = replace(settings, **{kind: after})
    return settings


def intensify(problem: PlacementProblem, plan: Plan) -> Plan:
    """Try travel and shifts; never longer than the plan.

    Large plans get no shifts, nor do plans near their bound, if not tiny.
    """
    n_passes = problem.n_passes
    near = problem.target * (1 if n_passes < _TINY else 1 + _NEAR)
    is_done = n_passes > _LARGE or plan.span <= near
    plan = travel(problem, plan, 10 if n_passes < _SMALL else 2)
    if is_done:
        return plan
    shifts = Budget(8e5 if n_passes < _TINY else 1.5e5)
    return iterated_local_search(problem, plan, shifts, XorShift64(0))


_TRAVEL = 0.025  # a step may be so much longer than the best plan at first; random V's
# are .015 % longer with .03 and .05 % with .05 (287 of `random_cases`, every fifth)


def travel(problem: PlacementProblem, plan: Plan, n_turns: int) -> Plan:
    """Move passes by record-to-record travel, which gets past what no move betters."""
    for turn in range(n_turns):
        moves = Budget(n_moves(problem.n_passes))
        plan = improve(problem, plan, moves, XorShift64(turn), _TRAVEL)
    return plan


_SHIFTS = (0.1, 0.25, 0.5, 1.0, 2.0)  # in the work of a micro-batch
_OVERRUNS = (0.0, 0.25, 0.5, 0.75, 1.0)
_DETOUR = 0.02  # as _TRAVEL, for moves that only tell one plan from another
_SHIFT_MOVES = 60  # of a turn, in passes placed for each pass of the plan
_SHIFT_MARGIN = 0.06  # plans longer than the best by that are not moved
_LEFT_BEHIND = 0.01  # nor are those longer by that the start of the next turn


def iterated_local_search(
    problem: PlacementProblem, plan: Plan, budget: Budget, draws: XorShift64
) -> Plan:
    """Shift passes of a plan in time, move single ones, and again; never longer.

    Moves of single passes end where a better plan differs in many of them at once. A
    turn takes the starts of all F's and B's, shifts some (those of a kind, of a stage
    or of a part of the chain, for one micro-batch, those from it on, or every second or
    third), orders the stages by what comes of it, places the W's anew, and moves single
    passes for a while. The next turn begins at a plan little longer than the best.

        0 | F0 F1 B0 F2 B1 F3 B2 B3      starts, F2 and F3 later
        0 | F0 F1 B0 B1 F2 F3 B2 B3      order; W's and moves follow

    (Lourenco, Martin and Stuetzle, "Iterated local search", Handbook of Metaheuristics,
    2003.)
    """
    best, starts = plan, timed(problem, plan.rows)[1]
    while budget.is_left and best.span > problem.target:
        rows = rows_by_starts(problem, _shifted(problem, starts, draws))
        order = known_order(rows, _OVERRUNS[draws.below(len(_OVERRUNS))])
        most = best.span * (1 + _SHIFT_MARGIN)
        budget.spend(problem.n_passes)  # shifting takes that long, if no pass is placed
        neighbour = list_schedule(problem, order, most, Budget(math.inf))
        if neighbour is None:
            continue
        moves = Budget(_SHIFT_MOVES * problem.n_passes)
        neighbour = improve(problem, neighbour, moves, draws, _DETOUR)
        budget.spend(moves.spent)
        if neighbour.span <= best.span * (1 + _LEFT_BEHIND):
            starts = timed(problem, neighbour.rows)[1]
        if neighbour.span < best.span * (1 - 1e-9):
            best = neighbour
    return best


def _shifted(problem: PlacementProblem, starts: Starts, draws: XorShift64) -> Starts:
    m = problem.n_microbatches
    moved = [list(begun) for begun in starts]
    for _ in range((1, 1, 2, 3)[draws.below(4)]):
        numbers = _some_numbers(problem, draws)
        microbatches = _some_microbatches(m, draws)
        sign = 1 - 2 * draws.below(2)
        shift = sign * _SHIFTS[draws.below(len(_SHIFTS))] * problem.unit
        for q in numbers:
            for i in microbatches:
                moved[q][i] += shift
    for begun in moved:  # first in, first out
        for i in range(1, m):
            begun[i] = max(begun[i], begun[i - 1])
    return moved


def _some_numbers(problem: PlacementProblem, draws: XorShift64) -> Sequence[int]:
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
            numbers = problem.numbers[draws.below(problem.n_stages)]
            half = len(numbers) // 2
            return (numbers[:half], numbers[half:], numbers)[draws.below(3)]


def _some_microbatches(m: int, draws: XorShift64) -> range:
    first = draws.below(m)
    return (
        range(first, first + 1),
        range(first, m),
        range(first % 2, m, 2),
        range(first % 3, m, 3),
        range(m),
    )[draws.below(5)]


def search_on(problem: PlacementProblem, plan: Plan, budget: Budget) -> Plan:
    """Shift and travel with ever other draws, until the budget's time is over."""
    draws, n_passes = XorShift64(1), problem.n_passes
    while plan.span > problem.target and budget.is_left:
        shifts = Budget(600 * n_passes, budget.seconds_left)
        plan = iterated_local_search(problem, plan, shifts, draws)
        moves = Budget(200 * n_passes, budget.seconds_left)
        plan = improve(problem, plan, moves, draws, _TRAVEL)
    return plan
