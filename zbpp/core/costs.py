"""Times of the passes, and the memory that they hold.

A number stands for a whole stage and is dealt evenly to the chunks of the stage. A
tuple is read by its length, for p stages and C chunks:

=======  ================================================================
C        one entry per chunk
p        one per stage, each dealt evenly to the chunks of its stage
=======  ================================================================

Where C is p, entries are chunks. ``limit`` and ``splits`` are per stage, ``comm`` is
per link (see `zbpp.core.links`). Dealing suits stages that differ as machines do; where
the layers differ, as a head on the last chunk, give one entry per chunk. Times share
one unit of the caller's choice, and so do memories.
"""

import math
from dataclasses import dataclass
from typing import assert_never

from zbpp.core.errors import RequestError
from zbpp.core.jobs import Check, Job, Pass, PassKind, Step
from zbpp.core.links import edge_delays, reduction_delay
from zbpp.core.placement import Placement

__all__ = ["ChunkMemory", "Costs", "MemoryModel", "PassTimes", "PerChunk"]

PerChunk = float | tuple[float, ...]
"""A whole stage's value, or one value per stage or per chunk."""

_MOST, _MOST_LIMIT = 1e100, 1e150  # products and sums of these are finite


@dataclass(frozen=True)
class Costs:
    """Times of the passes, of a message between two stages, and of the optimizer.

    ``loss`` is the time of the loss, a part of the last chunk's F. ``splits`` says of
    each stage whether its backward can be split into B and W; default: all can.
    ``reduction`` is the time of the sum of all stages' gradient norms, from the last
    stage's start of it; None: as many messages as `reduction_delay` says.
    ``validation`` is the time that a V takes when the sum is there.

    Raises:
        RequestError: a time is negative, not finite or above 1e100, or splits
            holds no booleans.
    """

    f: PerChunk = 1.0
    b: PerChunk = 1.0
    w: PerChunk = 1.0
    comm: float | tuple[float, ...] = 0.0
    optimizer: PerChunk = 0.0
    loss: float = 0.0
    splits: tuple[bool, ...] | None = None
    reduction: float | None = None
    validation: float = 0.0

    def __post_init__(self) -> None:
        for name in ("f", "b", "w", "comm", "optimizer", "loss", "validation"):
            _check_numbers(name, getattr(self, name))
        if self.reduction is not None:
            _check_numbers("reduction", self.reduction)
        for stage, split in enumerate(self.splits or ()):
            if not isinstance(split, bool):
                raise RequestError(
                    f"splits[{stage}] is {split!r}; write true or false for each stage"
                )

    def on(self, placement: Placement) -> "PassTimes":
        """Give every chunk its share.

        Raises:
            RequestError: a list has another length than the module's text says.
        """
        f, b, w, optimizer = (
            _per_chunk(name, getattr(self, name), placement)
            for name in ("f", "b", "w", "optimizer")
        )
        splits = (True,) * placement.n_stages if self.splits is None else self.splits
        if len(splits) != placement.n_stages:
            raise RequestError(
                f"splits has {len(splits)} entries for {placement.n_stages} stages"
            )
        can = [splits[stage] for stage in placement.stage_of]
        parts = list(zip(b, w, can, strict=True))
        hops = edge_delays(self.comm, placement)
        reduction = self.reduction
        if reduction is None:
            reduction = reduction_delay(hops, placement.n_stages)
        return PassTimes(
            placement=placement,
            f=(*f[:-1], f[-1] + self.loss),
            b=tuple(one if split else one + two for one, two, split in parts),
            w=tuple(two if split else 0.0 for _, two, split in parts),
            hops=hops,
            optimizer=tuple(
                sum(optimizer[chunk] for chunk in chunks)
                for chunks in placement.chunks_of
            ),
            splits=splits,
            reduction=reduction,
            validation=self.validation,
        )


@dataclass(frozen=True)
class PassTimes:
    """`Costs` on a placement: one entry per chunk.

    ``hops`` has one entry per edge, from chunk c to c+1; ``optimizer`` and ``splits``
    have one per stage. The last F includes the loss. On a stage that cannot split its
    backward, ``b`` is the time of both parts and ``w`` is 0: its gradient cannot leave
    earlier.
    """

    placement: Placement
    f: tuple[float, ...]
    b: tuple[float, ...]
    w: tuple[float, ...]
    hops: tuple[float, ...]
    optimizer: tuple[float, ...]
    splits: tuple[bool, ...]
    reduction: float = 0.0
    validation: float = 0.0

    def of(self, job: Job) -> float:
        """Time of one job."""
        match job:
            case Step(stage):
                return self.optimizer[stage]
            case Check():
                return self.validation
            case Pass(kind, chunk):
                return self.of_pass(kind, chunk)

    def of_pass(self, kind: PassKind, chunk: int) -> float:
        """Time of one pass of a chunk; the only place that says what BW costs."""
        match kind:
            case PassKind.F:
                return self.f[chunk]
            case PassKind.B:
                return self.b[chunk]
            case PassKind.W:
                return self.w[chunk]
            case PassKind.BW:
                return self.b[chunk] + self.w[chunk]
            case _:
                assert_never(kind)

    def delay(self, source: int, target: int) -> float:
        """Time of a message between two consecutive chunks: none on one stage.

        A pure delay: it occupies neither stage (arXiv 2401.10241, appendix).
        """
        if source == target:
            return 0.0
        return self.hops[source if source < target else target]


@dataclass(frozen=True)
class MemoryModel:
    """Memory that F takes (``m_b``), and that W gives back (``m_w``; B: the rest).

    Raises:
        RequestError: a number is negative, not finite or above 1e100.
    """

    m_b: PerChunk = 1.0
    m_w: PerChunk = 0.5
    limit: PerChunk | None = None

    def __post_init__(self) -> None:
        _check_numbers("m_b", self.m_b)
        _check_numbers("m_w", self.m_w)
        if self.limit is not None:
            _check_numbers("memory_limit", self.limit, most=_MOST_LIMIT)

    def on(
        self, placement: Placement, splits: tuple[bool, ...] | None = None
    ) -> "ChunkMemory":
        """Give every chunk its share and every stage its limit.

        Args:
            placement: chunk to stage.
            splits: `PassTimes.splits`, for planners and bounds: where a backward is
                one pass, nothing is kept for W, and m_w is 0.

        Raises:
            RequestError: a list has a wrong length, or m_w exceeds m_b.
        """
        m_b = _per_chunk("m_b", self.m_b, placement)
        m_w = _per_chunk("m_w", self.m_w, placement)
        for chunk, (held, kept) in enumerate(zip(m_b, m_w, strict=True)):
            if kept > held:
                raise RequestError(
                    f"chunk {chunk}: m_w {kept:g} exceeds m_b {held:g}; W can only "
                    "keep a part of what F saved"
                )
        if splits is not None:
            kept_of = zip(m_w, placement.stage_of, strict=True)
            m_w = tuple(kept if splits[stage] else 0.0 for kept, stage in kept_of)
        limit = self.limit
        if limit is None:
            limits = (math.inf,) * placement.n_stages
        elif isinstance(limit, tuple):
            limits = limit
            if len(limits) != placement.n_stages:
                raise RequestError(
                    f"memory_limit has {len(limits)} entries for "
                    f"{placement.n_stages} stages"
                )
        else:
            limits = (limit,) * placement.n_stages
        return ChunkMemory(m_b, m_w, limits)


@dataclass(frozen=True)
class ChunkMemory:
    """`MemoryModel` on a placement: per chunk, and the limit per stage."""

    m_b: tuple[float, ...]
    m_w: tuple[float, ...]
    limit: tuple[float, ...]

    def change(self, kind: PassKind, chunk: int) -> float:
        """Memory that a pass takes (at its start) or gives back (at its end: < 0)."""
        match kind:
            case PassKind.F:
                return self.m_b[chunk]
            case PassKind.B:
                return self.m_w[chunk] - self.m_b[chunk]
            case PassKind.W:
                return -self.m_w[chunk]
            case PassKind.BW:
                return -self.m_b[chunk]
            case _:
                assert_never(kind)


def _check_numbers(name: str, value: PerChunk, *, most: float = _MOST) -> None:
    for number in value if isinstance(value, tuple) else (value,):
        if not math.isfinite(number) or number < 0:
            raise RequestError(
                f"{name} is {number!r}; it must be finite and at least 0"
            )
        if number > most:
            raise RequestError(
                f"{name} is {number!r}; take another unit: it must be at most {most:g}"
            )


def _per_chunk(name: str, value: PerChunk, placement: Placement) -> tuple[float, ...]:
    shares = [len(placement.chunks_of[stage]) for stage in placement.stage_of]
    if not isinstance(value, tuple):
        return tuple(value / share for share in shares)
    if len(value) == placement.n_chunks:
        return value
    if len(value) == placement.n_stages:
        by_stage = [value[stage] for stage in placement.stage_of]
        return tuple(one / share for one, share in zip(by_stage, shares, strict=True))
    raise RequestError(
        f"{name} has {len(value)} entries for {placement.n_chunks} chunks; give one "
        f"number, or one per stage ({placement.n_stages}) or chunk"
    )
