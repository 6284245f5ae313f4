"""The real runtime on layers that sleep instead of computing.

Every chunk is one layer that sleeps for the chunk's times, in milliseconds; the
optimizer sleeps too, and so do messages, sums and collectives. A stage that sleeps
takes no processor from the others, so schedules of many stages are measured on few
cores: what shows is the schedule and the runtime's overhead.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from zbpp.core import (
    ChunkCosts,
    Collective,
    Costs,
    Job,
    Message,
    Schedule,
    State,
    TiedGradient,
    What,
    kind_of,
)
from zbpp.models import layers_from
from zbpp.pipeline import Pipeline
from zbpp.runtime.backward.split import WeightQueue, current_queue
from zbpp.runtime.chunk import Chunk
from zbpp.runtime.comm.transport import Expected, Reduction, Transport
from zbpp.runtime.parallel.sums import Collectives
from zbpp.runtime.policies import Execution, StepPolicy
from zbpp.runtime.values import Tensors, with_tensors

__all__ = ["EmulatedLayer", "emulated_batch", "emulated_pipeline"]

_OVERSHOOT_S = 2e-4


def emulated_pipeline(
    schedule: Schedule,
    costs: Costs,
    *,
    timeout_s: float = 600.0,
    post_validation: bool | None = None,
) -> Pipeline:
    """Make a pipeline of layers that sleep, one a chunk (every rank must call).

    Args:
        schedule: what to run.
        costs: in ms. A message takes its link's ``comm``, or the time that it
            takes by itself if that is longer.
        timeout_s: how long a stage may wait for another.
        post_validation: None: sums over the stages are as fast as they are. Else they
            take ``costs.reduction``; True: steps are validated in the next one; False:
            behind a barrier.
    """
    placement = schedule.placement
    times = costs.on(placement)
    pipeline = Pipeline(
        layers_from(partial(_layers, times), n_layers=placement.n_chunks),
        # the costs are those of chunks, recomputed layers included
        replace(schedule, split=(1,) * placement.n_chunks, recompute=None),
        loss_fn=_mean,
        optimizer=_SleepingOptimizer,
        device="cpu",
        step=StepPolicy(post_validation=bool(post_validation)),
        execution=Execution(timeout_s=timeout_s),
    )
    for stage, executor in pipeline.stages.executors.items():
        if any(times.hops):
            _delay_messages(executor.transport, times, stage)
        if post_validation is not None:
            _delay_sums(executor.transport, times, stage)
        sleeping = _SleepingCollectives(times, executor.stage.chunks.values())
        executor.collectives = sleeping
    return pipeline


def emulated_batch(pipeline: Pipeline) -> Tensor:
    """Return inputs and targets of a step in one."""
    return torch.zeros(pipeline.n_microbatches, 1, dtype=torch.float64)


def _mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean()


def _sleep_until(deadline: float) -> None:
    """Wait until `time.perf_counter` reads ``deadline``; a late start is not added.

    Sleeping overshoots by some 0.1 ms, so the last stretch is spent on the clock.
    """
    rest = deadline - time.perf_counter() - _OVERSHOOT_S
    if rest > 0:
        time.sleep(rest)
    while time.perf_counter() < deadline:
        pass


# --- layers and optimizer -------------------------------------------------------------


_until: WeakKeyDictionary[WeightQueue, tuple[float, float]] = WeakKeyDictionary()
"""Of each queue the pass that runs, by its start, and when its layers so far end."""


def _take(queue: WeightQueue | None, seconds: float) -> None:
    """Let a layer take its time of the pass that runs.

    The times of a pass's layers count from its start, one after the other: what torch
    itself needs is a part of them, as it is a part of every measured cost. Without a
    queue they count from where the layer begins.
    """
    if queue is None:
        _sleep_until(time.perf_counter() + seconds)
        return
    began, end = _until.get(queue, (-1.0, 0.0))
    if began != queue.began_s:
        end = queue.began_s
    end += seconds
    _until[queue] = queue.began_s, end
    _sleep_until(end)


class _Sleep(torch.autograd.Function):
    """The identity; its forward and its two half backwards take their time."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, times: tuple[float, ...]
    ) -> Tensor:
        ctx.weight, ctx.times, ctx.queue = weight, times, current_queue()
        ctx.save_for_backward(x)  # a recomputed layer runs again when it is asked for
        y = x.clone()
        _take(ctx.queue, times[0])
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        _ = ctx.saved_tensors
        weight, queue, (_, b_s, w_s) = ctx.weight, ctx.queue, ctx.times
        dx = dy.clone()
        if queue is None:
            _take(None, b_s + w_s)
            return dx, torch.zeros_like(weight), None
        queue.defer((weight,), partial(_sleep_in_w, queue, weight, w_s))
        _take(queue, b_s)
        return dx, None, None


def _sleep_in_w(
    queue: WeightQueue, weight: Tensor, seconds: float
) -> tuple[Tensor | None]:
    """W of a layer: zeros, after its time; nothing where there is a gradient."""
    zeros = torch.zeros_like(weight) if weight.grad is None else None
    _take(queue, seconds)
    return (zeros,)


class EmulatedLayer(nn.Module):
    """Takes some time in F, B and W; its output equals its input.

    Args:
        f_s, b_s, w_s: seconds of forward, input gradient and weight gradient.
        step_s: seconds that an optimizer shall take for this layer; it is an
            attribute of the layer's parameter, ``weight.step_s``.
    """

    def __init__(
        self, f_s: float, b_s: float, w_s: float, *, step_s: float = 0.0
    ) -> None:
        super().__init__()
        self.ready_s: Callable[[], float] = float
        """The time at which its parameters are gathered."""
        self.times = (f_s, b_s, w_s)
        self.weight = nn.Parameter(torch.zeros(()))
        self.weight.step_s = step_s  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` of any shape, after ``f_s`` seconds."""
        queue, ready = current_queue(), self.ready_s()
        _sleep_until(ready)
        if queue is not None and ready > queue.began_s:
            _until[queue] = queue.began_s, ready
        sleep: Any = _Sleep.apply  # typed from torch 2.14 on
        y: Tensor = sleep(x, self.weight, self.times)
        return y


def _layers(times: ChunkCosts, chunks: range) -> list[nn.Module]:
    """Make one layer a chunk; a stage's first one carries its optimizer's time."""
    layers: list[nn.Module] = []
    for chunk in chunks:
        stage = times.placement.stage_of[chunk]
        is_first = chunk == times.placement.chunks_of[stage][0]
        passes = (name[chunk] / 1e3 for name in (times.f, times.b, times.w))
        step_s = times.optimizer[stage] / 1e3 if is_first else 0.0
        layers.append(EmulatedLayer(*passes, step_s=step_s))
    return layers


class _SleepingOptimizer(torch.optim.Optimizer):
    """Sleeps for the sum of its parameters' ``step_s``, and leaves them alone."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self._seconds = sum(getattr(one, "step_s", 0.0) for one in parameters)

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Sleep."""
        _sleep_until(time.perf_counter() + self._seconds)


# --- network --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Delayed(Expected):
    """A value that has its send's time in it, and arrives some time later."""

    inner: Expected
    delay_s: float

    def ready(self) -> bool:
        return self.inner.ready()

    def receive(self, job: Job | str) -> Tensors:
        tensors = self.inner.receive(job)
        _sleep_until(float(tensors[0].detach().max()) + self.delay_s)
        return tensors


def _delay_messages(transport: Transport, times: ChunkCosts, stage: int) -> None:
    """Let values arrive no sooner than their link's delay after a send.

    The delay occupies neither stage, as in the simulator: the sender goes on at once,
    and the receiver waits outside its pass. A message that needs longer by itself
    takes that long. To tell when it was sent, every tensor is filled with the sender's
    clock (float64: all stages must be on one machine): it carries no other values.
    """
    send, post = transport.send, transport.post

    def send_time(value: Message, tensors: Tensors, peer: int) -> None:
        now = time.perf_counter()
        stamped = (
            torch.full_like(tensor, now, dtype=torch.float64).requires_grad_(
                tensor.requires_grad
            )
            for tensor in tensors
        )
        send(value, with_tensors(tensors, stamped), peer)

    def post_delayed(
        value: Message, peer: int, like: Tensors | None = None
    ) -> Expected:
        if isinstance(value, TiedGradient):  # profiling measures the link by one
            edges = zip(times.hops, pairwise(times.placement.stage_of), strict=True)
            hops = (hop for hop, edge in edges if set(edge) == {stage, peer})
            delay = max(hops, default=0.0)
        else:
            step = 1 if value.what is What.ACTIVATION else -1
            delay = times.delay(value.chunk, value.chunk + step)
        return _Delayed(post(value, peer, like), delay / 1e3)

    transport.send = send_time  # type: ignore[method-assign]
    transport.post = post_delayed  # type: ignore[method-assign]


def _delay_sums(transport: Transport, times: ChunkCosts, stage: int) -> None:
    """Let sums over the stages end some time after the last stage has begun.

    Every stage adds the time at which it began to the vector.
    """
    reduce = transport.reduce

    def reduce_slowly(vector: Tensor) -> Reduction:
        starts = torch.zeros(times.placement.n_stages, dtype=torch.float64)
        starts[stage] = time.perf_counter()
        both = torch.cat([vector.to(torch.float64), starts])
        return _SlowSum(reduce(both), len(vector), times.reduction / 1e3)

    transport.reduce = reduce_slowly  # type: ignore[method-assign]


@dataclass(frozen=True)
class _SlowSum(Reduction):
    inner: Reduction
    length: int
    delay_s: float

    def ready(self) -> bool:
        return self.inner.ready()

    def done(self) -> bool:
        return self.inner.done() and time.perf_counter() >= self._due()

    def result(self, job: Job | None = None) -> Tensor:
        both = self.inner.result(job)
        _sleep_until(self._due())
        return both[: self.length]

    def _due(self) -> float:
        return float(self.inner.result()[self.length :].max()) + self.delay_s


class _SleepingCollectives(Collectives):
    """Collectives of one stage: one after the other, beside its jobs."""

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
            self._free = start + self._times.of(job) / 1e3
            self._ends[kind.sets, job.chunk] = self._free
            if kind.sets is State.SUM:
                self._starts[job.chunk] = start
        for state in kind.awaits:
            _sleep_until(self._set_at(state, job.chunk))
