"""The real runtime on passes that sleep instead of computing.

Every chunk is one small layer, and its passes last as long as in the costs, in
milliseconds; so do optimizer steps, messages, sums and collectives. A stage that sleeps
takes no processor from the others, so schedules of many stages are measured on few
cores: what shows is the schedule and the runtime's overhead.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.core import (
    ChunkCosts,
    Collective,
    Costs,
    Job,
    Message,
    PassKind,
    Schedule,
    State,
    TiedGradient,
    What,
    kind_of,
)
from zbpp.models import layers_from
from zbpp.pipeline import Pipeline
from zbpp.runtime.comm.transport import Expected, Reduction, Transport
from zbpp.runtime.executor import Executor
from zbpp.runtime.parallel.sums import Collectives
from zbpp.runtime.policies import StepPolicy
from zbpp.runtime.values import Tensors, with_tensors

_OVERSHOOT_S = 2e-4


def emulated_pipeline(
    schedule: Schedule,
    costs: Costs,
    *,
    post_validation: bool | None = None,
    offload_optimizer: bool = False,
) -> Pipeline:
    """Make a pipeline whose passes sleep (every rank must call).

    Args:
        schedule: what to run.
        costs: in ms. A message takes its link's ``comm``, or the time that it
            takes by itself if that is longer.
        post_validation: None: sums over the stages are as fast as they are. Else they
            take ``costs.reduction``; True: steps are validated in the next one; False:
            behind a barrier.
        offload_optimizer: copies to and from host memory take ``reduce_scatter`` and
            ``all_gather``.
    """
    placement = schedule.placement
    times = costs.on(placement)
    pipeline = Pipeline(
        layers_from(_layers, n_layers=placement.n_chunks),
        # the costs are those of chunks, recomputed layers included
        replace(schedule, split=(1,) * placement.n_chunks, recompute=None),
        loss_fn=_mean,
        optimizer=_optimizer,
        device="cpu",
        step=StepPolicy(
            post_validation=bool(post_validation), offload_optimizer=offload_optimizer
        ),
    )
    for stage, executor in pipeline.stages.executors.items():
        if any(times.hops):
            _delay_messages(executor.transport, times, stage)
        if post_validation is not None:
            _delay_sums(executor.transport, times, stage)
        _delay_jobs(executor, times, stage)
    return pipeline


def emulated_batch(pipeline: Pipeline) -> Tensor:
    """Return inputs and targets of a step in one."""
    return torch.zeros(pipeline.n_microbatches, 1, dtype=torch.float64)


def _layers(chunks: range) -> list[nn.Module]:
    layers = [nn.Linear(1, 1, bias=False, dtype=torch.float64) for _ in chunks]
    for layer in layers:
        nn.init.zeros_(layer.weight)  # messages are times, which must not add up
    return list(layers)


def _optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


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


# --- jobs -----------------------------------------------------------------------------


def _delay_jobs(executor: Executor, times: ChunkCosts, stage: int) -> None:
    """Let passes, optimizer steps and collectives take their times, of their starts on.

    What torch itself needs is a part of them, as it is a part of every measured cost.
    """
    sleeping = _SleepingCollectives(times)
    executor.collectives = sleeping

    def delay(owner: Any, name: str, end: Callable[..., float]) -> None:
        method = getattr(owner, name)

        def delayed(*args: Any) -> Any:
            due = end(*args)
            result = method(*args)
            _sleep_until(due)
            return result

        setattr(owner, name, delayed)

    def delay_passes(name: str, kind: PassKind) -> None:
        def end(chunk: int, *_: object) -> float:
            start = time.perf_counter()
            if kind is not PassKind.W:
                start = max(start, sleeping.set_at(State.PARAMETERS, chunk))
            return start + times.of_kind(kind, chunk) / 1e3

        delay(executor.stage, name, end)

    delay_passes("predict", PassKind.F)
    delay_passes("forward", PassKind.F)
    delay_passes("backward_input", PassKind.B)
    delay_passes("backward", PassKind.BW)
    delay_passes("backward_weight", PassKind.W)
    step_s = times.optimizer[stage] / 1e3
    delay(executor.optimizer, "step", lambda _: time.perf_counter() + step_s)


class _SleepingCollectives(Collectives):
    """Collectives of one stage: one after the other, parallel to its jobs."""

    def __init__(self, times: ChunkCosts) -> None:
        super().__init__({})
        self._times = times
        self._free = 0.0
        self._starts: dict[int, float] = {}
        self._ends: dict[tuple[State, int], float] = {}

    def set_at(self, state: State, chunk: int) -> float:
        """Return when the collective that sets a state of a chunk ends."""
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
            _sleep_until(self.set_at(state, job.chunk))


# --- messages and sums ----------------------------------------------------------------


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

    The delay occupies neither stage, as in the simulator: the sender continues at once,
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
