"""ZB: the best order we find for one chunk a stage, under any times and any memory.

The same two stages and four micro-batches, F = B = W = 1, for three memory limits:

    limit 1  0 | F0 .  .  B0 W0 F1 .  .  B1 W1 F2 .  .  B2 W2 F3 .  .  B3 W3
             1 | .  F0 B0 W0 .  .  F1 B1 W1 .  .  F2 B2 W2 .  .  F3 B3 W3

    limit 2  0 | F0 F1 .  B0 W0 F2 B1 W1 F3 B2 W2 B3 W3
             1 | .  F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3

    limit 3  0 | F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3
             1 | .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

The orders of 1F1B, ZB-H1 and ZB-H2 are where the search begins: what is planned is
never worse than those of them that fit the memory. ZBH1 and ZBH2 promise a memory
(ZB-1p and ZB-2p are the paper's names of such plans: Qi et al., arXiv 2401.10241).
"""

import math
from functools import partial

from zbpp.core import Costs, MemoryModel, Placement, Schedule
from zbpp.schedules.planner.limits import capped, check_one_fits
from zbpp.schedules.planner.multi.problem import PlacementProblem
from zbpp.schedules.planner.occupied import also_as_delays
from zbpp.schedules.planner.request import check_sizes
from zbpp.schedules.planner.single.compiled import time_orders
from zbpp.schedules.planner.single.moves import move_passes
from zbpp.schedules.planner.single.problem import (
    Kinds,
    Line,
    line_of,
    named,
)
from zbpp.schedules.planner.single.search import search
from zbpp.schedules.planner.single.seeds import hand_made

__all__ = ["plan_zb"]

_UNIT = Costs()
_NO_LIMIT = MemoryModel()
_SMALL = 3000  # passes; larger lines are planned once


def plan_zb(
    *,
    n_stages: int,
    n_microbatches: int,
    costs: Costs = _UNIT,
    memory: MemoryModel = _NO_LIMIT,
    effort: str = "default",
    name: str = "ZB",
    memory_cap: float = math.inf,
) -> Schedule:
    """Plan under the memory limit; without one, under 2p M_B.

    Args:
        n_stages: stages, at least 1.
        n_microbatches: micro-batches in a step, at least 1.
        costs: one entry per stage, or numbers for all.
        memory: likewise; every limit must hold one micro-batch.
        effort: see `zbpp.schedules.planner.budget`.
        name: the mode, for people.
        memory_cap: a further limit on every stage, in M_B of that stage.

    Raises:
        LimitError: a limit holds no micro-batch; it names the smallest that works.
        RequestError: a number is invalid.
    """
    check_sizes(n_stages, n_microbatches)

    def planned(costs: Costs, effort: str) -> Schedule:
        return _plan(n_stages, n_microbatches, costs, memory, effort, name, memory_cap)

    return also_as_delays(planned, costs, effort)


def _plan(
    n_stages: int,
    n_microbatches: int,
    costs: Costs,
    memory: MemoryModel,
    effort: str,
    name: str,
    memory_cap: float,
) -> Schedule:
    placement = Placement.single(n_stages)
    splits = costs.on(placement).splits
    check_one_fits(name, placement, memory, n_microbatches, splits=splits)
    limited = partial(
        capped, memory, placement, splits=splits, default_limit=2 * n_stages
    )
    line = line_of(n_stages, n_microbatches, costs, limited(memory_cap=memory_cap))
    kinds, is_optimal = _orders(line, costs, limited(memory_cap=memory_cap), effort)
    for cap in [] if is_optimal else _lower_caps(line, effort):
        less = limited(memory_cap=cap)
        lower = line_of(n_stages, n_microbatches, costs, less)
        if lower.bound() < time_orders(line, kinds):
            other, _ = _orders(lower, costs, less, effort)
            kinds = min(kinds, other, key=partial(time_orders, line))
    return Schedule(
        name,
        placement,
        n_microbatches,
        named(line, kinds),
        memory=None if memory.limit is None else memory,
    )


def _orders(
    line: Line, costs: Costs, limited: MemoryModel, effort: str
) -> tuple[Kinds, bool]:
    """Search, and move passes of what was found; true if it meets its bound."""
    found = search(line, effort, hand_made(line))
    if found.is_optimal:
        return found.kinds, True
    placement = Placement.single(line.n_stages)
    problem = PlacementProblem.of(placement, line.n_microbatches, costs, limited)
    return move_passes(problem, found.kinds, effort), False


def _lower_caps(line: Line, effort: str) -> list[float]:
    """Limits in M_B below that of a small line, whose plans fit it too.

    Where the search already saw to it that more memory gives no longer plan, moves of
    passes may do better under less: the quarter of M_B below, and the whole one.
    """
    small = 3 * line.n_stages * line.n_microbatches < _SMALL
    if effort != "default" or not small:
        return []
    ratios = zip(line.limit, line.beyond, line.m_b, strict=True)
    most = max((one - more) / held if held else 0.0 for one, more, held in ratios)
    if not 1 < most < math.inf:
        return []
    return sorted(
        {max(1.0, (math.ceil(4 * most) - 1) / 4), max(1.0, math.ceil(most) - 1.0)}
    )
