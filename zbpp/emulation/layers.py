"""Layers that sleep instead of computing, split like real ones, and slow messages.

They make schedules of many stages measurable on few cores: a sleeping stage takes no
processor from the others.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from zbpp.core import ChunkCosts, Job, Message, TiedGradient, What
from zbpp.runtime.backward.queue import DeferredWork, WeightQueue, current_queue
from zbpp.runtime.comm.ping import Ping
from zbpp.runtime.comm.transport import Expected, Opening, Reduction, Transport
from zbpp.runtime.support.errors import PeerError
from zbpp.runtime.values import Tensors, with_tensors

__all__ = ["DelayedTransport", "EmulatedLayer", "sleep_until"]

_OVERSHOOT_S = 2e-4


def sleep_until(deadline: float) -> None:
    """Wait until `time.perf_counter` reads ``deadline``; a late start is not added.

    Sleeping overshoots by some 0.1 ms, so the last stretch is spent on the clock.
    """
    rest = deadline - time.perf_counter() - _OVERSHOOT_S
    if rest > 0:
        time.sleep(rest)
    while time.perf_counter() < deadline:
        pass


_until: WeakKeyDictionary[WeightQueue, tuple[float, float]] = WeakKeyDictionary()
"""Of each queue the pass that runs, by its start, and when its layers so far end."""


def _take(queue: WeightQueue | None, seconds: float) -> None:
    """Let a layer take its time of the pass that runs."""
    if queue is None:
        sleep_until(time.perf_counter() + seconds)
        return
    began, end = _until.get(queue, (-1.0, 0.0))
    if began != queue.began_s:
        end = queue.began_s
    end += seconds
    _until[queue] = queue.began_s, end
    sleep_until(end)


class _Sleep(torch.autograd.Function):
    """The identity; its forward and its two half backwards take their time.

    The times of a pass's layers count from its start, one after the other: what torch
    itself needs is a part of them, as it is a part of every measured cost. Without a
    queue they count from where the layer begins, and come on top of it.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, times: tuple[float, ...], adds: bool
    ) -> Tensor:
        queue = current_queue()
        ctx.adds = adds
        ctx.weight, ctx.times, ctx.queue = weight, times, queue
        ctx.save_for_backward(x)  # a recomputed layer runs again when it is asked for
        y = x.clone()
        _take(None if adds else queue, times[0])
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        _ = ctx.saved_tensors
        weight, queue, (_, b_s, w_s) = ctx.weight, ctx.queue, ctx.times
        dx = dy.clone()
        if queue is None:
            _take(None, b_s + w_s)
            return dx, torch.zeros_like(weight), None, None
        clock = None if ctx.adds else queue
        queue.put(_SleepingW(clock, weight, w_s))
        _take(clock, b_s)
        return dx, None, None, None


class _SleepingW(DeferredWork):
    """The W of a layer: zeros, after its time.

    Args:
        queue: whose pass the time is counted from; None: it comes on top.
        weight: that gets the zeros.
        seconds: the time.
    """

    __slots__ = ("_queue", "_seconds", "_weight")

    def __init__(
        self, queue: WeightQueue | None, weight: Tensor, seconds: float
    ) -> None:
        super().__init__((weight,), ())
        self._queue, self._weight, self._seconds = queue, weight, seconds

    def run(self, *, in_place: bool) -> Sequence[tuple[Tensor, Tensor]]:
        """Return the gradient; where there is one already, nothing is added."""
        weight = self._weight
        zeros = [] if weight.grad is not None else [(weight, torch.zeros_like(weight))]
        _take(self._queue, self._seconds)
        return zeros


class EmulatedLayer(nn.Module):
    """Takes given times in F, B and W; its output equals its input.

    Args:
        f_s, b_s, w_s: seconds of forward, input gradient and weight gradient.
        step_s: seconds that an optimizer shall take for this layer; it is an
            attribute of the layer's parameter, ``weight.step_s``.
        adds: sleep for these times beside what a pass needs by itself, so that this
            shows; else it is a part of them.
    """

    def __init__(
        self,
        f_s: float,
        b_s: float,
        w_s: float,
        *,
        step_s: float = 0.0,
        adds: bool = False,
    ) -> None:
        super().__init__()
        self.adds = adds
        self.ready_s: Callable[[], float] | None = None
        """The time at which its parameters are gathered, if they are."""
        self.times = (f_s, b_s, w_s)
        self.weight = nn.Parameter(torch.zeros(()))
        self.weight.step_s = step_s  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Hand on ``x`` of any shape, after ``f_s`` seconds."""
        queue = current_queue()
        if self.ready_s is not None:
            ready = self.ready_s()
            sleep_until(ready)
            if queue is not None and ready > queue.began_s:
                _until[queue] = queue.began_s, ready
        sleep: Any = _Sleep.apply  # typed from torch 2.14 on
        y: Tensor = sleep(x, self.weight, self.times, self.adds)
        return y


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

    def receive(self, job: Job) -> Tensors:
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
    """

    def __init__(self, inner: Transport, times: ChunkCosts, *, stage: int) -> None:
        self._inner = inner
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

    def begin(self, opening: Opening | None = None) -> None:
        """Start a step, or an evaluation."""
        self._inner.begin(opening)

    def send(self, value: Message, tensors: Tensors, peer: int) -> None:
        """Send the time in place of the tensors."""
        if isinstance(value, TiedGradient):
            self._inner.send(value, tensors, peer)
            return
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
        if isinstance(value, TiedGradient):
            return expected
        step = 1 if value.what is What.ACTIVATION else -1
        delay = self._times.delay(value.chunk, value.chunk + step)
        return _Delayed(expected, delay / 1e3)

    def reduce(self, vector: Tensor) -> Reduction:
        """Start to sum a vector over all stages."""
        return self._inner.reduce(vector)

    def gather(self, thing: Any) -> list[Any]:
        """Give every process the things of all processes, by rank."""
        return self._inner.gather(thing)

    def gather_pipeline(self, thing: Any) -> list[Any]:
        """Give every process the things of its pipeline, by stage."""
        return self._inner.gather_pipeline(thing)

    def add_over_replicas(self, numbers: Tensor) -> Reduction | None:
        """Start to sum numbers of the host over replicas."""
        return self._inner.add_over_replicas(numbers)

    def ping(self, peer: int, n_bytes: int, rounds: int) -> list[Ping]:
        """Time messages, which take no less than the delay of their link."""
        delay_s = self._delay_to(peer) / 1e3
        return [
            replace(one, one_way_s=max(one.one_way_s, delay_s))
            for one in self._inner.ping(peer, n_bytes, rounds)
        ]

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

    def let_go(self) -> None:
        """The pipeline was dropped: end without waiting for other processes."""
        self._inner.let_go()

    def close(self) -> None:
        """Give back what the transport holds."""
        self._inner.close()
