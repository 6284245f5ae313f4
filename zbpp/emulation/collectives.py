"""Collectives that sleep: one after the other, beside the jobs of their stage."""

import time
from collections.abc import Iterable
from functools import partial

from zbpp.core import ChunkCosts, Collective, State, kind_of
from zbpp.emulation.layers import EmulatedLayer, sleep_until
from zbpp.runtime.chunk import Chunk
from zbpp.runtime.parallel.stage import Collectives

__all__ = ["SleepingCollectives"]

_MS = 1e-3


class SleepingCollectives(Collectives):
    """The network of one stage.

    Args:
        times: in ms.
        chunks: of the stage; the first layer of each waits for its parameters.
    """

    def __init__(self, times: ChunkCosts, chunks: Iterable[Chunk]) -> None:
        super().__init__({})
        self._times = times
        self._free = 0.0
        self._ends: dict[tuple[State, int], float] = {}
        for chunk in chunks:
            first = chunk.layers[0]
            assert isinstance(first, EmulatedLayer)
            first.ready_s = partial(self._set_at, State.PARAMETERS, chunk.index)

    def _set_at(self, state: State, chunk: int) -> float:
        return self._ends.get((state, chunk), 0.0)

    def run(self, job: Collective) -> None:
        """Start one as soon as the network is free, or wait for its end."""
        kind = kind_of(job)
        if kind.sets is not None:
            start = max(time.perf_counter(), self._free)
            self._free = start + _MS * self._times.of(job)
            self._ends[kind.sets, job.chunk] = self._free
            if kind.sets is State.SUM:
                self.began[job.chunk] = start
        for state in kind.awaits:
            sleep_until(self._set_at(state, job.chunk))
