"""The loops of the planner: in C where it was compiled, else in Python; equal plans.

`list_scheduler` and `critical_path` hold the loops as one reads them, and serve where
there is no compiler. Here the same calls are handed to C, as arrays.
"""

import ctypes
import math
from array import array
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple, TypeAlias

from zbpp.schedules.planner.budget import Budget
from zbpp.schedules.planner.compiled.library import (
    Structure,
    check,
    doubles,
    kept,
    library,
    pointer,
    whole,
)
from zbpp.schedules.planner.search import critical_path, list_scheduler
from zbpp.schedules.planner.search.critical_path import COST, XorShift64
from zbpp.schedules.planner.search.list_scheduler import Settings
from zbpp.schedules.planner.search.problem import PlacementProblem, Plan, Rows

__all__ = ["Starts", "Timed", "improve", "list_schedule", "timed"]


def _flatten(problem: PlacementProblem) -> Structure:
    """`Problem` of loops.h."""
    counts = [len(numbers) for numbers in problem.numbers]
    return Structure(
        n_microbatches=problem.n_microbatches,
        n_chunks=problem.n_chunks,
        n_stages=problem.n_stages,
        is_plain=int(problem.is_plain),
        unit=float(problem.unit),
        tiny=problem.tiny,
        target=problem.target,
        time=doubles(problem.time),
        change=doubles(problem.change),
        peak=doubles(problem.peak),
        delay=doubles(problem.delay),
        needs=doubles(problem.needs),
        work=doubles(problem.work),
        limits=doubles(problem.limits),
        forward_limits=doubles(problem.forward_limits),
        stage=whole(problem.stage),
        numbers=whole(chain.from_iterable(problem.numbers)),
        first=whole(accumulate(counts, initial=0)),
        joint=whole(problem.joint),
    )


def _joined(rows: Sequence[Sequence[int]]) -> "array[int]":
    joined = array("i")
    for row in rows:
        joined.extend(row)
    return joined


def list_schedule(
    problem: PlacementProblem, settings: Settings, below: float, budget: Budget
) -> Plan | None:
    """Plan as `list_scheduler.list_schedule` does, and spend the passes it places."""
    if library is None:
        plan, n_placed = list_scheduler.list_schedule(problem, settings, below)
        budget.spend(n_placed)
        return plan
    order = settings.order
    rules = Structure(
        is_fair=int(settings.is_fair),
        overrun_tail=float(settings.overrun_tail),
        delay_b=float(settings.delay_b),
        delay_f=float(settings.delay_f),
        offset=doubles(settings.offset),
        max_in_flight=whole(settings.max_in_flight),
        max_without_b=whole(settings.max_without_b),
        early=whole(settings.early),
        overrun=doubles(settings.overrun),
        order=None if order is None else _joined(order),
        order_from=whole(accumulate(map(len, order or ()), initial=0)),
    )
    m = problem.n_microbatches
    sizes = [3 * m * len(numbers) // 2 for numbers in problem.numbers]
    rows_from = whole(accumulate(sizes, initial=0))
    rows = array("i", bytes(4 * rows_from[-1]))
    lengths = array("q", bytes(8 * problem.n_stages))
    span = ctypes.c_double()
    is_done = check(
        library.zbpp_list_schedule(
            kept(problem, _flatten).address,
            rules.address,
            ctypes.c_double(below),
            pointer(rows),
            pointer(rows_from),
            pointer(lengths),
            ctypes.byref(span),
        )
    )
    budget.spend(sum(lengths))
    if not is_done:
        return None
    starts = zip(rows_from, lengths, strict=False)
    return Plan(span.value, [rows[at : at + n] for at, n in starts])


Starts: TypeAlias = Sequence[Sequence[float]]
"""Starts of F's and B's, by number and micro-batch."""


class Timed(NamedTuple):
    """A plan, and when its F's and B's start."""

    plan: Plan
    starts: Starts


def timed(problem: PlacementProblem, rows: Rows) -> Timed:
    """Let every pass start as early as its row allows.

    Rows whose stages wait for one another have an infinite span.
    """
    m = problem.n_microbatches
    if library is None:
        times, _ = critical_path.time_rows(problem, rows)
        if times is None:
            return Timed(Plan(math.inf, rows), ())
        return Timed(Plan(times.span, rows), times.begins[: 2 * problem.n_chunks])
    begins = array("d", bytes(8 * problem.n_passes))
    joined, lengths = _joined(rows), whole(map(len, rows))
    span = ctypes.c_double()
    is_done = check(
        library.zbpp_time_rows(
            kept(problem, _flatten).address,
            pointer(joined),
            pointer(lengths),
            pointer(begins),
            ctypes.byref(span),
        )
    )
    if not is_done:
        return Timed(Plan(math.inf, rows), ())
    numbers = range(2 * problem.n_chunks)
    starts = [begins[q * m : (q + 1) * m] for q in numbers]
    return Timed(Plan(span.value, rows), starts)


def improve(
    problem: PlacementProblem,
    plan: Plan,
    budget: Budget,
    draws: XorShift64,
    threshold: float = 0.0,
) -> Plan:
    """Climb as `critical_path.improve` does."""
    if library is None:
        return critical_path.improve(problem, plan, budget, draws, threshold)
    if plan.span <= problem.target or not budget.is_left:
        return plan
    joined, lengths = _joined(plan.rows), whole(map(len, plan.rows))
    state, span = ctypes.c_uint64(draws.state), ctypes.c_double()
    spent = ctypes.c_double(budget.spent)
    is_done = check(
        library.zbpp_improve(
            kept(problem, _flatten).address,
            pointer(joined),
            pointer(lengths),
            ctypes.c_double(COST),
            ctypes.c_double(budget.passes),
            ctypes.c_double(threshold),
            ctypes.byref(spent),
            ctypes.byref(state),
            ctypes.byref(span),
        )
    )
    assert is_done, "rows of a plan cannot come to a deadlock"
    draws.state, budget.spent = state.value, spent.value
    if span.value >= plan.span:
        return plan
    ends = zip(accumulate(lengths), lengths, strict=True)
    return Plan(span.value, [joined[end - n : end] for end, n in ends])
