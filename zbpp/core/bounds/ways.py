"""The way of a micro-batch if nothing waits: the sums that several bounds share."""

import math

from zbpp.core.costs import ChunkMemory, PassTimes

__all__ = ["MARGIN", "Ways"]

MARGIN = 1e-9  # relative; a limit of 0.3 holds three times 0.1


class Ways:
    """Times and memory of a pipeline, and the way down the chunks and up again.

    ``memory`` is as in `relaxed`, ``whole`` has ``net`` as its limit and all peaks.
    ``down[c]`` is the time from the start of F of chunk 0 to the start of F of c,
    ``up[c]`` that from the end of B of c to the end of B of chunk 0.
    """

    def __init__(
        self, times: PassTimes, memory: ChunkMemory, whole: ChunkMemory, m: int
    ) -> None:
        self.times = times
        self.memory = memory
        self.whole = whole
        self.m = m
        self.chunks_of = times.placement.chunks_of
        self.last_chunk = times.placement.n_chunks - 1
        self.down, self.up = [0.0], [0.0]
        for chunk in range(self.last_chunk):
            delay = times.delay(chunk, chunk + 1)
            self.down.append(self.down[-1] + times.f[chunk] + delay)
            self.up.append(self.up[-1] + times.b[chunk] + delay)

    def loop(self, chunk: int) -> float:
        """Time from the start of a chunk's F to the end of its B, nothing waiting."""
        times, last = self.times, self.last_chunk
        down = self.down[last] - self.down[chunk] + times.f[last]
        up = self.up[last] - self.up[chunk] + times.b[last]
        return down + up

    def fits(self, stage: int, amount: float, beside: float = 0.0) -> float:
        """Number of times that an amount fits in a stage's limit beside another."""
        limit = self.memory.limit[stage]
        if amount <= 0 or math.isinf(limit):
            return math.inf
        room = limit - beside + MARGIN * beside
        return max(0, math.floor(room / amount * (1 + MARGIN)))

    def in_loop(self, stage: int, chunk: int) -> float:
        """Most micro-batches between their F and their B of a chunk.

        They hold m_b each beside the peak of the next of these B's, as no B comes in
        between, and all but one of them hold it beside the peak of the last F.
        """
        memory = self.memory
        m_b = memory.m_b[chunk]
        beside = max(memory.peak_b[chunk], memory.peak_f[chunk] - m_b)
        return self.fits(stage, m_b, beside)
