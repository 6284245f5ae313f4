"""The bound ``front and tail``: what a stage waits at first and at last.

Front: up to its first B, one of its last chunk, a stage can only do F's, no more than
memory holds beside the peak of that B. Yet it cannot start before one micro-batch has
gone the way from F of the stage's first chunk to the B of its last one. The rest is
idle.

Tail: with one chunk a stage and more micro-batches than fit, the same at the end. From
the last F's end to its own B lies the loop; then only B's of the x - 1 other
micro-batches in flight and their W's, and y pending W's can fill it, where
x m_b + y m_w fit in memory. It adds to front, since the last F comes after the first B.
"""

import math

from zbpp.core.bounds.ways import MARGIN, Ways
from zbpp.core.bounds.work import work

__all__ = ["front_tail"]


def front_tail(ways: Ways, stage: int) -> float:
    """Bound the span of a stage by its work and the idle time at both ends."""
    return work(ways, stage) + _front(ways, stage) + _tail(ways, stage)


def _front(ways: Ways, stage: int) -> float:
    times, last_chunk = ways.times, ways.last_chunk
    chunks = ways.chunks_of[stage]
    fill = ways.m * sum(times.f[chunk] for chunk in chunks)
    least = min(ways.memory.m_b[chunk] for chunk in chunks)
    fits = ways.fits(stage, least, ways.memory.peak_b[chunks[-1]])
    if fits < ways.m * len(chunks):
        fill = min(fill, fits * max(times.f[chunk] for chunk in chunks))
    first, last = chunks[0], chunks[-1]
    way = ways.down[last_chunk] - ways.down[first] + times.f[last_chunk]
    way += ways.up[last_chunk] - ways.up[last] + times.b[last_chunk]
    way -= times.b[last]
    return max(0.0, way - fill)


def _tail(ways: Ways, stage: int) -> float:
    times, memory = ways.times, ways.memory
    if len(times.placement.stage_of) > len(ways.chunks_of):
        return 0.0
    (chunk,) = ways.chunks_of[stage]
    in_flight = ways.in_loop(stage, chunk)
    if in_flight >= ways.m:
        return 0.0
    b, w = times.b[chunk], times.w[chunk]
    fill = 0.0
    for x in range(1, int(in_flight) + 1):
        left = memory.limit[stage] * (1 + MARGIN)
        left -= x * memory.m_b[chunk]
        m_w = memory.m_w[chunk]
        pending = left / m_w if m_w > 0 else math.inf
        y = min(ways.m - x, math.floor(min(pending, ways.m)))
        fill = max(fill, (x - 1) * (b + w) + y * w)
    return max(0.0, ways.loop(chunk) - times.f[chunk] - b - fill)
