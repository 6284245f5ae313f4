"""Memory limits: the promises of modes, and requests that cannot fit."""

import math
from collections.abc import Sequence
from dataclasses import replace

from zbpp.core import ChunkMemory, LimitError, MemoryModel, Placement

__all__ = ["capped", "check_limits", "check_one_fits", "micro_batch"]

_MARGIN = 1e-9  # relative; as in `Schedule`


def micro_batch(held: ChunkMemory, placement: Placement) -> list[float]:
    """Return the memory of one micro-batch on each stage: M_B."""
    return [sum(held.m_b[chunk] for chunk in own) for own in placement.chunks_of]


def capped(
    memory: MemoryModel,
    placement: Placement,
    *,
    memory_cap: float = math.inf,
    default_limit: float = math.inf,
) -> MemoryModel:
    """Lower the limits to what a mode promises.

    Args:
        memory: what the caller gives.
        placement: chunk to stage.
        memory_cap: never more than this, in M_B of each stage.
        default_limit: the same where the caller gives no limit.

    Raises:
        RequestError: the memory does not fit the placement.
    """
    if memory.limit is None:
        memory_cap = min(memory_cap, default_limit)
    if math.isinf(memory_cap):
        return memory
    held = memory.on(placement)
    limits = tuple(
        min(limit, memory_cap * one)
        for limit, one in zip(held.limit, micro_batch(held, placement), strict=True)
    )
    return replace(memory, limit=limits)


def check_one_fits(
    name: str, placement: Placement, memory: MemoryModel, n_microbatches: int
) -> None:
    """Refuse limits that do not hold one micro-batch: the smallest that can work.

    Raises:
        LimitError: it names the smallest limit that works.
        RequestError: the memory does not fit the placement.
    """
    held = memory.on(placement)
    check_limits(name, micro_batch(held, placement), held.limit, n_microbatches)


def check_limits(
    name: str, needs: Sequence[float], limits: Sequence[float], n_microbatches: int
) -> None:
    """Refuse what needs more memory than there is, one entry per stage each.

    Raises:
        LimitError: it names the stage that lacks most, and the smallest limit that
            works.
    """
    lacks = [need - limit for need, limit in zip(needs, limits, strict=True)]
    stage = lacks.index(max(lacks))
    if needs[stage] > limits[stage] * (1 + _MARGIN):
        raise LimitError(
            f"{name} with {len(needs)} stages and {n_microbatches} micro-batches needs "
            f"memory {needs[stage]:g} on stage {stage}, over the limit "
            f"{limits[stage]:g}",
            smallest=max(needs),
        )
