"""The bound ``bottleneck``: a slow stage further down.

Take a stage k whose first chunk c is not before a, the first chunk of the stage. The
stage's span starts with an F of a (all other jobs need one), so k's F and B take
m (F + B) after the path from a's F to c's F. The last of them is a B of c, after which
the path back to a's B and a W of a remain.
"""

from zbpp.core.bounds.ways import Ways

__all__ = ["bottleneck"]


def bottleneck(ways: Ways, stage: int) -> float:
    """Bound the span of a stage by the work of the stages after it."""
    times = ways.times
    first = ways.chunks_of[stage][0]
    longest = 0.0
    for chunks in ways.chunks_of:
        target = chunks[0]
        if target < first:
            continue
        way = ways.down[target] - ways.down[first]
        way += ways.up[target] - ways.up[first]
        busy = sum(times.f[chunk] + times.b[chunk] for chunk in chunks)
        longest = max(longest, way + ways.m * busy)
    return longest + times.w[first]
