"""The rules of UNSHARD, RESHARD, REDUCE_GRAD and REDUCE_WAIT in an order.

    0UNSHARD 0F0 0B0 0RESHARD 0W0 0REDUCE_GRAD .. 0REDUCE_WAIT O
    |<-- F, B and BW in here -->|     after W |<--- before O --->|

All processes that hold a stage run the same order, so they start their collectives in
the same order too: what one waits for the others have started, or will.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from zbpp.core.jobs import Collective, CollectiveKind, Job, Pass, PassKind, Step
from zbpp.core.placement import Placement

__all__ = ["collective_mistake", "unequal_mistake"]

UNSHARD, RESHARD = CollectiveKind.UNSHARD, CollectiveKind.RESHARD
REDUCE_GRAD, REDUCE_WAIT = CollectiveKind.REDUCE_GRAD, CollectiveKind.REDUCE_WAIT


@dataclass
class _Chunk:
    """State of a chunk along an order."""

    is_sharded: bool
    to_reduce: Pass | None = None
    """Its last weight gradient that no REDUCE_GRAD has added up."""
    is_reducing: bool = False


def collective_mistake(order: Sequence[Job]) -> tuple[int, str] | None:
    """Find the first breach of the rules in an order; its column, and the reason.

    Without a collective there is none.
    """
    jobs = [job for job in order if isinstance(job, Collective)]
    if not jobs:
        return None
    gathered = {job.chunk for job in jobs if job.kind is UNSHARD}
    reduces = any(job.kind in (REDUCE_GRAD, REDUCE_WAIT) for job in jobs)
    chunks: dict[int, _Chunk] = {}
    for column, job in enumerate(order):
        if isinstance(job, Pass | Collective):
            chunk = chunks.setdefault(job.chunk, _Chunk(job.chunk in gathered))
            if isinstance(job, Pass):
                reason = _pass(job, chunk)
            else:
                reason = _collective(job, chunk)
        else:
            reason = _unfinished(chunks) if isinstance(job, Step) and reduces else None
        if reason:
            return column, reason
    reason = _unfinished(chunks) if reduces else None
    return (len(order), reason) if reason else None


def unequal_mistake(
    orders: Sequence[Sequence[Job]], placement: Placement
) -> tuple[int, str] | None:
    """Find a chunk without UNSHARD or REDUCE_GRAD where others have one; its stage."""
    for kind in (UNSHARD, REDUCE_GRAD):
        have = {
            job.chunk
            for order in orders
            for job in order
            if isinstance(job, Collective) and job.kind is kind
        }
        lack = sorted(set(range(placement.n_chunks)) - have)
        if have and lack:
            reason = f"{lack[0]}{kind} is missing, though chunk {min(have)} has one"
            return placement.stage_of[lack[0]], reason
    return None


def _pass(job: Pass, chunk: _Chunk) -> str | None:
    """Note a pass; explain why it cannot run here."""
    if job.kind in (PassKind.W, PassKind.BW):
        chunk.to_reduce = job
    if job.kind is PassKind.W or not chunk.is_sharded:
        return None
    return (
        f"{job} needs the parameters of chunk {job.chunk}, which are sharded here; put "
        f"{job.chunk}{UNSHARD} before it"
    )


def _collective(job: Collective, chunk: _Chunk) -> str | None:
    """Note a collective; explain why it cannot run here."""
    match job.kind:
        case CollectiveKind.UNSHARD:
            was_sharded, chunk.is_sharded = chunk.is_sharded, False
            return None if was_sharded else f"{job}: chunk {job.chunk} is gathered here"
        case CollectiveKind.RESHARD:
            was_sharded, chunk.is_sharded = chunk.is_sharded, True
            if not was_sharded:
                return None
            return f"{job}: chunk {job.chunk} is sharded here; remove one of both"
        case CollectiveKind.REDUCE_GRAD:
            if chunk.is_reducing:
                return f"{job} comes before the {REDUCE_WAIT} of the one before"
            if chunk.to_reduce is None:
                return f"{job}: no W or BW of chunk {job.chunk} comes before it"
            chunk.to_reduce, chunk.is_reducing = None, True
            return None
        case CollectiveKind.REDUCE_WAIT:
            was_reducing, chunk.is_reducing = chunk.is_reducing, False
            return None if was_reducing else f"{job}: no {job.chunk}{REDUCE_GRAD} runs"


def _unfinished(chunks: dict[int, _Chunk]) -> str | None:
    """Name what a chunk lacks at the end of its step; None if nothing."""
    for number, chunk in sorted(chunks.items()):
        if chunk.to_reduce is not None:
            return f"{number}{REDUCE_GRAD} is missing after {chunk.to_reduce}"
        if chunk.is_reducing:
            return f"{number}{REDUCE_WAIT} is missing"
    return None
