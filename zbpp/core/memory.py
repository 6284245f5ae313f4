"""Memory along an order: it depends on the order alone, not on the times."""

from collections.abc import Sequence

from zbpp.core.costs import ChunkMemory
from zbpp.core.jobs import Job, Pass

__all__ = ["held_during", "peaks"]


def held_during(order: Sequence[Job], memory: ChunkMemory) -> list[float]:
    """Memory that a stage holds while each of its jobs runs.

    F takes its memory when it starts, B and W give theirs back when they end.
    """
    held = 0.0
    during = []
    for job in order:
        change = memory.change(job.kind, job.chunk) if isinstance(job, Pass) else 0.0
        during.append(held + max(change, 0.0))
        held += change
    return during


def peaks(orders: Sequence[Sequence[Job]], memory: ChunkMemory) -> list[float]:
    """Largest memory of each stage, in the unit of the memory model."""
    return [max(held_during(order, memory), default=0.0) for order in orders]
