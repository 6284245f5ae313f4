"""The bound ``work``: all that a stage does.

The stage does m (F + B + W), F, B and W being sums over its chunks.
"""

from zbpp.core.bounds.ways import Ways

__all__ = ["work"]


def work(ways: Ways, stage: int) -> float:
    """Bound the span of a stage by its own work."""
    times = ways.times
    return ways.m * sum(
        times.f[chunk] + times.b[chunk] + times.w[chunk]
        for chunk in ways.chunks_of[stage]
    )
