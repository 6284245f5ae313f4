"""The loops of this planner, compiled if they can be."""

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from zbpp.schedules.planner.budget import Budget
from zbpp.schedules.planner.compiled.library import (
    Buffer,
    address,
    check,
    floats,
    library,
    whole_numbers,
)
from zbpp.schedules.planner.draws import Draws
from zbpp.schedules.planner.multi import critical_path, list_scheduler, timing
from zbpp.schedules.planner.multi import place_weights as weights
from zbpp.schedules.planner.multi.critical_path import COST
from zbpp.schedules.planner.multi.list_scheduler import Settings
from zbpp.schedules.planner.multi.problem import PlacementProblem, Plan

__all__ = ["improve", "list_schedule", "place_weights", "retime"]


class _Problem(ctypes.Structure):
    """`Problem` of loops.h."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in ("n_microbatches", "n_chunks", "n_stages", "is_plain")
        ),
        *((name, ctypes.c_double) for name in ("tiny", "target")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("time", "change", "peak", "delay", "needs"),
                *("stage", "numbers", "first", "joint"),
                *("work", "limits", "forward_limits", "all_forwards", "ample"),
            )
        ),
    )


class _Settings(ctypes.Structure):
    """`Settings` of placement.c."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("caps", "fresh", "ranks", "shift"),
                *("late", "late_tail", "hold", "hold_later"),
            )
        ),
        ("alternate", ctypes.c_double),
    )


@dataclass(frozen=True)
class _Flat:
    """A problem as C sees it, the arrays that it points to, and where rows begin."""

    problem: _Problem
    arrays: tuple[Buffer, ...]
    rows_from: Buffer


def _flat(problem: PlacementProblem) -> _Flat:
    """Make it once: it is kept with the problem, as its own properties are."""
    kept = vars(problem)
    if "flat" not in kept:
        kept["flat"] = _flatten(problem)
    flat: _Flat = kept["flat"]
    return flat


def _flatten(problem: PlacementProblem) -> _Flat:
    counts = [len(own) for own in problem.numbers]
    joint = array("B", [s in problem.joint for s in range(problem.n_stages)])
    arrays = (
        floats(problem.time),
        floats(problem.change),
        floats(problem.peak),
        floats(problem.delay),
        floats(problem.needs),
        whole_numbers(problem.stage),
        whole_numbers(chain.from_iterable(problem.numbers)),
        whole_numbers(accumulate(counts, initial=0)),
        joint,
        floats(problem.work),
        floats(problem.limits),
        floats(problem.forward_limits),
        floats(problem.all_forwards),
        floats(problem.ample),
    )
    structure = _Problem(
        problem.n_microbatches,
        problem.n_chunks,
        problem.n_stages,
        problem.is_plain,
        problem.tiny,
        problem.target,
        *map(address, arrays),
    )
    sizes = (n // 2 * 3 * problem.n_microbatches for n in counts)
    return _Flat(structure, arrays, whole_numbers(accumulate(sizes, initial=0)))


def list_schedule(
    problem: PlacementProblem, settings: Settings, below: float, budget: Budget
) -> Plan | None:
    """Plan once, as `list_scheduler.list_schedule` does, to the last bit."""
    if library is None:
        return list_scheduler.list_schedule(problem, settings, below, budget)
    flat = _flat(problem)
    ranks = floats(())
    for row in settings.ranks:
        ranks.extend(row)
    arrays = (
        *map(whole_numbers, (settings.caps, settings.fresh)),
        ranks,
        *map(floats, (settings.shift, settings.late, settings.late_tail)),
        *map(floats, (settings.hold, settings.hold_later)),
    )
    rows = array("i", [0]) * flat.rows_from[-1]
    lengths = whole_numbers([0] * problem.n_stages)
    span = ctypes.c_double()
    is_done = check(
        library.zbpp_list_schedule(
            ctypes.byref(flat.problem),
            ctypes.byref(_Settings(*map(address, arrays), settings.alternate)),
            ctypes.c_double(below),
            address(rows),
            address(flat.rows_from),
            address(lengths),
            ctypes.byref(span),
        )
    )
    budget.spend(sum(lengths))
    return _plan(flat, rows, lengths, span.value) if is_done else None


def place_weights(
    problem: PlacementProblem,
    given: Sequence[Sequence[int]],
    late: Sequence[float],
    below: float,
) -> Plan | None:
    """Add W's as `place_weights.place_weights` does, to the last bit."""
    if library is None:
        return weights.place_weights(problem, given, late, below)
    flat = _flat(problem)
    arrays = (
        array("i", chain.from_iterable(given)),
        whole_numbers(accumulate(map(len, given), initial=0)),
        floats(late),
    )
    rows = array("i", [0]) * flat.rows_from[-1]
    lengths = whole_numbers([0] * problem.n_stages)
    span = ctypes.c_double()
    is_done = check(
        library.zbpp_place_weights(
            ctypes.byref(flat.problem),
            *map(address, arrays),
            ctypes.c_double(below),
            address(rows),
            address(flat.rows_from),
            address(lengths),
            ctypes.byref(span),
        )
    )
    return _plan(flat, rows, lengths, span.value) if is_done else None


def _plan(flat: _Flat, rows: Buffer, lengths: Buffer, span: float) -> Plan:
    starts = zip(flat.rows_from, lengths, strict=False)
    return Plan(span, [rows[at : at + n].tolist() for at, n in starts])


def retime(problem: PlacementProblem, plan: Plan) -> Plan:
    """Let every pass of a valid plan start as early as it can."""
    if library is None:
        return timing.retime(problem, plan)
    rows = array("i", chain.from_iterable(plan.rows))
    lengths = whole_numbers(map(len, plan.rows))
    span = ctypes.c_double()
    is_done = check(
        library.zbpp_time(
            ctypes.byref(_flat(problem).problem),
            address(rows),
            address(lengths),
            ctypes.byref(span),
        )
    )
    assert is_done, "a valid plan has no deadlock"
    return Plan(span.value, plan.rows)


def improve(
    problem: PlacementProblem,
    plan: Plan,
    budget: Budget,
    draws: Draws,
    heat: float = 0.0,
) -> Plan:
    """Climb as `critical_path.improve` does, to the last bit."""
    if library is None:
        return critical_path.improve(problem, plan, budget, draws, heat)
    if plan.span <= problem.target or not budget.is_left:
        return plan
    rows = array("i", chain.from_iterable(plan.rows))
    lengths = whole_numbers(map(len, plan.rows))
    state, span = ctypes.c_uint64(draws.state), ctypes.c_double()
    spent = ctypes.c_double(budget.spent)
    is_done = check(
        library.zbpp_improve(
            ctypes.byref(_flat(problem).problem),
            address(rows),
            address(lengths),
            ctypes.c_double(COST),
            ctypes.c_double(budget.passes),
            ctypes.c_double(heat),
            ctypes.byref(spent),
            ctypes.byref(state),
            ctypes.byref(span),
        )
    )
    assert is_done, "rows that end cannot come to a deadlock"
    draws.state, budget.spent = state.value, spent.value
    if span.value >= plan.span:
        return plan
    ends = accumulate(lengths)
    parts = (rows[end - n : end] for end, n in zip(ends, lengths, strict=True))
    return Plan(span.value, [row.tolist() for row in parts])
