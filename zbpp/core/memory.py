"""Memory along an order: it depends on the order alone, not on the times."""

from collections.abc import Sequence

from zbpp.core.costs import ChunkMemory
from zbpp.core.jobs import Job, Pass

__all__ = ["held_during", "peaks"]


def held_during(
    order: Sequence[Job], memory: ChunkMemory, *, stage: int
) -> list[float]:
    """Most that a stage holds while each of its jobs runs, fixed memory included.

    Args:
        order: the jobs of the stage.
        memory: of all chunks.
        stage: whose fixed memory it is.
    """
    held = memory.fixed[stage]
    during = []
    looked_up: dict[object, tuple[float, float]] = {}
    for job in order:
        key = (job.kind, job.chunk) if isinstance(job, Pass) else job
        if key not in looked_up:
            looked_up[key] = memory.peak(job), memory.change(job)
        peak, change = looked_up[key]
        during.append(held + peak)
        held += change
    return during


def peaks(orders: Sequence[Sequence[Job]], memory: ChunkMemory) -> list[float]:
    """Largest memory of each stage, in the unit of the memory model."""
    return [
        max(held_during(order, memory, stage=stage), default=memory.fixed[stage])
        for stage, order in enumerate(orders)
    ]
