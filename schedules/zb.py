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
from dataclasses import replace

from zbpp.core import Costs, MemoryModel, Placement, RequestError, Schedule
from zbpp.schedules.line import Line, line_of, named
from zbpp.schedules.search import search
from zbpp.schedules.seeds import hand_made

__all__ = ["plan_zb", "plan_zb1p", "plan_zb2p"]

_UNIT = Costs()
_NO_LIMIT = MemoryModel()
_MARGIN = 1e-9  # relative; as in `Schedule`


def plan_zb(
    *,
    n_stages: int,
    n_microbatches: int,
    costs: Costs = _UNIT,
    memory: MemoryModel = _NO_LIMIT,
    effort: str = "default",
    splits: tuple[bool, ...] | None = None,
) -> Schedule:
    """Plan under the memory limit; without one, under 2p M_B.

    Args:
        n_stages: stages, at least 1.
        n_microbatches: micro-batches in a step, at least 1.
        costs: one entry per stage, or numbers for all.
        memory: likewise; every limit must hold one micro-batch.
        effort: see `zbpp.schedules.effort`.
        splits: which stages can split their backward into B and W; default all.

    Raises:
        RequestError: a number is missing, or a limit holds no micro-batch.
    """
    return _plan(
        "ZB", n_stages, n_microbatches, costs, memory, effort, splits, math.inf
    )


def plan_zb1p(
    *,
    n_stages: int,
    n_microbatches: int,
    costs: Costs = _UNIT,
    memory: MemoryModel = _NO_LIMIT,
    effort: str = "default",
) -> Schedule:
    """Plan ZBH1: as `plan_zb`, but never above p M_B.

    Raises:
        RequestError: as `plan_zb`.
    """
    most = n_stages
    return _plan("ZBH1", n_stages, n_microbatches, costs, memory, effort, None, most)


def plan_zb2p(
    *,
    n_stages: int,
    n_microbatches: int,
    costs: Costs = _UNIT,
    memory: MemoryModel = _NO_LIMIT,
    effort: str = "default",
) -> Schedule:
    """Plan ZBH2: as `plan_zb`, but never above (2p-1) M_B.

    Raises:
        RequestError: as `plan_zb`.
    """
    most = 2 * n_stages - 1
    return _plan("ZBH2", n_stages, n_microbatches, costs, memory, effort, None, most)


def _plan(
    name: str,
    n_stages: int,
    n_microbatches: int,
    costs: Costs,
    memory: MemoryModel,
    effort: str,
    splits: tuple[bool, ...] | None,
    most: float,
) -> Schedule:
    """Plan under the limit, and under ``most`` M_B."""
    if n_stages < 1 or n_microbatches < 1:
        raise RequestError(
            f"{n_stages} stages and {n_microbatches} micro-batches are asked for; "
            "there must be at least 1 of each"
        )
    line = line_of(n_stages, n_microbatches, costs, memory, splits)
    _check_feasible(name, line)
    if memory.limit is None:
        most = min(most, 2 * n_stages)
    if most < math.inf:
        caps = zip(line.limit, line.m_b, strict=True)
        limit = tuple(min(limit, most * m_b) for limit, m_b in caps)
        line = replace(line, limit=limit)
    found = search(line, effort, hand_made(line))
    return Schedule(
        name,
        Placement.single(n_stages),
        n_microbatches,
        named(line, found.kinds),
        memory=None if memory.limit is None else memory,
    )


def _check_feasible(name: str, line: Line) -> None:
    """Refuse limits that do not hold one micro-batch: the smallest that can work."""
    stage = max(range(line.n_stages), key=lambda s: line.m_b[s] - line.limit[s])
    if line.m_b[stage] > line.limit[stage] * (1 + _MARGIN):
        raise RequestError(
            f"{name} with {line.n_stages} stages and {line.n_microbatches} "
            f"micro-batches needs memory {line.m_b[stage]:g} on stage {stage}, over "
            f"the limit {line.limit[stage]:g}; no mode fits: take smaller "
            f"micro-batches, or raise memory_limit to {max(line.m_b):g} or more"
        )
