"""The bound ``area``: the memory that is held, over time.

Each micro-batch holds m_b of each chunk for its loop or longer, and m_w for its W; and
each pass its peak above that, while it runs. A BW holds m_b and its peak instead. The
sum over all is at most limit x span.
"""

import math

from zbpp.core.bounds.ways import MARGIN, Ways

__all__ = ["area"]


def area(ways: Ways, stage: int) -> float:
    """Bound the span of a stage by memory and time together."""
    limit = ways.whole.limit[stage]
    if not 0 < limit < math.inf:
        return 0.0
    held = sum(_held(ways, chunk) for chunk in ways.chunks_of[stage])
    return ways.m * held / (limit * (1 + MARGIN))


def _held(ways: Ways, c: int) -> float:
    """Memory of a micro-batch on a chunk, times the time that it is held at least."""
    times, memory = ways.times, ways.whole
    b, w = times.b[c], times.w[c]
    split = memory.peak_b[c] * b + (memory.m_w[c] + memory.peak_w[c]) * w
    joint = memory.m_b[c] * w + memory.peak_bw[c] * (b + w)
    inside = (memory.peak_f[c] - memory.m_b[c]) * times.f[c]
    return memory.m_b[c] * ways.loop(c) + min(split, joint) + inside
