"""The network of stages that sleep: messages, sums and collectives take their time."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from zbpp.core import (
    ChunkCosts,
    Collective,
    Job,
    Message,
    State,
    TiedGradient,
    What,
    kind_of,
)
from zbpp.emulation.layers import EmulatedLayer, sleep_until
from zbpp.runtime.chunk import Chunk
from zbpp.runtime.comm.transport import Expected, Reduction, Transport
from zbpp.runtime.microbatches import MicroBatches
from zbpp.runtime.parallel.sums import Collectives
from zbpp.runtime.support.errors import PeerError
from zbpp.runtime.values import Tensors, with_tensors

__all__ = ["DelayedTransport", "SleepingCollectives"]

_MS = 1e-3


@dataclass(frozen=True)
class _Delayed(Expected):
    """A value that tells when it was sent, and arrives some time later.

    Args:
        inner: brings it.
        delay_s: how much later, in seconds.
    """

    inner: Expected
    delay_s: float

    def ready(self) -> bool:
        """True if `receive` need not wait for a stage of this process."""
        return self.inner.ready()

    def receive(self, job: Job | str) -> Tensors:
        """Wait for the value, and until its delay is over."""
        tensors = self.inner.receive(job)
        sleep_until(float(tensors[0].detach().max()) + self.delay_s)
        return tensors


class DelayedTransport(Transport):
    """A transport whose values arrive no sooner than their link's delay after a send.

    The delay occupies neither stage, as in the simulator: the sender goes on at once,
    and the receiver waits outside its pass. A message that needs longer by itself
    takes that long. To tell when it was sent, every tensor is filled with the sender's
    clock (float64: all stages must be on one machine): it carries no other values.

    Args:
        inner: what moves the messages.
        times: in ms; `ChunkCosts.delay` of each edge is kept.
        stage: whose transport this is.
        slow_sums: sums over the stages are there no sooner than
            `ChunkCosts.reduction` after the last stage has begun; else as fast as they
            are. Every stage adds the time at which it began to the vector.
    """

    def __init__(
        self,
        inner: Transport,
        times: ChunkCosts,
        *,
        stage: int,
        slow_sums: bool = False,
    ) -> None:
        self._inner, self._slow_sums = inner, slow_sums
        self._stage = stage
        self.is_local = inner.is_local
        self.on_device = inner.on_device
        self.peers = inner.peers
        self._times = times

    @property
    def doing(self) -> str:
        """The call that is under way."""
        return self._inner.doing

    @doing.setter
    def doing(self, call: str) -> None:
        self._inner.doing = call

    def lost_peer(self, job: str, error: RuntimeError) -> PeerError:
        """The error for a broken collective of the stage's peers."""
        return self._inner.lost_peer(job, error)

    def report(self, error: BaseException, *, ends: bool = True) -> None:
        """Tell the other processes why this one stops."""
        self._inner.report(error, ends=ends)

    def begin(self, batch: MicroBatches | None = None) -> int | None:
        """Start a step, or an evaluation."""
        return self._inner.begin(batch)

    def send(self, value: Message, tensors: Tensors, peer: int) -> None:
        """Send the time in place of the tensors."""
        now = time.perf_counter()
        stamped = (
            torch.full_like(tensor, now, dtype=torch.float64).requires_grad_(
                tensor.requires_grad
            )
            for tensor in tensors
        )
        self._inner.send(value, with_tensors(tensors, stamped), peer)

    def post(self, value: Message, peer: int, like: Tensors | None = None) -> Expected:
        """Announce that a value will be received, no sooner than its delay is over."""
        expected = self._inner.post(value, peer, like)
        if isinstance(value, TiedGradient):  # profiling measures the link by one
            delay = self._delay_to(peer)
        else:
            step = 1 if value.what is What.ACTIVATION else -1
            delay = self._times.delay(value.chunk, value.chunk + step)
        return _Delayed(expected, delay / 1e3)

    def reduce(self, vector: Tensor) -> Reduction:
        """Start to sum a vector over all stages."""
        if not self._slow_sums:
            return self._inner.reduce(vector)
        starts = torch.zeros(self._times.placement.n_stages, dtype=torch.float64)
        starts[self._stage] = time.perf_counter()
        both = torch.cat([vector.to(torch.float64), starts])
        delay_s = self._times.reduction / 1e3
        return _SlowSum(self._inner.reduce(both), len(vector), delay_s)

    def gather(self, thing: Any) -> list[Any]:
        """Give every process the things of all processes, by rank."""
        return self._inner.gather(thing)

    def sum_numbers(self, numbers: Tensor) -> Reduction:
        """Start to sum numbers of the host over all that step together."""
        return self._inner.sum_numbers(numbers)

    def message_bytes(self) -> dict[int, int]:
        """Sizes of the activations that steps send or receive here, by chunk."""
        return self._inner.message_bytes()

    def _delay_to(self, peer: int) -> float:
        """The largest delay, in ms, of the edges that lead to a stage or from it."""
        stage_of = self._times.placement.stage_of
        ends = {self._stage, peer}
        hops = zip(self._times.hops, pairwise(stage_of), strict=True)
        return max((hop for hop, pair in hops if set(pair) == ends), default=0.0)

    def end(self) -> None:
        """End the step."""
        self._inner.end()

    def flush(self) -> None:
        """Wait until all sends have left."""
        self._inner.flush()

    def abandon(self) -> None:
        """The pipeline was dropped: end without waiting for other processes."""
        self._inner.abandon()

    def close(self) -> None:
        """End the process groups."""
        self._inner.close()


class _SlowSum(Reduction):
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


class SleepingCollectives(Collectives):
    """Collectives of one stage: one after the other, beside its jobs.

    Args:
        times: in ms.
        chunks: of the stage; the first layer of each waits for its parameters.
    """

    def __init__(self, times: ChunkCosts, chunks: Iterable[Chunk]) -> None:
        super().__init__({})
        self._times = times
        self._free = 0.0
        self._starts: dict[int, float] = {}
        self._ends: dict[tuple[State, int], float] = {}
        for chunk in chunks:
            first = chunk.layers[0]
            assert isinstance(first, EmulatedLayer)
            first.ready_s = partial(self._set_at, State.PARAMETERS, chunk.index)

    def _set_at(self, state: State, chunk: int) -> float:
        return self._ends.get((state, chunk), 0.0)

    def take_start(self, chunk: int) -> float:
        """Return when the sum of a chunk has begun."""
        return self._starts.pop(chunk)

    def run(self, job: Collective) -> None:
        """Start one as soon as the network is free, or wait for its end."""
        kind = kind_of(job)
        if kind.sets is not None:
            start = max(time.perf_counter(), self._free)
            self._free = start + _MS * self._times.of(job)
            self._ends[kind.sets, job.chunk] = self._free
            if kind.sets is State.SUM:
                self._starts[job.chunk] = start
        for state in kind.awaits:
            sleep_until(self._set_at(state, job.chunk))
