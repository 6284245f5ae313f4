"""Memory as the proofs of the bounds see it: nothing fixed, and few peaks.

Every schedule that keeps the true model keeps this one too, so that a bound under this
one holds under the true one:

- What is fixed is taken off the limit; that is ``net``.
- Right after an F of c, at least peak_f - m_b of c less than ``net`` is held. So the
  least of these is taken off the limit as well. It holds right after each F; and the
  sum of all m_b that are held keeps it at all times, as only F's add to it.
- Right after a B more may be held, where m_w is above m_b: up to ``net``.
- F of c starts only where peak_f of c fits beside all that is held, and B of c where
  peak_b of c does: the lower of those of B and BW, as a schedule may run either.
"""

from dataclasses import replace

from zbpp.core.costs import ChunkMemory
from zbpp.core.placement import Placement

__all__ = ["relaxed"]


def relaxed(memory: ChunkMemory, placement: Placement) -> ChunkMemory:
    """Take what is fixed and common peaks of F off the limit; see the text."""
    memory = memory.above_fixed()
    inside = [peak - left for peak, left in zip(memory.peak_f, memory.m_b, strict=True)]
    off = [max(0.0, min(inside[c] for c in own)) for own in placement.chunks_of]
    off_of = [off[stage] for stage in placement.stage_of]
    peak_b = map(min, memory.peak_b, memory.peak_bw)
    peaks = zip(memory.peak_f, memory.m_b, peak_b, off_of, strict=True)
    both = [(max(b, f - less), max(0.0, peak - less)) for f, b, peak, less in peaks]
    return replace(
        memory,
        limit=tuple(
            max(0.0, limit - less)
            for limit, less in zip(memory.limit, off, strict=True)
        ),
        peak_f=tuple(peak for peak, _ in both),
        peak_b=tuple(peak for _, peak in both),
    )
