"""One stage as the bounds for several chunks see it.

Notation of `bounds`. A stage with chunks 0, ..., v-1 (in forward order) runs 2v passes
of every micro-batch: q = 0, 1, ... are F of 0, ..., v-1, then B of v-1, ..., 0; and
there are W's. start[q] is when pass q can start at the earliest, counted from the start
of pass 0 of that micro-batch: if nothing waits. M_c is m_b of the chunks 0 to c, what a
micro-batch holds at least from the start of F of c to the end of B of c.

The bounds `fill`, `turns` and `slots` are on the *length* of a stage, from its first F
to the end of its last B of chunk 0. They cost other stages time as well: those whose
first chunk is earlier in the model. Their span starts before the length, by the way
from their first F to that of the stage; after it there are the way back and a W:

    earlier stage   F---------------------------------B-W
                    |way|                         |way|
    stage               F-------------------------B
                        |-------- length ---------|
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from zbpp.core.costs import ChunkMemory, PassTimes

__all__ = ["Stage", "count", "stages"]

_BUSY = 4  # stages with the most F and B; a micro-batch goes through all, at any price
_MARGIN = 1e-9  # relative; a limit of 0.3 holds three times 0.1


def stages(
    times: PassTimes, memory: ChunkMemory, whole: ChunkMemory, m: int
) -> Iterator["Stage"]:
    """List the stages in the order of their first chunks; memories as in `Ways`."""
    n_chunks = times.placement.n_chunks
    down, up = [0.0], [0.0]  # starts of the F's; from ends of B's to that of chunk 0
    for chunk in range(n_chunks - 1):
        delay = times.delay(chunk, chunk + 1)
        down.append(down[-1] + times.f[chunk] + delay)
        up.append(up[-1] + times.b[chunk] + delay)
    turn = down[-1] + times.f[-1] + times.b[-1] + up[-1]
    start = [*down, *(turn - up[c] - times.b[c] for c in reversed(range(n_chunks)))]
    passes = [*times.f, *reversed(times.b)]
    around = math.inf
    chunks_of = times.placement.chunks_of
    last = 2 * n_chunks - 1
    chain = [(*own, *(last - c for c in reversed(own))) for own in chunks_of]
    busy = sorted(chain, key=lambda own: -sum(passes[q] for q in own))[:_BUSY]
    for stage in sorted(range(len(chunks_of)), key=lambda s: chunks_of[s][0]):
        chunks = chunks_of[stage]
        first = chunks[0]
        around = min(around, down[first] + up[first] - times.w[first])
        starts = [down[c] for c in chunks]
        starts += [turn - up[c] - times.b[c] for c in reversed(chunks)]
        yield Stage(
            f=[times.f[c] for c in chunks],
            b=[times.b[c] for c in chunks],
            w=[times.w[c] for c in chunks],
            m_b=[memory.m_b[c] for c in chunks],
            m_w=[memory.m_w[c] for c in chunks],
            peak_f=[memory.peak_f[c] for c in chunks],
            peak_b=[memory.peak_b[c] for c in chunks],
            limit=memory.limit[stage] * (1 + _MARGIN),
            net=whole.limit[stage] * (1 + _MARGIN),
            m=m,
            start=[one - down[first] for one in starts],
            around=down[first] + up[first] - around,
            through=[
                list(_through(start, passes, busy, c, last - first)) for c in chunks
            ],
        )


def _through(
    start: list[float],
    passes: list[float],
    stages: list[tuple[int, ...]],
    a: int,
    z: int,
) -> Iterator[tuple[float, float]]:
    """Ways from the first pass a to the last pass z of n micro-batches.

    At a stage, given by its passes, each micro-batch has those of them that are on its
    way from a to z: n times their work. The way from a to the first of them lies before
    it, and the way from the last of them to z after it.
    """
    for own in stages:
        between = [q for q in own if a <= q <= z]
        if between:
            each = sum(passes[q] for q in between)
            first, last = between[0], between[-1]
            way = start[first] - start[a]
            yield way + start[z] + passes[z] - start[last] - passes[last], each


@dataclass(frozen=True)
class Stage:
    """Times and memories by chunk, and what follows from them at once.

    ``limit`` and ``net`` are those of `relaxed`.
    ``around``: what an earlier stage, or this one, needs beside the length, at most.
    ``through``: per chunk, ways through a busy stage: a constant, and time per
    micro-batch.
    """

    f: list[float]
    b: list[float]
    w: list[float]
    m_b: list[float]
    m_w: list[float]
    peak_f: list[float]
    peak_b: list[float]
    limit: float
    net: float
    m: int
    start: list[float]
    around: float
    through: list[list[tuple[float, float]]]

    @cached_property
    def v(self) -> int:
        """Number of chunks."""
        return len(self.f)

    @cached_property
    def time(self) -> list[float]:
        """Time of each pass q."""
        return [*self.f, *reversed(self.b)]

    @cached_property
    def work(self) -> float:
        """All that the stage does."""
        return self.m * (sum(self.f) + sum(self.b) + sum(self.w))

    @cached_property
    def held(self) -> list[float]:
        """M_c of each chunk c."""
        return [sum(self.m_b[: c + 1]) for c in range(self.v)]

    def chunk(self, q: int) -> int:
        """The chunk of pass q."""
        return q if q < self.v else 2 * self.v - 1 - q

    def end(self, q: int) -> float:
        """The earliest end of pass q."""
        return self.start[q] + self.time[q]


def count(room: float, one: float) -> float:
    """Count of one thing that fits in the room."""
    if room < 0:
        return 0
    if one <= 0 or math.isinf(room):
        return math.inf
    return math.floor(room / one)
