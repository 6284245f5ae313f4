"""Parts of several bounds: the way of a micro-batch, memory, and the view of one stage.

A stage with chunks 0, ..., v-1 (in forward order) runs 2v passes of every micro-batch:
q = 0, 1, ... are F of 0, ..., v-1, then B of v-1, ..., 0; and there are W's. Of the
outer stage of a V, if nothing waits:

    start[q]   0     start[1]      start[2]          start[3]
               F0 .. F1 .......... B1 .............. B0        end(-1)
               |---- loop of chunk 0 ----------------|
                     |---- loop of chunk 1 |

M_c is m_b of the chunks 0 to c, what a micro-batch holds at least from the start of F
of c to the end of B of c.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from zbpp.core.costs import ChunkCosts

MARGIN = 1e-9  # relative; a limit of 0.3 holds three times 0.1
_BUSY = 8  # stages with the most F and B; a micro-batch goes through all, at any price


class Way:
    """The passes of a micro-batch if nothing waits: F of each chunk, and B of it.

    ``start`` and ``time`` are of pass q of the whole model, in that order; ``passes``
    has the passes of each stage, the stage of chunk 0 first.
    """

    def __init__(self, costs: ChunkCosts) -> None:
        last = costs.placement.n_chunks - 1
        self.time = [*costs.f, *reversed(costs.b)]
        self.start = [0.0]
        chunks = [*range(last + 1), *range(last, -1, -1)]
        for q, time in enumerate(self.time[:-1]):
            delay = costs.delay(chunks[q], chunks[q + 1])
            self.start.append(self.start[-1] + time + delay)
        self.chunks_of = sorted(costs.placement.chunks_of)
        self.passes = [
            (*chunks, *(2 * last + 1 - c for c in reversed(chunks)))
            for chunks in self.chunks_of
        ]

    def end(self, q: int) -> float:
        """The earliest end of a pass."""
        return self.start[q] + self.time[q]

    def around(self, q: int) -> float:
        """The way of a micro-batch before pass q, an F, and after its B."""
        return self.start[q] + self.end(-1) - self.end(-1 - q)

    def through(self, first: int, last: int, passes: Sequence[int]) -> "Through":
        """The least time from pass ``first`` to ``last``, of n micro-batches.

        On a stage each micro-batch has those of its passes that are on this way: n
        times their work. The way to the first of them, and from the last, lie outside.
        It is a constant, and a time for each micro-batch.
        """
        between = [q for q in passes if first <= q <= last]
        if not between:
            return 0.0, 0.0
        way = self.start[between[0]] - self.start[first]
        way += self.end(last) - self.end(between[-1])
        return way, sum(self.time[q] for q in between)


Through = tuple[float, float]


def _relaxed(costs: ChunkCosts) -> ChunkCosts:
    """Memory as the proofs of the bounds see it: with few peaks.

    Every schedule that keeps the true model keeps this one too, so that a bound under
    this one holds under the true one:

    - Right after an F of c, at least peak_f - m_b of c less than the limit is held. So
      the least of these is taken off the limit. It holds right after each F; and the
      sum of all m_b that are held keeps it at all times, as only F's add to it.
    - Right after a B more may be held, where m_w is above m_b: up to the whole limit.
    - F of c starts only where peak_f of c fits beside all that is held, and B or BW of
      c where peak_b of c does.
    """
    placement = costs.placement
    inside = [peak - left for peak, left in zip(costs.peak_f, costs.m_b, strict=True)]
    off = [max(0.0, min(inside[c] for c in cs)) for cs in placement.chunks_of]
    off_of = [off[stage] for stage in placement.stage_of]
    peaks = zip(costs.peak_f, costs.m_b, costs.peak_b, off_of, strict=True)
    both = [(max(b, f - less), max(0.0, peak - less)) for f, b, peak, less in peaks]
    limits = zip(costs.limit, off, strict=True)
    return replace(
        costs,
        limit=tuple(max(0.0, limit - less) for limit, less in limits),
        peak_f=tuple(peak for peak, _ in both),
        peak_b=tuple(peak for _, peak in both),
    )


@dataclass(frozen=True)
class Stage:
    """One stage: times and memories by chunk, and what follows from them at once.

    Most bounds are on the *length* of a stage, from its first F to the end of its last
    B of chunk 0. They cost other stages time as well: those whose first chunk is
    earlier in the model. Their span starts before the length, by the way from their
    first F to that of the stage; after it there are the way back and a W:

        earlier stage   F---------------------------------B-W
                        |way|                         |way|
        stage               F-------------------------B
                            |-------- length ---------|

    Args:
        f, b, w: times of its chunks.
        m_b, m_w, peak_f, peak_b: memories of its chunks, those of `_relaxed`.
        limit: that of `_relaxed`.
        net: the true one, above what is fixed.
        m: micro-batches.
        start: earliest start of each pass, after that of pass 0.
        around: what an earlier stage, or this one, needs beside the length, at most.
        through: per chunk, `Way.through` busy stages from its F to the B of chunk 0.
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
    through: list[list[Through]]

    @cached_property
    def v(self) -> int:
        """Number of chunks."""
        return len(self.f)

    @cached_property
    def time(self) -> list[float]:
        """Time of each pass q."""
        return [*self.f, *reversed(self.b)]

    @property
    def work(self) -> float:
        """All that the stage does: m (F + B + W)."""
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


def stages_of(costs: ChunkCosts, m: int) -> list[Stage]:
    """The stages, in the order of their first chunks; costs are above what is fixed."""
    way, relaxed = Way(costs), _relaxed(costs)
    by_work = sorted(way.passes, key=lambda qs: (sum(way.time[q] for q in qs), qs[0]))
    busy, around = by_work[-_BUSY:], math.inf
    stages: list[Stage] = []
    for chunks, passes in zip(way.chunks_of, way.passes, strict=True):
        index, first = costs.placement.stage_of[chunks[0]], chunks[0]
        around = min(around, way.around(first) - costs.w[first])

        def of(column: Sequence[float], chunks: Sequence[int] = chunks) -> list[float]:
            return [column[c] for c in chunks]

        stages.append(
            Stage(
                f=of(costs.f),
                b=of(costs.b),
                w=of(costs.w),
                m_b=of(relaxed.m_b),
                m_w=of(relaxed.m_w),
                peak_f=of(relaxed.peak_f),
                peak_b=of(relaxed.peak_b),
                limit=relaxed.limit[index] * (1 + MARGIN),
                net=costs.limit[index] * (1 + MARGIN),
                m=m,
                start=[way.start[q] - way.start[first] for q in passes],
                around=way.around(first) - around,
                through=[
                    [way.through(c, passes[-1], qs) for qs in busy] for c in chunks
                ],
            )
        )
    return stages


def count(room: float, amount: float) -> float:
    """Number of times that an amount fits in the room."""
    if room < 0:
        return 0
    if amount <= 0 or math.isinf(room):
        return math.inf
    return math.floor(room / amount)
