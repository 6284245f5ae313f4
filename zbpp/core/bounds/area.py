"""The bound ``area``: the memory that is held, over time.

Each micro-batch holds m_b of each chunk for its loop or longer, and m_w for its W. The
sum over all is at most limit x span.
"""

import math

from zbpp.core.bounds.ways import MARGIN, Ways

__all__ = ["area"]


def area(ways: Ways, stage: int) -> float:
    """Bound the span of a stage by memory and time together."""
    limit = ways.memory.limit[stage]
    if not 0 < limit < math.inf:
        return 0.0
    m_b, m_w = ways.memory.m_b, ways.memory.m_w
    held = sum(
        m_b[chunk] * ways.loop(chunk) + m_w[chunk] * ways.times.w[chunk]
        for chunk in ways.chunks_of[stage]
    )
    return ways.m * held / (limit * (1 + MARGIN))
