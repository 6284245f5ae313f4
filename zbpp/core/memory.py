"""Memory along an order: it depends on the order alone, not on the times."""

from collections.abc import Sequence

from zbpp.core.costs import ChunkCosts
from zbpp.core.jobs import Job, Pass

__all__ = ["held_during", "peaks"]


def held_during(order: Sequence[Job], costs: ChunkCosts, *, stage: int) -> list[float]:
    """Most that a stage holds while each of its jobs runs, fixed memory included.

    Args:
        order: the jobs of the stage.
        costs: of all chunks.
        stage: whose fixed memory it is.
    """
    held = costs.fixed[stage]
    during = []
    looked_up: dict[object, tuple[float, float]] = {}
    for job in order:
        key = (job.kind, job.chunk) if isinstance(job, Pass) else job
        if key not in looked_up:
            looked_up[key] = costs.peak(job), costs.change(job)
        peak, change = looked_up[key]
        during.append(held + peak)
        held += change
    return during


def peaks(orders: Sequence[Sequence[Job]], costs: ChunkCosts) -> list[float]:
    """Largest memory of each stage, in the unit of the costs."""
    return [
        max(held_during(order, costs, stage=stage), default=costs.fixed[stage])
        for stage, order in enumerate(orders)
    ]
