"""Time of a message on each edge between two consecutive chunks.

    chunk        0 ---- 1 ---- 2 ---- 3        edges: F goes right, B goes left
    stage (V)    0      1      1      0        the same two stages share one link
    link         link 0    -     link 0        both ways; within a stage: no time

A list of delays is read by its length, for p stages and C chunks. Where a length fits
twice, the first reading counts:

=======  ==================================================================
C - 1    one per edge, in the order of the chunks
p - 1    one per link between neighbours: link s joins stages s and s+1
p        the same, and a last one that joins stages p-1 and 0 (interleaved)
=======  ==================================================================

With one chunk a stage in order, edges and links are the same. Two stages are
neighbours: link 0 joins them in every placement, and a second entry is not used.
"""

from itertools import pairwise

from zbpp.core.errors import RequestError
from zbpp.core.placement import Placement

__all__ = ["edge_delays", "reduction_delay"]


def edge_delays(
    comm: float | tuple[float, ...], placement: Placement, *, name: str = "comm"
) -> tuple[float, ...]:
    """Give every edge its delay: entry c is between chunks c and c+1.

    ``name`` is that of the costs, for errors.

    >>> edge_delays((0.5, 0.25), Placement.wave(3))
    (0.5, 0.25, 0.0, 0.25, 0.5)

    Raises:
        RequestError: the list has another length, or lacks a link of the placement.
    """
    edges = list(pairwise(placement.stage_of))
    if not isinstance(comm, tuple):
        return tuple(comm if source != target else 0.0 for source, target in edges)
    n_stages = placement.n_stages
    if len(comm) == len(edges):
        delays = comm
    elif len(comm) in (n_stages - 1, n_stages):
        delays = tuple(
            comm[_link(comm, placement, chunk, name)] if source != target else 0.0
            for chunk, (source, target) in enumerate(edges)
        )
    else:
        raise RequestError(
            f"{name} has {len(comm)} entries for {n_stages} stages and "
            f"{placement.n_chunks} chunks; give one number, {n_stages - 1} (links "
            f"between neighbours), {n_stages} (with the link from stage "
            f"{n_stages - 1} to 0) or {len(edges)} (edges between chunks)"
        )
    return tuple(
        delay if source != target else 0.0
        for delay, (source, target) in zip(delays, edges, strict=True)
    )


def reduction_delay(hops: tuple[float, ...], n_stages: int) -> float:
    """Time of a sum of a few numbers over all stages, known to all of them.

    2 ceil(log2 p) messages one after the other, up a binary tree and down again, each
    on the slowest link (reduce and broadcast of short vectors: Thakur, Rabenseifner
    and Gropp, "Optimization of collective communication operations in MPICH", 2005).

    >>> reduction_delay((0.5, 0.25, 0.25), n_stages=4)
    2.0
    """
    return 2 * (n_stages - 1).bit_length() * max(hops, default=0.0)


def _link(comm: tuple[float, ...], placement: Placement, chunk: int, name: str) -> int:
    """The link on which a chunk sends to the next one."""
    stage_of, last = placement.stage_of, placement.n_stages - 1
    ends = sorted((stage_of[chunk], stage_of[chunk + 1]))
    if ends[1] == ends[0] + 1:
        return ends[0]
    if ends == [0, last] and len(comm) == last + 1:
        return last
    raise RequestError(
        f"{name} has {len(comm)} entries, one per link, and none joins stage "
        f"{stage_of[chunk]} (chunk {chunk}) and stage {stage_of[chunk + 1]} (chunk "
        f"{chunk + 1}); "
        + (
            f"add the link from stage {last} to 0 as entry {last + 1}, or "
            if ends == [0, last]
            else ""
        )
        + f"give one entry per edge between chunks, {placement.n_chunks - 1} in all"
    )
