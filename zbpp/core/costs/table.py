"""The one table that plans are made for: times and memories, a row for each chunk.

    chunk    f    b    w    m_b  m_w  peak_f ..      on a placement: `ChunkCosts`
    0        1.0  1.1  0.8  1.0  0.4  1.2
    1        1.0  1.1  0.8  1.0  0.4  1.2
    ..
    links    comm, send_occupies: one entry for each edge between two chunks
    stages   memory_limit, splits

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
from the times (`zbpp.core.costs.held`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import add, sub, truediv

from zbpp.core.costs.columns import (
    Per,
    PerChunk,
    check_columns,
    column,
    columns_of,
    listed,
    per_chunk,
    per_edge,
    per_stage,
    reduction_delay,
)
from zbpp.core.costs.parts import Parts, PartTimes, add_up_parts, chunk_parts
from zbpp.core.errors import RequestError
from zbpp.core.jobs import (
    KINDS,
    Job,
    JobKind,
    Lane,
    Pair,
    Part,
    Pass,
    PassKind,
    kind_of,
    members_of,
    place_of,
)
from zbpp.core.placement import Placement
from zbpp.core.timeline import sending_time

__all__ = ["ChunkCosts", "Costs", "MemoryModel"]

_MARGIN = 1e-9  # relative, for sums that were rounded
_ROUNDING = 1e-14  # relative, of one sum


@dataclass(frozen=True)
class Times:
    """Times of the passes, of a message between two stages, and of the optimizer.

    ``send_occupies`` is the part of ``comm`` for which the sender computes nothing.
    ``loss`` is the time of the loss, a part of the last chunk's F. ``splits`` says of
    each stage whether its backward can be split into B and W; default: all can.
    ``reduction`` is the time of the sum of all stages' gradient norms, from the last
    stage's start of it; None: as many messages as `reduction_delay` says.
    ``validation`` is the time that a V takes when the sum is there. ``all_gather`` is
    the time of an UNSHARD, ``reduce_scatter`` that of a REDUCE_GRAD (an all-reduce,
    where every process has all parameters). ``gathers``: F and B gather the parameters
    themselves and take ``all_gather`` longer, instead of an UNSHARD; nothing runs
    beside that. ``fb`` is the time of an F beside the backward of another micro-batch,
    without their messages; a list is by the chunk of the F; None: as long as one after
    the other. The times of ``f``, ``b``, ``w``, ``parts`` and ``optimizer`` are
    divided by the ``speed`` of the stage; None: 1. ``parts`` tells what F, B and W
    compute and what they exchange between (`zbpp.core.costs.parts`), of a stage, or in
    a list per chunk; their sums are ``f``, ``b`` and ``w``, which may then be left out.

    Raises:
        RequestError: a time is negative, not finite or above 1e100, splits holds no
            booleans, or parts do not sum up to f, b or w.
    """

    f: PerChunk = column(1.0, Per.CHUNK)
    b: PerChunk = column(1.0, Per.CHUNK)
    w: PerChunk = column(1.0, Per.CHUNK)
    comm: PerChunk = column(0.0, Per.EDGE)
    optimizer: PerChunk = column(0.0, Per.CHUNK)
    loss: float = column(0.0, Per.ALL)
    reduction: float | None = column(None, Per.ALL)
    validation: float = column(0.0, Per.ALL)
    splits: tuple[bool, ...] | None = None
    all_gather: PerChunk = column(0.0, Per.CHUNK)
    reduce_scatter: PerChunk = column(0.0, Per.CHUNK)
    send_occupies: PerChunk = column(0.0, Per.EDGE)
    fb: PerChunk | None = column(None, Per.CHUNK)
    speed: PerChunk | None = column(None, Per.STAGE, is_rate=True)
    gathers: bool = False
    parts: Parts | tuple[Parts, ...] | None = None

    def __post_init__(self) -> None:
        if self.splits is not None:
            object.__setattr__(self, "splits", _as_splits(self.splits))
        check_columns(self)
        if self.parts is not None:
            add_up_parts(self)
            check_columns(self)


def _as_splits(splits: object) -> tuple[bool, ...]:
    splits = listed(splits)
    if not isinstance(splits, list | tuple) or not all(
        isinstance(split, bool) for split in splits
    ):
        raise RequestError(
            f"splits is {splits!r:.60}, not a list of true or false, one a stage"
        )
    return tuple(splits)


@dataclass(frozen=True)
class MemoryModel:
    """Memory of the passes; see the module's text.

    Args:
        m_b: what F leaves.
        m_w: what B leaves in its place.
        memory_limit: of a stage, in all; None: none.
        m_fixed: what is there all the time.
        peak_f: most that F needs above what is held before it; None: m_b.
        peak_b: the same of B; None: m_w - m_b, if that is above 0.
        peak_w: the same of W; None: 0.
        peak_bw: the same of BW; None: that of B, then W.
        peak_o: the same of an optimizer step, summed over the chunks of a stage.
        m_r: what F leaves of a chunk that is recomputed (`recomputed`); None: it
            cannot be.

    Raises:
        RequestError: a number is negative, not finite or above 1e100.
    """

    m_b: PerChunk = column(1.0, Per.CHUNK, is_memory=True)
    m_w: PerChunk = column(0.5, Per.CHUNK, is_memory=True)
    memory_limit: PerChunk | None = column(None, Per.STAGE, is_memory=True)
    m_fixed: PerChunk = column(0.0, Per.CHUNK, is_memory=True)
    peak_f: PerChunk | None = column(None, Per.CHUNK, is_memory=True)
    peak_b: PerChunk | None = column(None, Per.CHUNK, is_memory=True)
    peak_w: PerChunk | None = column(None, Per.CHUNK, is_memory=True)
    peak_bw: PerChunk | None = column(None, Per.CHUNK, is_memory=True)
    peak_o: PerChunk = column(0.0, Per.CHUNK, is_memory=True)
    m_r: PerChunk | None = column(None, Per.CHUNK, is_memory=True)

    def __post_init__(self) -> None:
        check_columns(self)


@dataclass(frozen=True)
class Costs(MemoryModel, Times):
    """Times and memories of chunks: the columns of `Times` and of `MemoryModel`.

    Raises:
        RequestError: a number is negative, not finite or above 1e100, or splits holds
            no booleans.
    """

    def __post_init__(self) -> None:
        Times.__post_init__(self)

    def on(self, placement: Placement) -> "ChunkCosts":
        """Give every chunk its share, and every stage its limit.

        Raises:
            RequestError: a list has another length than `zbpp.core.costs.columns` says,
                or a peak is below what its pass leaves.
        """
        splits = (True,) * placement.n_stages if self.splits is None else self.splits
        if len(splits) != placement.n_stages:
            raise RequestError(
                f"splits has {len(splits)} entries for {placement.n_stages} stages"
            )
        speed = per_stage("speed", self.speed, placement, default=1.0)
        parts = self._chunk_parts(placement, speed)
        if parts:  # what has no W has nothing to put off
            splits = tuple(
                can and all(parts[chunk].w for chunk in chunks)
                for can, chunks in zip(splits, placement.chunks_of, strict=True)
            )

        stage_of = placement.stage_of

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
            can = [splits[stage] for stage in placement.stage_of]
            b = tuple(map(add, b, _where([not split for split in can], w)))
            w = _where(can, w)
        hops = per_edge("comm", self.comm, placement)
        sending = per_edge("send_occupies", self.send_occupies, placement)
        hops = tuple(map(max, hops, sending))
        reduction = self.reduction
        if reduction is None:
            reduction = reduction_delay(hops, placement.n_stages)
        if any(sending):
            f = tuple(map(add, f, (*sending, 0.0)))
            b = tuple(map(add, b, (0.0, *sending)))
            hops = tuple(map(sub, hops, sending))
        if parts:
            last = replace(parts[-1], f=(*parts[-1].f, (Lane.COMPUTE, self.loss)))
            parts = tuple(
                each.joined(splits=splits[stage])
                for each, stage in zip((*parts[:-1], last), stage_of, strict=True)
            )
        m_b, m_w = chunks("m_b"), chunks("m_w")
        none = (0.0,) * placement.n_chunks
        peak_b = self._peaks(
            "peak_b",
            tuple(max(0.0, w - b) for b, w in zip(m_b, m_w, strict=True)),
            placement,
        )
        peak_w = self._peaks("peak_w", none, placement)
        in_turn = none
        if self.peak_bw is None:
            in_turn = tuple(
                max(of_b, w - b + of_w)
                for b, w, of_b, of_w in zip(m_b, m_w, peak_b, peak_w, strict=True)
            )
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
            m_w=m_w,
            limit=per_stage(
                "memory_limit", self.memory_limit, placement, default=math.inf
            ),
            fixed=stages("m_fixed"),
            peak_f=self._peaks("peak_f", m_b, placement),
            peak_b=peak_b,
            peak_w=peak_w,
            peak_bw=self._peaks("peak_bw", in_turn, placement),
            peak_o=stages("peak_o"),
        )

    def _chunk_parts(
        self, placement: Placement, speed: Sequence[float]
    ) -> tuple[Parts, ...]:
        """Parts of each chunk; () without."""
        if self.parts is None:
            return ()
        for name in ("send_occupies", "gathers"):
            if getattr(self, name) not in (0.0, (0.0,) * (placement.n_chunks - 1)):
                raise RequestError(
                    f"costs with parts cannot have {name}; leave one of both out"
                )
        parts = zip(chunk_parts(self.parts, placement), placement.stage_of, strict=True)
        return tuple(each.flat(speed=speed[stage]) for each, stage in parts)

    def _peaks(
        self, name: str, least: tuple[float, ...], placement: Placement
    ) -> tuple[float, ...]:
        """Spread a column of peaks; each is at least what its pass adds."""
        value = getattr(self, name)
        if value is None:
            return least
        peaks = per_chunk(name, value, placement)
        for chunk, (peak, left) in enumerate(zip(peaks, least, strict=True)):
            if peak < left * (1 - _MARGIN):
                raise RequestError(
                    f"chunk {chunk}: {name} {peak:g} is below what the pass adds, "
                    f"{left:g}; give the most that is held inside it, or leave it out"
                )
        return tuple(map(max, peaks, least))

    def with_memory(self, memory: MemoryModel) -> "Costs":
        """Return these times with other memories."""
        return replace(self, **{x: getattr(memory, x) for x in columns_of(MemoryModel)})


@dataclass(frozen=True, kw_only=True)
class ChunkCosts:
    """`Costs` on a placement: one entry per chunk, or as said here.

    ``hops`` has one entry per edge, from chunk c to c+1; ``optimizer``, ``validation``,
    ``splits``, ``limit``, ``fixed`` and ``peak_o`` have one per stage. The last F
    includes the loss. ``f`` and ``b`` end with the time for which a message occupies
    its sender, per edge in ``sending`` (empty: none does); ``hops`` is what is left of
    its time (see the module's text). On a stage that cannot split its backward,
    ``b`` is the time of both parts and ``w`` is 0: its gradient cannot leave earlier.
    Without ``fb`` (empty) the passes of a pair run one after the other. Without
    ``parts`` (empty) every pass is in one piece.
    """

    placement: Placement
    f: tuple[float, ...]
    b: tuple[float, ...]
    w: tuple[float, ...]
    hops: tuple[float, ...]
    optimizer: tuple[float, ...]
    splits: tuple[bool, ...]
    reduction: float
    validation: tuple[float, ...]
    all_gather: tuple[float, ...]
    reduce_scatter: tuple[float, ...]
    sending: tuple[float, ...]
    fb: tuple[float, ...]
    parts: tuple[Parts, ...]
    m_b: tuple[float, ...]
    m_w: tuple[float, ...]
    limit: tuple[float, ...]
    fixed: tuple[float, ...]
    peak_f: tuple[float, ...]
    peak_b: tuple[float, ...]
    peak_w: tuple[float, ...]
    peak_bw: tuple[float, ...]
    peak_o: tuple[float, ...]

    def of(self, job: Job) -> float:
        """Time of one job.

        Raises:
            RequestError: it is a part of a pass that has no such part here.
        """
        if isinstance(job, Pair):
            if not self.fb:
                return self.of(job.forward) + self.of(job.backward)
            return self.fb[job.forward.chunk] + sending_time(job, self.sending)
        if isinstance(job, Part):
            times = self._parts.get((job.kind, job.chunk), ())
            if job.index < len(times) and times[job.index][0] is job.lane:
                return times[job.index][1]
            raise RequestError(
                f"the schedule runs {job}, but the costs of {job.of} have "
                f"{[str(lane) for lane, _ in times] or 'no parts'}; plan again with "
                "these costs"
            )
        return self._sum(kind_of(job), place_of(job))

    def of_pass(self, kind: PassKind, chunk: int) -> float:
        """Time of one pass of a chunk."""
        return self._sum(KINDS[kind], chunk)

    @cached_property
    def _parts(self) -> dict[tuple[PassKind, int], PartTimes]:
        return {
            (kind, chunk): parts.of(kind)
            for chunk, parts in enumerate(self.parts)
            for kind in (PassKind.F, PassKind.B, PassKind.W)
        }

    def parts_of(self, job: Pass) -> PartTimes:
        """The lane and the time of each part of an F, B or W; there must be parts."""
        return self._parts[job.kind, job.chunk]

    def holder_of(self, job: Job) -> Job:
        """The job that counts in the memory for one in parts: BW for a B without W."""
        if isinstance(job, Part):
            job = job.of
        if not isinstance(job, Pass) or job.kind is not PassKind.B:
            return job
        if self._parts[PassKind.W, job.chunk]:
            return job
        return Pass(PassKind.BW, job.chunk, job.microbatch)

    def source_of(self, part: Part) -> int:
        """The part of B that a part of its W needs.

        Where W has as many parts as B has that compute, the one at its place among
        those; else the last one.
        """
        b = self._parts[PassKind.B, part.chunk]
        computing = [i for i, (lane, _) in enumerate(b) if lane is Lane.COMPUTE]
        if len(computing) == len(self._parts[PassKind.W, part.chunk]):
            return computing[part.index]
        return len(b) - 1

    def _sum(self, kind: JobKind, place: int) -> float:
        columns: list[tuple[float, ...]] = [getattr(self, name) for name in kind.times]
        return sum(column[place] for column in columns)

    def delay(self, source: int, target: int) -> float:
        """Time of a message from its job's end to its reader: none on one stage.

        A pure delay: it occupies neither stage (arXiv 2401.10241, appendix).
        """
        if source == target:
            return 0.0
        return self.hops[source if source < target else target]

    def change(self, job: Job) -> float:
        """Memory that a job leaves behind it: more than before, or less (< 0)."""
        change = 0.0
        for part in members_of(job):
            for name, sign in kind_of(part).keeps:
                column: tuple[float, ...] = getattr(self, name)
                change += sign * column[place_of(part)]
        return change

    def peak(self, job: Job) -> float:
        """Most that a job holds above what its stage holds before it; 0 or more.

        The parts of a pair may hold their most at the same time.
        """
        peak = 0.0
        for part in members_of(job):
            name = kind_of(part).peak
            if name is not None:
                column: tuple[float, ...] = getattr(self, name)
                peak += column[place_of(part)]
        return peak

    def joined(self) -> "ChunkCosts":
        """Return costs for planners and bounds, which write a whole BW as B.

        There nothing is kept for W, and B has the peak of BW.
        """
        if all(self.splits):
            return self
        can = [self.splits[stage] for stage in self.placement.stage_of]
        peaks_b = zip(self.peak_b, self.peak_bw, can, strict=True)
        return replace(
            self,
            m_w=_where(can, self.m_w),
            peak_b=tuple(b if split else bw for b, bw, split in peaks_b),
            peak_w=_where(can, self.peak_w),
        )

    def above_fixed(self) -> "ChunkCosts":
        """Return these costs with what is always there taken off the limits.

        What rounding may have taken from their difference is given back.
        """
        if not any(self.fixed):
            return self
        limit = tuple(
            max(0.0, limit - fixed) + _ROUNDING * fixed
            for limit, fixed in zip(self.limit, self.fixed, strict=True)
        )
        return replace(self, limit=limit, fixed=(0.0,) * len(limit))

    def without_pairs(self) -> "ChunkCosts":
        """Return costs for lower bounds: no pair is shorter than its passes in turn.

        On each stage all passes are shortened by as much as the pair that saves most.
        Any schedule's starts are then possible with its passes one after the other.
        """
        if not self.fb:
            return self
        f, b, w = list(self.f), list(self.b), list(self.w)
        for chunks in self.placement.chunks_of:
            pairs = [
                Pair(Pass(PassKind.F, c, 0), Pass(PassKind.BW, d, 1))
                for c in chunks
                for d in chunks
            ]
            in_turn = [self.of(x.forward) + self.of(x.backward) for x in pairs]
            shares = [self.of(x) / t for x, t in zip(pairs, in_turn, strict=True) if t]
            share = min([1.0, *shares])
            for times in (f, b, w):
                for c in chunks:
                    times[c] *= share
        return replace(self, f=tuple(f), b=tuple(b), w=tuple(w), fb=())


def _where(can: Sequence[bool], column: Sequence[float]) -> tuple[float, ...]:
    """A column that is 0 where something cannot be."""
    return tuple(x if split else 0.0 for x, split in zip(column, can, strict=True))
