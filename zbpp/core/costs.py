"""The table of costs that plans are made for: times and memories of each chunk.

    row      f    b    w    m_b  m_w  peak_f ..      of layers: `LayerCosts`
    0        1.0  1.1  0.8  1.0  0.4  1.2            of chunks: `Costs`
    1        1.0  1.1  0.8  1.0  0.4  1.2            on a placement: `ChunkCosts`
    ..
    edges    comm: one entry for each edge between two rows
    stages   memory_limit, speed, splits

`Costs` has what the caller writes: one number for a whole stage, or an entry for each
chunk. `Costs.on` spreads them over the chunks of a placement, once.

**Messages.** One takes ``comm`` from the end of a pass until it can be read, a pure
delay: it occupies neither stage (arXiv 2401.10241, appendix).

**Memory.** Of one micro-batch, a chunk keeps

    m_b  from the start of F         the graph, and the input that it reads
    m_w  from the end of B           the operands of the weight gradients
    0    from the end of W (or BW)

``m_w`` may exceed ``m_b``: a checkpointed F leaves little, and its B what it has
computed again. Inside a pass there may be more for a while (temporaries): its *peak*,
counted from the stage's memory when the pass starts.

    memory m_b |    ______                  ___ peak_b
               |   |      |_____      _____|   |
           m_w |   |            |    |         |___
               |___|            |____|
                   F      B     W     m_w > m_b

``m_fixed`` is there all the time: parameters, gradients, optimizer state, buffers, and
the copy that a rollback needs. ``memory_limit`` bounds the sum of all. Without peaks
and ``m_fixed``, the model is that of the paper (Qi et al., arXiv 2401.10241, section
2.3), with any unit, such as M_B. The memory of a stage follows from its order alone,
not from the times (`zbpp.core.occupancy`).
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from zbpp.core.columns import (
    Per,
    PerRow,
    check_columns,
    column,
    columns_of,
    spread,
)
from zbpp.core.errors import RequestError, format_bytes
from zbpp.core.jobs import (
    KINDS,
    Job,
    Kind,
    Lane,
    Pair,
    Part,
    Pass,
    PassKind,
    kind_of,
    members_of,
    place_of,
)
from zbpp.core.parts import Parts, PartTimes, add_up_parts
from zbpp.core.placement import Placement

_MEBI = 2**20
_ROUNDING = 1e-14  # relative, of one sum


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
        m_b: memory that F leaves.
        m_w: memory that B leaves in its place.
        memory_limit: of a stage, in all, or a list with one entry a stage; None: none.
        m_fixed: memory that is there all the time.
        peak_f: most that F needs above the memory before it; None: m_b.
        peak_b: the same of B; None: m_w - m_b, if that is above 0.
        peak_w: the same of W; None: 0.
        peak_o: the same of an optimizer step, summed over the rows of a stage.
        m_r: memory that F leaves of a recomputed row; None: no recompute.
        parts: what the passes compute and what they exchange between
            (`zbpp.core.parts`), the same for all, or a list of them; f, b and w
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
        """Return these costs with another memory limit; None leaves it as it is."""
        return self if limit is None else replace(self, memory_limit=limit)

    def with_memory_of(self, memories: Self) -> Self:
        """Return these times with the memories and the limit of other costs."""
        names = [
            name
            for name, about in columns_of(type(self)).items()
            if about.is_memory and about.per is not Per.EDGE
        ]
        names += ["tied"] if hasattr(self, "tied") else []
        return replace(self, **{name: getattr(memories, name) for name in names})


@dataclass(frozen=True)
class Costs(Table):
    """Times and memories of chunks: those of `Table`, and these.

    A number is that of a whole stage, and split evenly over its chunks.

    Args:
        splits: for each stage, can its backward be split into B and W? None: all can.
        fb: time of an F and, interleaved, the backward of another micro-batch, without
            messages; a list is by the chunk of the F; None: as long as one after the
            other.
        speed: of all stages, or of each: divides the times of f, b, w, parts and
            optimizer; None: 1.

    Raises:
        RequestError: as `Table`, or splits contains something but booleans.
    """

    splits: tuple[bool, ...] | None = column(None, Per.STAGE, is_flag=True)
    fb: PerRow | None = column(None, Per.ROW)
    speed: PerRow | None = column(None, Per.STAGE, is_rate=True)

    def __post_init__(self) -> None:
        self._check(None)

    def on(self, placement: Placement) -> "ChunkCosts":
        """Give every chunk its share, and every stage its limit.

        Raises:
            RequestError: a list has another length than there are chunks, edges or
                stages.
        """
        stage_of = np.array(placement.stage_of)

        def of(name: str, default: float = 0.0) -> Any:
            return np.array(spread(self, name, placement, default))

        def of_stages(name: str) -> Any:
            return np.bincount(stage_of, of(name), placement.n_stages)

        limit = of("memory_limit", math.inf)
        if self.m_b == 1.0 and not self.m_fixed and _MEBI <= min(limit) < math.inf:
            raise RequestError(
                f"memory_limit is {format_bytes(min(limit))}, but m_b is 1; give m_b, "
                "m_w and m_fixed in bytes too (--costs, --layers, or example= of "
                "zbpp.plan_model), or the limit in units of m_b"
            )
        splits, speed = of("splits", True), of("speed", 1.0)
        parts = self.parts_on(placement)
        for stage, each in zip(placement.stage_of, parts, strict=False):
            if not each.w:  # what has no W has nothing to put off
                splits[stage] = False
        can = splits[stage_of]
        f, b, w = (of(name) / speed[stage_of] for name in ("f", "b", "w"))
        hops = of("comm")
        f[-1] += self.loss
        b, w = np.where(can, b, b + w), np.where(can, w, 0.0)
        reduction = self.reduction
        if reduction is None:
            # Messages up a binary tree and down again, each on the slowest link.
            n_levels = (placement.n_stages - 1).bit_length()
            reduction = 2 * n_levels * float(hops.max(initial=0.0))
        m_b, m_w, peak_w = of("m_b"), of("m_w"), of("peak_w")
        peak_b = np.maximum(of("peak_b"), m_w - m_b)
        peak_bw = np.maximum(peak_b, m_w - m_b + peak_w)  # that of B, then W
        columns = {
            "f": f,
            "b": b,
            "w": w,
            "hops": hops,
            "optimizer": of_stages("optimizer") / speed,
            "splits": splits,
            "all_gather": of("all_gather"),
            "reduce_scatter": of("reduce_scatter"),
            "fb": of("fb")[: 0 if self.fb is None else None],
            "m_b": m_b,
            "m_w": np.where(can, m_w, 0.0),
            "limit": limit,
            "fixed": of_stages("m_fixed"),
            "peak_f": np.maximum(of("peak_f"), m_b),
            "peak_b": np.where(can, peak_b, peak_bw),
            "peak_w": np.where(can, peak_w, 0.0),
            "peak_bw": peak_bw,
            "peak_o": of_stages("peak_o"),
        }
        ends = [0.0] * (placement.n_chunks - 1) + [self.loss]
        return ChunkCosts(
            placement=placement,
            reduction=reduction,
            validation=(self.validation,) * placement.n_stages,
            parts=tuple(
                each.joined(splits=split, loss=loss)
                for each, split, loss in zip(parts, can, ends, strict=False)
            ),
            **{name: tuple(entries.tolist()) for name, entries in columns.items()},
        )

    def parts_on(self, placement: Placement) -> tuple[Parts, ...]:
        """Parts of each chunk, with its number of layers; () without."""
        every = self.parts
        if every is None:
            return ()
        if isinstance(every, Parts):
            every = tuple(every.divided(n) for n in placement.n_siblings)
        if len(every) != placement.n_chunks:
            raise RequestError(
                f"parts has {len(every)} entries for {placement.n_chunks} chunks; give "
                "one for each, or one object for a whole stage"
            )
        speed = spread(self, "speed", placement, 1.0)
        pairs = zip(every, placement.stage_of, strict=True)
        return tuple(parts.at_speed(speed[stage]) for parts, stage in pairs)


@dataclass(frozen=True, kw_only=True)
class ChunkCosts:
    """`Costs` on a placement: one entry per chunk, with these exceptions.

    ``hops`` has one entry per edge, from chunk c to c+1; ``optimizer``, ``validation``,
    ``splits``, ``limit``, ``fixed`` and ``peak_o`` have one per stage. The last F
    includes the loss. On a stage that cannot split its backward, ``b`` is the time of
    both parts and ``w`` is 0: its gradient cannot leave earlier. Planners and bounds
    write its BW as B, so ``peak_b`` is that of BW, and ``m_w`` 0. Without ``fb``
    (empty) the passes of a pair run one after the other. Without ``parts`` (empty)
    every pass is in one piece.
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
        """Time of one job."""
        if isinstance(job, Pair):
            if not self.fb:
                return self.of(job.forward) + self.of(job.backward)
            return self.fb[job.forward.chunk]
        if isinstance(job, Part):
            return self.parts_of(job.of)[job.index][1]
        return self.of_kind(job.kind, place_of(job))

    def of_kind(self, kind: Kind, place: int) -> float:
        """Time of a job of a kind on a chunk, or of a stage."""
        return float(sum(getattr(self, name)[place] for name in KINDS[kind].times))

    def parts_of(self, job: Pass) -> PartTimes:
        """The lane and the time of each part of an F, B or W; there must be parts."""
        return self.parts[job.chunk].of(job.kind)

    def source_of(self, part: Part) -> int:
        """The part of B that a part of its W needs.

        Where W has as many parts as B has computing parts, the computing part with the
        same number; else the last part.
        """
        parts = self.parts[part.chunk]
        b, w = parts.of(PassKind.B), parts.of(PassKind.W)
        computing = [i for i, (lane, _) in enumerate(b) if lane is Lane.COMPUTE]
        return computing[part.index] if len(computing) == len(w) else len(b) - 1

    def delay(self, source: int, target: int) -> float:
        """Time of a message from its job's end to its reader: none on one stage.

        A pure delay: it occupies neither stage (arXiv 2401.10241, appendix).
        """
        if source == target:
            return 0.0
        return self.hops[source if source < target else target]

    def change(self, job: Job) -> float:
        """Memory that a job leaves behind it: more than before, or less (< 0)."""
        jobs = [(kind_of(part).keeps, place_of(part)) for part in members_of(job)]
        return float(
            sum(
                sign * getattr(self, name)[x]
                for keeps, x in jobs
                for name, sign in keeps
            )
        )

    def peak(self, job: Job) -> float:
        """Most that a job adds to its stage's memory while it runs; 0 or more.

        The parts of a pair may reach their peaks at the same time.
        """
        jobs = [(kind_of(part).peak, place_of(part)) for part in members_of(job)]
        return float(sum(getattr(self, name)[x] for name, x in jobs if name))

    def above_fixed(self) -> "ChunkCosts":
        """Return these costs with the fixed memory subtracted from the limits.

        The limit grows by what rounding may take from the difference.
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
