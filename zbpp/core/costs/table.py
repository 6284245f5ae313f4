"""The one table that plans are made for: times and memories, a row for each chunk.

    row      f    b    w    m_b  m_w  peak_f ..      of layers: `LayerCosts`
    0        1.0  1.1  0.8  1.0  0.4  1.2            of chunks: `Costs`
    1        1.0  1.1  0.8  1.0  0.4  1.2            on a placement: `ChunkCosts`
    ..
    edges    comm, send_occupies: one entry for each edge between two rows
    stages   memory_limit, speed, splits

`Costs` has what the caller writes: one number for a whole stage, or an entry for each
chunk. `Costs.on` spreads them over the chunks of a placement, once.

**Messages.** One takes ``comm`` from the end of a pass until it can be read. For the
first ``send_occupies`` of that its sender computes nothing: it packs, blocks, or lends
its cores to the transfer. Where that is longer than ``comm``, the message is there when
the sender is free.

    stage 0 | F0 s  F1 s            s: send_occupies
    stage 1 | .  .  F0 .  F1        F0 to F0: comm

A pass and what follows it on its stage without a gap are one job to every plan, bound
and replay: F and B of a chunk whose message leaves the stage last send_occupies longer,
and the rest of comm is a pure delay. All starts are the same as if the two were apart.

**Memory.** On one micro-batch, a chunk holds

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
the copy that a rollback needs. ``memory_limit`` bounds the sum of all. Without peaks
and ``m_fixed``, the model is that of the paper (Qi et al., arXiv 2401.10241, section
2.3), with any unit, such as M_B. What a stage holds follows from its order alone, not
from the times (`zbpp.core.held`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add, sub, truediv
from typing import Self

from zbpp.core.amounts import format_bytes
from zbpp.core.costs.chunks import ChunkCosts
from zbpp.core.costs.columns import (
    Per,
    PerRow,
    check_columns,
    column,
    columns_of,
    listed,
    per_chunk,
    per_edge,
    per_stage,
)
from zbpp.core.costs.parts import Parts, add_up_parts
from zbpp.core.errors import RequestError
from zbpp.core.jobs import Lane
from zbpp.core.placement import Placement

__all__ = ["Costs", "Table", "rises"]

_MEBI = 2**20


@dataclass(frozen=True)
class Table:
    """The columns that costs of chunks and costs of layers share.

    Args:
        f, b, w: times of the passes.
        comm: time of a message on each edge between two rows.
        optimizer: time of an optimizer step.
        loss: time of the loss, a part of the last row's F.
        reduction: time of the sum of all stages' gradient norms, from the last stage's
            start of it; None: 2 ceil(log2 p) messages on the slowest link (reduce and
            broadcast of short vectors: Thakur, Rabenseifner and Gropp, 2005).
        validation: time that a V takes when the sum is there.
        all_gather: time of an UNSHARD.
        reduce_scatter: time of a REDUCE_GRAD (an all-reduce, where every process has
            all parameters).
        send_occupies: part of ``comm`` for which the sender computes nothing.
        m_b: memory that F leaves.
        m_w: memory that B leaves in its place.
        memory_limit: of a stage, in all, or a list with one entry a stage; None: none.
        m_fixed: memory that is there all the time.
        peak_f: most that F needs above what is held before it; None: m_b.
        peak_b: the same of B; None: m_w - m_b, if that is above 0.
        peak_w: the same of W; None: 0.
        peak_o: the same of an optimizer step, summed over the rows of a stage.
        m_r: what F leaves of a row that is recomputed; None: it cannot be.
        parts: what the passes compute and what they exchange between
            (`zbpp.core.costs.parts`), the same for all, or a list of them; f, b and w
            are then their sums, and may be left out.

    Raises:
        RequestError: a number is negative, not finite, above 1e100 or below 1e-100, or
            parts do not sum up to f, b or w.
    """

    f: PerRow = column(1.0, Per.ROW)
    b: PerRow = column(1.0, Per.ROW)
    w: PerRow = column(1.0, Per.ROW)
    comm: PerRow = column(0.0, Per.EDGE)
    optimizer: PerRow = column(0.0, Per.ROW)
    loss: float = column(0.0, Per.ALL)
    reduction: float | None = column(None, Per.ALL)
    validation: float = column(0.0, Per.ALL)
    all_gather: PerRow = column(0.0, Per.ROW)
    reduce_scatter: PerRow = column(0.0, Per.ROW)
    send_occupies: PerRow = column(0.0, Per.EDGE)
    m_b: PerRow = column(1.0, Per.ROW, is_memory=True)
    m_w: PerRow = column(0.5, Per.ROW, is_memory=True)
    memory_limit: PerRow | None = column(None, Per.STAGE, is_memory=True)
    m_fixed: PerRow = column(0.0, Per.ROW, is_memory=True)
    peak_f: PerRow | None = column(None, Per.ROW, is_memory=True)
    peak_b: PerRow | None = column(None, Per.ROW, is_memory=True)
    peak_w: PerRow | None = column(None, Per.ROW, is_memory=True)
    peak_o: PerRow = column(0.0, Per.ROW, is_memory=True)
    m_r: PerRow | None = column(None, Per.ROW, is_memory=True)
    parts: Parts | tuple[Parts, ...] | None = None

    def _check(self, n_rows: int | None) -> None:
        check_columns(self, n_rows)
        if self.parts is not None:
            add_up_parts(self)

    def with_limit(self, limit: PerRow | None) -> Self:
        """Return these costs with another memory limit; None leaves theirs."""
        return self if limit is None else replace(self, memory_limit=limit)

    def with_memory_of(self, memories: Self) -> Self:
        """Return these times with the memories and the limit of other costs."""
        names = [
            name
            for name, about in columns_of(type(self)).items()
            if about.is_memory and about.per is not Per.EDGE
        ]
        return replace(self, **{name: getattr(memories, name) for name in names})


@dataclass(frozen=True)
class Costs(Table):
    """Times and memories of chunks: those of `Table`, and these.

    A number is that of a whole stage, and split evenly over its chunks.

    Args:
        splits: for each stage, can its backward be split into B and W? None: all can.
        fb: time of an F beside the backward of another micro-batch, without their
            messages; a list is by the chunk of the F; None: as long as one after the
            other.
        speed: of all stages, or of each: divides the times of f, b, w, parts and
            optimizer; None: 1.
        gathers: F and B gather the parameters themselves and take ``all_gather``
            longer, instead of an UNSHARD; nothing runs beside that.
        peak_bw: as ``peak_b``, of BW; None: that of B, then W.

    Raises:
        RequestError: as `Table`, or splits holds no booleans.
    """

    splits: tuple[bool, ...] | None = None
    fb: PerRow | None = column(None, Per.ROW)
    speed: PerRow | None = column(None, Per.STAGE, is_rate=True)
    gathers: bool = False
    peak_bw: PerRow | None = column(None, Per.ROW, is_memory=True)

    def __post_init__(self) -> None:
        splits = listed(self.splits)
        if splits is not None:
            if not isinstance(splits, list | tuple) or not all(
                isinstance(split, bool) for split in splits
            ):
                raise RequestError(
                    f"splits is {splits!r:.60}, not a list of true or false, one a "
                    "stage"
                )
            object.__setattr__(self, "splits", tuple(splits))
        if not isinstance(self.gathers, bool):
            raise RequestError(f"gathers is {self.gathers!r:.60}, not true or false")
        self._check(None)

    def on(self, placement: Placement) -> ChunkCosts:
        """Give every chunk its share, and every stage its limit.

        Raises:
            RequestError: a list has another length than there are chunks, edges or
                stages.
        """
        stage_of = placement.stage_of
        limit = per_stage(
            "memory_limit", self.memory_limit, placement, default=math.inf
        )
        if self.m_b == 1.0 and not self.m_fixed and _MEBI <= min(limit) < math.inf:
            raise RequestError(
                f"memory_limit is {format_bytes(min(limit))}, but m_b is 1; give m_b, "
                "m_w and m_fixed in bytes too (--costs, --layers, or example= of "
                "zbpp.plan_model), or the limit in units of m_b"
            )
        splits = (True,) * placement.n_stages if self.splits is None else self.splits
        if len(splits) != placement.n_stages:
            raise RequestError(
                f"splits has {len(splits)} entries for {placement.n_stages} stages"
            )
        speed = per_stage("speed", self.speed, placement, default=1.0)
        parts = tuple(each.flat() for each in self.chunk_parts(placement))
        if parts:  # what has no W has nothing to put off
            splits = tuple(
                can and all(parts[chunk].w for chunk in chunks)
                for can, chunks in zip(splits, placement.chunks_of, strict=True)
            )
        can = [splits[stage] for stage in stage_of]

        def chunks(name: str) -> tuple[float, ...]:
            return per_chunk(name, getattr(self, name), placement)

        def stages(name: str) -> tuple[float, ...]:
            column = chunks(name)
            return tuple(sum(column[c] for c in cs) for cs in placement.chunks_of)

        f, b, w = (
            tuple(time / speed[s] for time, s in zip(column, stage_of, strict=True))
            for column in map(chunks, ("f", "b", "w"))
        )
        all_gather = chunks("all_gather")
        if self.gathers:
            f, b = (tuple(map(add, times, all_gather)) for times in (f, b))
        f = (*f[:-1], f[-1] + self.loss)
        if not all(splits):
            b = tuple(map(add, b, _where([not split for split in can], w)))
            w = _where(can, w)
        hops = per_edge("comm", self.comm, placement)
        sending = per_edge("send_occupies", self.send_occupies, placement)
        hops = tuple(map(max, hops, sending))
        reduction = self.reduction
        if reduction is None:
            # Messages up a binary tree and down again, each on the slowest link.
            n_levels = (placement.n_stages - 1).bit_length()
            reduction = 2 * n_levels * max(hops, default=0.0)
        if any(sending):
            f = tuple(map(add, f, (*sending, 0.0)))
            b = tuple(map(add, b, (0.0, *sending)))
            hops = tuple(map(sub, hops, sending))
        if parts:
            last = replace(parts[-1], f=(*parts[-1].f, (Lane.COMPUTE, self.loss)))
            parts = tuple(
                each.joined(splits=split)
                for each, split in zip((*parts[:-1], last), can, strict=True)
            )
        m_b, m_w = chunks("m_b"), chunks("m_w")
        none = (0.0,) * placement.n_chunks
        peak_b = self._peaks("peak_b", rises(m_b, m_w), placement)
        peak_w = self._peaks("peak_w", none, placement)
        in_turn = none
        if self.peak_bw is None:
            in_turn = tuple(
                max(of_b, w - b + of_w)
                for b, w, of_b, of_w in zip(m_b, m_w, peak_b, peak_w, strict=True)
            )
        peak_bw = self._peaks("peak_bw", in_turn, placement)
        return ChunkCosts(
            placement=placement,
            f=f,
            b=b,
            w=w,
            hops=hops,
            optimizer=tuple(map(truediv, stages("optimizer"), speed)),
            splits=splits,
            reduction=reduction,
            validation=(self.validation,) * placement.n_stages,
            all_gather=all_gather,
            reduce_scatter=chunks("reduce_scatter"),
            sending=sending if any(sending) else (),
            fb=() if self.fb is None else chunks("fb"),
            parts=parts,
            m_b=m_b,
            m_w=_where(can, m_w),
            limit=limit,
            fixed=stages("m_fixed"),
            peak_f=self._peaks("peak_f", m_b, placement),
            peak_b=tuple(
                b if split else bw
                for b, bw, split in zip(peak_b, peak_bw, can, strict=True)
            ),
            peak_w=_where(can, peak_w),
            peak_bw=peak_bw,
            peak_o=stages("peak_o"),
        )

    def chunk_parts(self, placement: Placement) -> tuple[Parts, ...]:
        """Parts of each chunk, with its number of layers; () without."""
        every = self.parts
        if every is None:
            return ()
        for name in ("send_occupies", "gathers"):
            if getattr(self, name) not in (0.0, (0.0,) * (placement.n_chunks - 1)):
                raise RequestError(
                    f"costs with parts cannot have {name}; leave one of both out"
                )
        if isinstance(every, Parts):
            every = tuple(every.dealt(n) for n in placement.n_beside)
        if len(every) != placement.n_chunks:
            raise RequestError(
                f"parts has {len(every)} entries for {placement.n_chunks} chunks; give "
                "one for each, or one object for a whole stage"
            )
        speed = per_stage("speed", self.speed, placement, default=1.0)
        return tuple(
            parts.at_speed(speed[stage])
            for parts, stage in zip(every, placement.stage_of, strict=True)
        )

    def _peaks(
        self, name: str, least: tuple[float, ...], placement: Placement
    ) -> tuple[float, ...]:
        """Spread a column of peaks; each is at least what its pass adds."""
        value = getattr(self, name)
        if value is None:
            return least
        return tuple(map(max, per_chunk(name, value, placement), least))


def rises(m_b: Sequence[float], m_w: Sequence[float]) -> tuple[float, ...]:
    """Memory that each B leaves more than it finds."""
    return tuple(max(0.0, w - b) for b, w in zip(m_b, m_w, strict=True))


def _where(can: Sequence[bool], column: Sequence[float]) -> tuple[float, ...]:
    """A column that is 0 where something cannot be."""
    return tuple(x if split else 0.0 for x, split in zip(column, can, strict=True))
