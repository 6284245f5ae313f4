"""Seeds that admit micro-batches in groups: under little memory, often in pairs.

Two stages with two chunks each, limit 1.5, groups of two: the second group follows when
the first has left, so the stages turn from F's to B's once a group, not once a
micro-batch. (In full the groups overlap as far as the order lets them.)

    0 | 0F0 0F1 .   3F0 3B0 ... 0B0 3F1 3B1 ... 0F2 0F3 ... 3F2 3B2 ...
    1 | .   1F0 2F0 1F1 ... 2B0 1B0 2F1 ... 2B1 1B1 ... 1F2 2F2 1F3 ...

A group is planned by itself, as a pipeline of so many micro-batches (in two ways), or
its members follow one another by the work of one. Then all F's and B's are ordered by
the starts that they would have if a group began every so often, and the W's are placed
by time. No rule of `rules` holds a micro-batch back for long enough to give such
orders.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from zbpp.schedules.planner.budget import Budget
from zbpp.schedules.planner.draws import Draws
from zbpp.schedules.planner.multi.compiled import (
    improve,
    list_schedule,
    place_weights,
    retime,
)
from zbpp.schedules.planner.multi.critical_path import DETOUR
from zbpp.schedules.planner.multi.list_scheduler import chain_offsets
from zbpp.schedules.planner.multi.problem import PlacementProblem, Plan, Rows
from zbpp.schedules.planner.multi.rules import (
    RULES,
    order_of,
    ranks_of,
    settings_of,
)
from zbpp.schedules.planner.multi.seeds import seeds
from zbpp.schedules.planner.multi.timing import rows_by_starts, starts_of

__all__ = ["plan_in_groups"]

_SIZES = (2, 3, 4)
_PERIODS = 16
_LATE = 0.5
_MOVES = 100  # for each pass of the plan

Starts = Sequence[Sequence[float]]
"""Starts of the F's and B's of a group, by number and micro-batch."""


def plan_in_groups(
    problem: PlacementProblem, budget: Budget, below: float
) -> Plan | None:
    """Plan in groups of two and more, as long as the budget lasts; return the best.

    Of every way the best order gets moves of single passes. None if no order has a span
    under ``below`` before they are moved.
    """
    moves = _MOVES * problem.n_passes
    found: list[Plan] = []
    for size in _SIZES:
        if size >= problem.n_microbatches or not budget.is_left:
            break
        for starts in _groups(problem, size, budget):
            plans = list(_in_turn(problem, size, starts, budget, below))
            if plans:
                turn = Budget(moves)
                best = min(plans, key=_span)
                found.append(improve(problem, best, turn, Draws(0), DETOUR))
                budget.spend(turn.spent)
            if not budget.is_left:
                break
    return min(found, key=_span, default=None)


def _span(plan: Plan) -> float:
    return plan.span


def _groups(problem: PlacementProblem, size: int, budget: Budget) -> Iterator[Starts]:
    """Starts of a group by rule, as it is best by itself, and one work apart."""
    group = replace(problem, n_microbatches=size)
    ranks = partial(ranks_of, group, partial(order_of, group))
    plan = list_schedule(group, settings_of(group, RULES[0], ranks), math.inf, budget)
    assert plan is not None
    yield starts_of(group, plan)
    turn, moves = Budget(24 * group.n_passes), Budget(60 * group.n_passes)
    plan = improve(group, seeds(group, turn)[0].plan, moves, Draws(0))
    budget.spend(turn.spent + moves.spent)
    yield starts_of(group, plan)
    unit = max(problem.work) / problem.n_microbatches
    yield [[way + i * unit for i in range(size)] for way in chain_offsets(problem)]


def _in_turn(
    problem: PlacementProblem, size: int, starts: Starts, budget: Budget, below: float
) -> Iterator[Plan]:
    """Let groups begin as often as the work allows, down to one after the other."""
    unit, m = max(problem.work) / problem.n_microbatches, problem.n_microbatches
    often, seldom = 0.75 * size * unit, max(map(max, starts)) + unit
    known: list[Rows] = []
    for step in range(_PERIODS):
        period = often + (seldom - often) * step / _PERIODS
        every = [
            [own[i % size] + i // size * period for i in range(m)] for own in starts
        ]
        rows = rows_by_starts(problem, every)
        if rows in known:
            continue
        known.append(rows)
        if not budget.is_left:
            return
        budget.spend(problem.n_passes)
        plan = place_weights(problem, rows, [_LATE] * problem.n_stages, below)
        if plan is not None:
            yield retime(problem, plan)
