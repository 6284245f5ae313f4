"""Memory as the proofs of the bounds see it: nothing fixed, no rise by B, few peaks.

Every schedule that keeps the true model keeps this one too, so that a bound under this
one holds under the true one:

- What is fixed is taken off the limit.
- A chunk keeps min(m_w, m_b) for its W. At no time is more held than in truth.
- Then only F's add memory, and most is held right after one, F of c: at least
  peak_f - m_b of c less than the limit. So the least of these is taken off as well.
- What is above that stays: F of c starts only where peak_f of c fits beside all that is
  held, and B of c where peak_b of c does: the lower of those of B and BW, as a
  schedule may run either. W's have no peaks.
"""

from dataclasses import replace

from zbpp.core.costs import ChunkMemory
from zbpp.core.placement import Placement

__all__ = ["relaxed"]


def relaxed(memory: ChunkMemory, placement: Placement) -> ChunkMemory:
    """Take what is fixed, what B adds and common peaks of F out; see the text."""
    memory = memory.above_fixed()
    inside = [peak - left for peak, left in zip(memory.peak_f, memory.m_b, strict=True)]
    off = [max(0.0, min(inside[c] for c in own)) for own in placement.chunks_of]
    off_of = [off[stage] for stage in placement.stage_of]
    peak_b = map(min, memory.peak_b, memory.peak_bw)
    peaks = zip(memory.peak_f, memory.m_b, peak_b, off_of, strict=True)
    both = [(max(b, f - less), max(0.0, peak - less)) for f, b, peak, less in peaks]
    return replace(
        memory,
        m_w=tuple(map(min, memory.m_w, memory.m_b)),
        limit=tuple(
            max(0.0, limit - less)
            for limit, less in zip(memory.limit, off, strict=True)
        ),
        peak_f=tuple(peak for peak, _ in both),
        peak_b=tuple(peak for _, peak in both),
        peak_w=(0.0,) * len(both),
        peak_bw=(0.0,) * len(both),
    )
