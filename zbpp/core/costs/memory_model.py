"""Memory that passes take and give back, and what a stage holds all the time.

On one micro-batch, a chunk holds

    m_b  from the start of F         the graph, and the input that it reads
    m_w  from the end of B           the operands of the weight gradients
    0    from the end of W (or BW)

``m_w`` may exceed ``m_b``: a checkpointed F leaves little, and its B what it has
computed again. Inside a pass there may be more for a while (temporaries): its *peak*,
counted from what the stage holds when the pass starts.

    held   m_b |    ______                  ___ peak_b
               |   |      |_____      _____|   |
           m_w |   |            |    |         |___
               |___|            |____|
                   F      B     W     m_w > m_b

``m_fixed`` is there all the time: parameters, gradients, optimizer state, buffers, and
the copy that a rollback needs. ``limit`` bounds the sum of all. Without peaks and
``m_fixed``, the model is that of the paper (Qi et al., arXiv 2401.10241, section 2.3),
with any unit, such as M_B.
"""

from dataclasses import dataclass

from zbpp.core.costs.columns import (
    Per,
    PerChunk,
    check_columns,
    check_memory_unit,
    column,
)

__all__ = ["MemoryModel"]


@dataclass(frozen=True)
class MemoryModel:
    """Memory of the passes; see the module's text.

    Args:
        m_b: what F leaves.
        m_w: what B leaves in its place.
        limit: of a stage, in all; None: none.
        m_fixed: what is there all the time.
        peak_f: most that F needs above what is held before it; None: m_b.
        peak_b: the same of B; None: m_w - m_b, if that is above 0.
        peak_w: the same of W; None: 0.
        peak_bw: the same of BW; None: that of B, then W.
        peak_o: the same of an optimizer step, summed over the chunks of a stage.
        memory_unit: "bytes", or None: any one unit, such as M_B.
        m_r: what F leaves of a chunk that is recomputed (`recomputed`); None: it
            cannot be.

    Raises:
        RequestError: a number is negative, not finite or above 1e100.
    """

    m_b: PerChunk = column(1.0, Per.CHUNK, is_memory=True)
    m_w: PerChunk = column(0.5, Per.CHUNK, is_memory=True)
    limit: PerChunk | None = column(None, Per.STAGE, is_memory=True)
    m_fixed: PerChunk = column(0.0, Per.CHUNK, is_memory=True)
    peak_f: PerChunk | None = column(None, Per.CHUNK, is_memory=True)
    peak_b: PerChunk | None = column(None, Per.CHUNK, is_memory=True)
    peak_w: PerChunk | None = column(None, Per.CHUNK, is_memory=True)
    peak_bw: PerChunk | None = column(None, Per.CHUNK, is_memory=True)
    peak_o: PerChunk = column(0.0, Per.CHUNK, is_memory=True)
    m_r: PerChunk | None = column(None, Per.CHUNK, is_memory=True)
    memory_unit: str | None = None

    def __post_init__(self) -> None:
        check_memory_unit(self.memory_unit)
        check_columns(self)
