"""Collectives that sleep: one after the other, beside the jobs of their stage."""

import time
from collections.abc import Iterable
from functools import partial

from zbpp.core import Collective, CollectiveKind, PassTimes
from zbpp.emulation.layers import EmulatedLayer, sleep_until
from zbpp.runtime.chunk import Chunk
from zbpp.runtime.parallel.stage import Collectives

__all__ = ["SleepingCollectives"]


class SleepingCollectives(Collectives):
    """The lane of one stage.

    Args:
        times: in ms.
        chunks: of the stage; the first layer of each waits for its UNSHARD.
    """

    def __init__(self, times: PassTimes, chunks: Iterable[Chunk]) -> None:
        super().__init__({})
        self._seconds = {
            CollectiveKind.UNSHARD: [ms / 1e3 for ms in times.all_gather],
            CollectiveKind.REDUCE_GRAD: [ms / 1e3 for ms in times.reduce_scatter],
        }
        self._free = 0.0
        self._ends: dict[Collective, float] = {}
        for chunk in chunks:
            first = chunk.layers[0]
            assert isinstance(first, EmulatedLayer)
            first.ready_s = partial(self._gathered, chunk.index)

    def _gathered(self, chunk: int) -> float:
        return self._ends.get(Collective(CollectiveKind.UNSHARD, chunk), 0.0)

    def run(self, job: Collective) -> None:
        """Start one as soon as the lane is free, or wait for its end."""
        seconds = self._seconds.get(job.kind)
        now = time.perf_counter()
        if seconds:
            start = max(now, self._free)
            self._free = self._ends[job] = start + seconds[job.chunk]
            if job.kind is CollectiveKind.REDUCE_GRAD:
                self.began[job.chunk] = start
        elif job.kind is CollectiveKind.REDUCE_WAIT:
            sums = Collective(CollectiveKind.REDUCE_GRAD, job.chunk)
            sleep_until(self._ends.get(sums, now))
