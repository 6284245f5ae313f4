"""The bound ``bottleneck``: a slow stage further down.

The stage's span starts with an F of its first chunk a (all other jobs need one). All m
micro-batches go through every stage whose first chunk is not before a (`Ways.through`),
and a W of a remains.
"""

from zbpp.core.bounds.ways import Ways

__all__ = ["bottleneck"]


def bottleneck(ways: Ways, stage: int) -> float:
    """Bound the span of a stage by the work of the stages after it."""
    first = ways.chunks_of[stage][0]
    return ways.through(first, ways.m) + ways.times.w[first]
