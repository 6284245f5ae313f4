"""The list scheduler: one simulation of all stages that decides as it goes.

A stage is asked for its next pass when it becomes free or when an input reaches it.
Passes are never interrupted, so the arrival of an input is known as soon as its
producer *starts*: every rule below looks that far ahead.

1. Of the F's and B's that are ready, take the one with the smallest rank, that is the
   number of the micro-batch times the work of one, and `Settings.offset` of the number
   in the chain.
2. An F is not ready while memory lacks (see below), or if it would delay a better pass
   that is known to come: a B by more than the share ``delay_b`` of the F's time, or an
   F of a later chunk by more than ``delay_f``. Nor is the stage's first F ready while
   ``max_in_flight`` micro-batches are in flight, or while ``max_without_b`` of them
   have had no B on the stage. But ``early`` times in all, an F that is ready and fits
   goes first, whatever it delays.
3. Else take a W, if it ends before the next known input, or overruns it by at most
   ``overrun`` of its time (``overrun_tail`` when the stage has no first F left), or if
   an F or a B lacks only memory, or, with ``is_fair``, if waiting would make this stage
   the one that has waited longest (arXiv 2401.10241).
4. Else sleep until an input arrives.

Where costs have parts, a pass computes up to its next exchange of data, and resumes
when that has ended; meanwhile its stage computes something else. Exchanges of a stage
queue. As the runtime has it, one F of a stage and one B of a chunk are open at a time.

    compute  0F0.0        0B1.1   0F0.2         0W1.0
    network        0F0.1~   0B1.2~      0F0.3~

With ``order``, rows of F's and B's, rules 1 and 2 are: the next pass of the row, as
soon as it is there and fits. So the same loop places the W's of a known order:

    0 | F0 F1 F2 .  B0 F3 B1 ...      given: the F's and B's of each stage
    0 | F0 F1 F2 .  B0 W0 F3 B1 ...   W's go where the stage waits, or memory lacks

No deadlock by ranks, for every limit that fits one micro-batch: an F is admitted only
if after it the first micro-batch with no B on this stage could still run all its F's,
once those before it have freed their memory. It then reaches its B's, and
when it is through, it leaves as much memory as the next one may need.

Passes with peaks, and B's that add memory, need more room: as much as the most
of them is left free by every F (`PlacementProblem.forward_limits`). Where the limit is
too low for this, one micro-batch is in flight at a time. A B waits for W's if it, or a
W after it, would not fit.
"""

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random
from typing import Any, TypeVar

from zbpp.schedules.planner.compiled import (
    Structure,
    check,
    doubles,
    loops,
    pointer,
    whole,
)
from zbpp.schedules.planner.problem import (
    ROUNDING,
    Budget,
    PlacementProblem,
    Plan,
    Rows,
    joined,
)


@dataclass(frozen=True)
class Settings:
    """Ranks and limits of one run; tuples have one entry per stage.

    Args:
        offset: of each F and B number, in the unit of the times.
        max_in_flight, max_without_b, early, overrun, overrun_tail, delay_b, delay_f,
            is_fair, order: see the rules.
        go_on: advantage in rank of a pass that has started; it has parts.
        most_open: passes of a stage that are open at once, of ``most_b`` B's.
        most_w: W's that wait before one goes ahead of all else, as it does where an F
            or B lacks memory; (): neither.
    """

    offset: tuple[float, ...]
    max_in_flight: tuple[int, ...]
    max_without_b: tuple[int, ...]
    early: tuple[int, ...]
    overrun: tuple[float, ...]
    overrun_tail: tuple[float, ...]
    delay_b: float = 0.0
    delay_f: float = 0.0
    is_fair: bool = False
    order: "Rows | None" = None
    go_on: float = 0.0
    most_open: int = 1
    most_b: tuple[int, ...] = ()
    most_w: tuple[int, ...] = ()


def list_schedule(
    problem: PlacementProblem, settings: Settings, below: float, budget: Budget
) -> Plan | None:
    """Plan by the rules, and spend the passes that are placed.

    The rows have parts where the costs do (`PlacementProblem.first_part`). None: the
    span cannot be under ``below``, or an order ends in a deadlock or does not fit the
    memory.
    """
    order = settings.order
    rules = Structure(
        is_fair=int(settings.is_fair),
        most_open=settings.most_open,
        delay_b=float(settings.delay_b),
        delay_f=float(settings.delay_f),
        go_on=float(settings.go_on),
        offset=doubles(settings.offset),
        max_in_flight=whole(settings.max_in_flight),
        max_without_b=whole(settings.max_without_b),
        early=whole(settings.early),
        most_b=whole(settings.most_b) if settings.most_b else None,
        most_w=whole(settings.most_w) if settings.most_w else None,
        overrun=doubles(settings.overrun),
        overrun_tail=doubles(settings.overrun_tail),
        order=None if order is None else joined(order),
        order_from=whole(accumulate(map(len, order or ()), initial=0)),
    )
    rows_from = whole(problem.rows_from)
    rows = array("i", bytes(4 * rows_from[-1]))
    lengths = whole(rows_from[1:])
    span = ctypes.c_double()
    is_done = check(
        loops().zbpp_list_schedule(
            problem.in_c.address,
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


_KINDS = "offset", "early", "overrun"
_LEAST = {"max_in_flight": 1, "most_b": 1}
_GO_ON = (0.0, 0.25, 0.5, 1.0, 2.0, 20.0)  # in the work of a micro-batch
_OVERRUNS = (0.0, 0.25, 0.5, 0.75, 1.0)
_T = TypeVar("_T")


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
        if better is not None and better.span <= plan.span * (1 + ROUNDING):
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
