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

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zbpp.core.costs.columns import (
    Per,
    PerChunk,
    check_columns,
    check_memory_unit,
    column,
    per_chunk,
    per_stage,
)
from zbpp.core.errors import RequestError
from zbpp.core.jobs import Job, kind_of, parts_of, place_of
from zbpp.core.placement import Placement

__all__ = ["ChunkMemory", "MemoryModel"]

_MARGIN = 1e-9  # relative, for sums that were rounded
_ROUNDING = 1e-14  # relative, of one sum


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

    def on(
        self, placement: Placement, splits: tuple[bool, ...] | None = None
    ) -> "ChunkMemory":
        """Give every chunk its share and every stage its limit.

        Args:
            placement: chunk to stage.
            splits: see `ChunkMemory.joined`; None: every stage splits its backward.

        Raises:
            RequestError: a list has a wrong length, or a peak is below what its pass
                leaves.
        """
        m_b = per_chunk("m_b", self.m_b, placement)
        m_w = per_chunk("m_w", self.m_w, placement)
        rises = tuple(max(0.0, w - b) for b, w in zip(m_b, m_w, strict=True))
        none = (0.0,) * placement.n_chunks
        peak_f = self._peaks("peak_f", m_b, placement)
        peak_b = self._peaks("peak_b", rises, placement)
        peak_w = self._peaks("peak_w", none, placement)
        in_turn = tuple(
            max(of_b, w - b + of_w)
            for b, w, of_b, of_w in zip(m_b, m_w, peak_b, peak_w, strict=True)
        )
        given = self.peak_bw is not None
        fixed = per_chunk("m_fixed", self.m_fixed, placement)
        peak_o = per_chunk("peak_o", self.peak_o, placement)
        memory = ChunkMemory(
            m_b=m_b,
            m_w=m_w,
            limit=per_stage(self.limit, placement),
            fixed=tuple(sum(fixed[c] for c in own) for own in placement.chunks_of),
            peak_f=peak_f,
            peak_b=peak_b,
            peak_w=peak_w,
            peak_bw=self._peaks("peak_bw", none if given else in_turn, placement),
            peak_o=tuple(sum(peak_o[c] for c in own) for own in placement.chunks_of),
        )
        return memory if splits is None else memory.joined(placement, splits)

    def without_limit(self) -> "MemoryModel":
        """Return the same memory with no limit."""
        return replace(self, limit=None)

    def _peaks(
        self, name: str, least: tuple[float, ...], placement: Placement
    ) -> tuple[float, ...]:
        value = getattr(self, name)
        if value is None:
            return least
        given = per_chunk(name, value, placement)
        for chunk, (peak, left) in enumerate(zip(given, least, strict=True)):
            if peak < left * (1 - _MARGIN):
                raise RequestError(
                    f"chunk {chunk}: {name} {peak:g} is below what the pass adds, "
                    f"{left:g}; give the most that is held inside it, or leave it out"
                )
        return tuple(max(pair) for pair in zip(given, least, strict=True))


@dataclass(frozen=True)
class ChunkMemory:
    """`MemoryModel` on a placement: per chunk; per stage limit, fixed and peak_o."""

    m_b: tuple[float, ...]
    m_w: tuple[float, ...]
    limit: tuple[float, ...]
    fixed: tuple[float, ...]
    peak_f: tuple[float, ...]
    peak_b: tuple[float, ...]
    peak_w: tuple[float, ...]
    peak_bw: tuple[float, ...]
    peak_o: tuple[float, ...]

    def above_fixed(self) -> "ChunkMemory":
        """The same with what is always there taken off the limits.

        What rounding may have taken from their difference is given back.
        """
        if not any(self.fixed):
            return self
        limit = tuple(
            max(0.0, limit - fixed) + _ROUNDING * fixed
            for limit, fixed in zip(self.limit, self.fixed, strict=True)
        )
        return replace(self, limit=limit, fixed=(0.0,) * len(limit))

    def joined(self, placement: Placement, splits: Sequence[bool]) -> "ChunkMemory":
        """The same for planners and bounds, which write BW as B where it is one pass.

        There nothing is kept for W, and B has the peak of BW.

        Args:
            placement: chunk to stage.
            splits: of each stage whether its backward can be split.
        """
        can = [splits[stage] for stage in placement.stage_of]
        peaks_b = zip(self.peak_b, self.peak_bw, can, strict=True)
        return replace(
            self,
            m_w=_where(can, self.m_w),
            peak_b=tuple(b if split else bw for b, bw, split in peaks_b),
            peak_w=_where(can, self.peak_w),
        )

    def change(self, job: Job) -> float:
        """Memory that a job leaves behind it: more than before, or less (< 0)."""
        change = 0.0
        for part in parts_of(job):
            for name, sign in kind_of(part).keeps:
                column: tuple[float, ...] = getattr(self, name)
                change += sign * column[place_of(part)]
        return change

    def peak(self, job: Job) -> float:
        """Most that a job holds above what its stage holds before it; 0 or more.

        The parts of a pair may hold their most at the same time.
        """
        peak = 0.0
        for part in parts_of(job):
            name = kind_of(part).peak
            if name is not None:
                column: tuple[float, ...] = getattr(self, name)
                peak += column[place_of(part)]
        return peak


def _where(can: Sequence[bool], column: Sequence[float]) -> tuple[float, ...]:
    return tuple(x if split else 0.0 for x, split in zip(column, can, strict=True))
