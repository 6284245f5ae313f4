"""Sums over the stages that take their time, like the messages of an emulated run."""

import time

import torch
from torch import Tensor

from zbpp.core import ChunkCosts, Job
from zbpp.emulation.layers import DelayedTransport, sleep_until
from zbpp.runtime.comm.transport import Reduction, Transport

__all__ = ["SlowSums"]


class SlowSums(DelayedTransport):
    """A transport whose sums are there no sooner than a delay after the last start.

    Every stage adds the time at which it began to the vector that is summed; so all of
    them know when the last one did (the stages must be on one machine). Messages wait
    for their links, as in `DelayedTransport`.

    Args:
        inner: what moves the messages.
        times: in ms; `ChunkCosts.reduction` is kept, and each edge's delay.
        stage: whose transport this is.
    """

    def __init__(self, inner: Transport, times: ChunkCosts, *, stage: int) -> None:
        super().__init__(inner, times, stage=stage)

    def reduce(self, vector: Tensor) -> "_SlowSum":
        """Start to sum a vector over all stages."""
        starts = torch.zeros(self._times.placement.n_stages, dtype=torch.float64)
        starts[self._stage] = time.perf_counter()
        both = torch.cat([vector.to(torch.float64), starts])
        return _SlowSum(
            self._inner.reduce(both), len(vector), self._times.reduction / 1e3
        )


class _SlowSum:
    def __init__(self, inner: Reduction, length: int, delay_s: float) -> None:
        self._inner, self._length, self._delay_s = inner, length, delay_s

    def ready(self) -> bool:
        return self._inner.ready()

    def done(self) -> bool:
        return self._inner.done() and time.perf_counter() >= self._due()

    def result(self, job: Job | None = None) -> Tensor:
        both = self._inner.result(job)
        sleep_until(self._due())
        return both[: self._length]

    def _due(self) -> float:
        return float(self._inner.result()[self._length :].max()) + self._delay_s
