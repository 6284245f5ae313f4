"""How long each pass takes and how much memory it holds.

A number stands for a whole stage and is split evenly over the chunks of the stage;
a tuple has one entry per chunk (``limit``: per stage). Times share one unit of the
caller's choice, and so do memories.
"""

import math
from dataclasses import dataclass
from typing import assert_never

from zbpp.core.errors import RequestError
from zbpp.core.jobs import Check, Job, Pass, PassKind, Step
from zbpp.core.placement import Placement

__all__ = ["ChunkMemory", "Costs", "MemoryModel", "PassTimes", "PerChunk"]

PerChunk = float | tuple[float, ...]
"""A whole stage's value, or one value per chunk."""


@dataclass(frozen=True)
class Costs:
    """Times of the passes, of a message between two stages, and of the optimizer.

    Raises:
        RequestError: a time is negative or not finite.
    """

    f: PerChunk = 1.0
    b: PerChunk = 1.0
    w: PerChunk = 1.0
    comm: float = 0.0
    optimizer: PerChunk = 0.0

    def __post_init__(self) -> None:
        for name in ("f", "b", "w", "comm", "optimizer"):
            _check_numbers(name, getattr(self, name), at_least=0.0)

    def on(self, placement: Placement) -> "PassTimes":
        """Give every chunk its share.

        Raises:
            RequestError: a list has not one entry per chunk.
        """
        optimizer = _per_chunk("optimizer", self.optimizer, placement)
        return PassTimes(
            placement=placement,
            f=_per_chunk("f", self.f, placement),
            b=_per_chunk("b", self.b, placement),
            w=_per_chunk("w", self.w, placement),
            comm=self.comm,
            optimizer=tuple(
                sum(optimizer[chunk] for chunk in chunks)
                for chunks in placement.chunks_of
            ),
        )


@dataclass(frozen=True)
class PassTimes:
    """`Costs` on a placement: one entry per chunk (``optimizer``: per stage)."""

    placement: Placement
    f: tuple[float, ...]
    b: tuple[float, ...]
    w: tuple[float, ...]
    comm: float
    optimizer: tuple[float, ...]

    def of(self, job: Job) -> float:
        """Time of one job."""
        match job:
            case Step(stage):
                return self.optimizer[stage]
            case Check():
                return 0.0
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
        """Time of a message between two chunks: none on one stage.

        A pure delay: it occupies neither stage (arXiv 2401.10241, appendix).
        """
        stage_of = self.placement.stage_of
        return self.comm if stage_of[source] != stage_of[target] else 0.0


@dataclass(frozen=True)
class MemoryModel:
    """Memory that F takes (``m_b``), and that W gives back (``m_w``; B: the rest).

    Raises:
        RequestError: ``m_w`` exceeds ``m_b``, or a number is negative or not finite.
    """

    m_b: PerChunk = 1.0
    m_w: PerChunk = 0.5
    limit: PerChunk | None = None

    def __post_init__(self) -> None:
        _check_numbers("m_b", self.m_b, at_least=0.0)
        _check_numbers("m_w", self.m_w, at_least=0.0)
        if self.limit is not None:
            _check_numbers("memory_limit", self.limit, at_least=0.0)

    def on(self, placement: Placement) -> "ChunkMemory":
        """Give every chunk its share and every stage its limit."""
        m_b = _per_chunk("m_b", self.m_b, placement)
        m_w = _per_chunk("m_w", self.m_w, placement)
        for chunk, (held, kept) in enumerate(zip(m_b, m_w, strict=True)):
            if kept > held:
                raise RequestError(
                    f"chunk {chunk}: m_w {kept:g} exceeds m_b {held:g}; W can only "
                    "keep a part of what F saved"
                )
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


def _check_numbers(name: str, value: PerChunk, *, at_least: float) -> None:
    for number in value if isinstance(value, tuple) else (value,):
        if not math.isfinite(number) or number < at_least:
            raise RequestError(
                f"{name} is {number!r}; it must be finite and at least {at_least:g}"
            )


def _per_chunk(name: str, value: PerChunk, placement: Placement) -> tuple[float, ...]:
    if isinstance(value, tuple):
        if len(value) != placement.n_chunks:
            raise RequestError(
                f"{name} has {len(value)} entries for {placement.n_chunks} chunks"
            )
        return value
    return tuple(
        value / len(placement.chunks_of[stage]) for stage in placement.stage_of
    )
