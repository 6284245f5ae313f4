"""Memory as the proofs of the bounds see it: no peaks, nothing fixed, no rise by B.

Every schedule that keeps the true model keeps this one too, so that a bound under this
one holds under the true one:

- What is fixed is taken off the limit.
- A chunk keeps min(m_w, m_b) for its W. At no time is more held than in truth.
- Then only F's add memory, and most is held right after one, F of c: at least
  peak_f - m_b of c less than the limit. So the least of these is taken off as well.
"""

from dataclasses import replace

from zbpp.core.costs import ChunkMemory
from zbpp.core.placement import Placement

__all__ = ["relaxed"]


def relaxed(memory: ChunkMemory, placement: Placement) -> ChunkMemory:
    """Take peaks, what is fixed and what B adds out of a model; see the text."""
    memory = memory.above_fixed()
    inside = [peak - left for peak, left in zip(memory.peak_f, memory.m_b, strict=True)]
    limits = zip(memory.limit, placement.chunks_of, strict=True)
    return replace(
        memory,
        m_w=tuple(map(min, memory.m_w, memory.m_b)),
        limit=tuple(
            max(0.0, limit - max(0.0, min(inside[c] for c in own)))
            for limit, own in limits
        ),
    )
