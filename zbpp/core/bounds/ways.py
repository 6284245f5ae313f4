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
        self._ahead: dict[int, list[float]] = {}
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
        times = self.times
        longest = [-math.inf] * (self.last_chunk + 2)
        for chunks in self.chunks_of:
            busy = sum(times.f[chunk] + times.b[chunk] for chunk in chunks)
            first = chunks[0]
            longest[first] = self.down[first] + self.up[first] + n * busy
        for chunk in range(self.last_chunk, -1, -1):
            longest[chunk] = max(longest[chunk], longest[chunk + 1])
        return longest

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
