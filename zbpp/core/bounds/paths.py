"""Shared by the bounds: paths of a micro-batch, memory, and the view of one stage.

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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from zbpp.core.costs.chunks import ChunkCosts

__all__ = ["MARGIN", "PathLengths", "Stage", "count", "stages_of"]

MARGIN = 1e-9  # relative; a limit of 0.3 holds three times 0.1
_BUSY = 4  # stages with the most F and B; a micro-batch goes through all, at any price


def stages_of(costs: ChunkCosts, m: int) -> list["Stage"]:
    """The stages, in the order of their first chunks."""
    paths = PathLengths(costs)
    down, up, chunks_of = paths.down, paths.up, paths.chunks_of
    last_pass = 2 * costs.placement.n_chunks - 1
    passes = [*costs.f, *reversed(costs.b)]
    passes_of = [(*cs, *(last_pass - c for c in reversed(cs))) for cs in chunks_of]
    busy = sorted(passes_of, key=lambda qs: -sum(passes[q] for q in qs))[:_BUSY]
    around = math.inf
    stages: list[Stage] = []
    for index in sorted(range(len(chunks_of)), key=lambda stage: chunks_of[stage][0]):
        chunks = chunks_of[index]
        first = chunks[0]
        around = min(around, down[first] + up[first] - costs.w[first])
        stages.append(
            Stage(
                paths=paths,
                index=index,
                chunks=chunks,
                f=[costs.f[c] for c in chunks],
                b=[costs.b[c] for c in chunks],
                w=[costs.w[c] for c in chunks],
                m_b=[paths.relaxed.m_b[c] for c in chunks],
                m_w=[paths.relaxed.m_w[c] for c in chunks],
                peak_f=[paths.relaxed.peak_f[c] for c in chunks],
                peak_b=[paths.relaxed.peak_b[c] for c in chunks],
                limit=paths.relaxed.limit[index] * (1 + MARGIN),
                net=paths.costs.limit[index] * (1 + MARGIN),
                m=m,
                start=[paths.starts[q] - down[first] for q in passes_of[index]],
                around=down[first] + up[first] - around,
                through=[
                    list(_through(paths.starts, passes, busy, c, last_pass - first))
                    for c in chunks
                ],
            )
        )
    return stages


class PathLengths:
    """Times and memory of a pipeline, and the way down the chunks and up again.

    ``costs`` are above what is fixed, with all peaks, and ``relaxed`` those of
    `relaxed_memory`. ``down[c]`` is the time from the start of F of chunk 0 to the
    start of F of c, ``up[c]`` that from the end of B of c to the end of B of chunk 0;
    ``starts`` holds the earliest start of each pass of the whole model.
    """

    def __init__(self, costs: ChunkCosts) -> None:
        self.costs = costs = costs.above_fixed()
        self.relaxed = relaxed_memory(costs)
        self.chunks_of = costs.placement.chunks_of
        self.last_chunk = last = costs.placement.n_chunks - 1
        self.down, self.up = [0.0], [0.0]
        for chunk in range(last):
            delay = costs.delay(chunk, chunk + 1)
            self.down.append(self.down[-1] + costs.f[chunk] + delay)
            self.up.append(self.up[-1] + costs.b[chunk] + delay)
        whole = self.down[-1] + costs.f[-1] + costs.b[-1] + self.up[-1]
        backwards = range(last, -1, -1)
        ups = [whole - self.up[chunk] - costs.b[chunk] for chunk in backwards]
        self.starts = [*self.down, *ups]
        self._ahead: dict[int, list[float]] = {}

    def loop(self, chunk: int) -> float:
        """Time from the start of a chunk's F to the end of its B, nothing waiting."""
        costs, last = self.costs, self.last_chunk
        down = self.down[last] - self.down[chunk] + costs.f[last]
        up = self.up[last] - self.up[chunk] + costs.b[last]
        return down + up

    def through(self, chunk: int, n: int) -> float:
        """Least time from the first F of a chunk to the last B, of n micro-batches.

        Take a stage k whose first chunk c is not before this one, a. Its F's and B's of
        n micro-batches take n (F + B), after the path from a's F to c's F of the first.
        The last of them is a B of c; the path back to a's B remains. -inf: there is no
        such stage.
        """
        if n not in self._ahead:
            self._ahead[n] = self._longest_ahead(n)
        return self._ahead[n][chunk] - (self.down[chunk] + self.up[chunk])

    def _longest_ahead(self, n: int) -> list[float]:
        """For each chunk the longest way of n through a stage that begins there, or
        later, counted from chunk 0."""
        costs = self.costs
        longest = [-math.inf] * (self.last_chunk + 2)
        for chunks in self.chunks_of:
            busy = sum(costs.f[chunk] + costs.b[chunk] for chunk in chunks)
            first = chunks[0]
            longest[first] = self.down[first] + self.up[first] + n * busy
        for chunk in range(self.last_chunk, -1, -1):
            longest[chunk] = max(longest[chunk], longest[chunk + 1])
        return longest


def relaxed_memory(costs: ChunkCosts) -> ChunkCosts:
    """Memory as the proofs of the bounds see it: with few peaks.

    Every schedule that keeps the true model keeps this one too, so that a bound under
    this one holds under the true one:

    - Right after an F of c, at least peak_f - m_b of c less than the limit is held. So
      the least of these is taken off the limit. It holds right after each F; and the
      sum of all m_b that are held keeps it at all times, as only F's add to it.
    - Right after a B more may be held, where m_w is above m_b: up to the whole limit.
    - F of c starts only where peak_f of c fits beside all that is held, and B of c
      where peak_b of c does: the lower of those of B and BW, as a schedule may run
      either.

    Args:
        costs: above what is fixed.
    """
    placement = costs.placement
    inside = [peak - left for peak, left in zip(costs.peak_f, costs.m_b, strict=True)]
    off = [max(0.0, min(inside[c] for c in cs)) for cs in placement.chunks_of]
    off_of = [off[stage] for stage in placement.stage_of]
    peak_b = map(min, costs.peak_b, costs.peak_bw)
    peaks = zip(costs.peak_f, costs.m_b, peak_b, off_of, strict=True)
    both = [(max(b, f - less), max(0.0, peak - less)) for f, b, peak, less in peaks]
    return replace(
        costs,
        limit=tuple(
            max(0.0, limit - less) for limit, less in zip(costs.limit, off, strict=True)
        ),
        peak_f=tuple(peak for peak, _ in both),
        peak_b=tuple(peak for _, peak in both),
    )


@dataclass(frozen=True)
class Stage:
    """One stage: times and memories by chunk, and what follows from them at once.

    The bounds of `all_chunks` are on the *length* of a stage, from its first F to the
    end of its last B of chunk 0. They cost other stages time as well: those whose first
    chunk is earlier in the model. Their span starts before the length, by the way from
    their first F to that of the stage; after it there are the way back and a W:

        earlier stage   F---------------------------------B-W
                        |way|                         |way|
        stage               F-------------------------B
                            |-------- length ---------|

    Args:
        paths: of the whole pipeline.
        index: of the stage.
        chunks: of the stage, in forward order.
        f, b, w: times of each of them.
        m_b, m_w, peak_f, peak_b: memories of each of them, those of `relaxed_memory`.
        limit: that of `relaxed_memory`.
        net: the true one, above what is fixed.
        m: micro-batches.
        start: earliest start of each pass, after that of pass 0.
        around: what an earlier stage, or this one, needs beside the length, at most.
        through: per chunk, ways through a busy stage from its F to the B of the
            stage's first chunk: a constant, and time per micro-batch.
    """

    paths: PathLengths
    index: int
    chunks: tuple[int, ...]
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

    def fits(self, amount: float, beside: float = 0.0) -> float:
        """Number of times that an amount fits in the limit beside another."""
        limit = self.paths.relaxed.limit[self.index]
        if amount <= 0 or math.isinf(limit):
            return math.inf
        room = limit - beside + MARGIN * beside
        return max(0, math.floor(room / amount * (1 + MARGIN)))

    def in_loop(self) -> float:
        """Most micro-batches between their F and their B of the first chunk.

        They hold m_b each beside the peak of the next of these B's, as no B comes in
        between, and all but one of them hold it beside the peak of the last F.
        """
        m_b = self.m_b[0]
        return self.fits(m_b, max(self.peak_b[0], self.peak_f[0] - m_b))


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
    for stage in stages:
        between = [q for q in stage if a <= q <= z]
        if between:
            each = sum(passes[q] for q in between)
            first, last = between[0], between[-1]
            way = start[first] - start[a]
            yield way + start[z] + passes[z] - start[last] - passes[last], each


def count(room: float, amount: float) -> float:
    """Number of times that an amount fits in the room."""
    if room < 0:
        return 0
    if amount <= 0 or math.isinf(room):
        return math.inf
    return math.floor(room / amount)
