"""The real runtime on layers that sleep.

Every chunk is one layer that sleeps for the chunk's times, in milliseconds, or every
layer sleeps for its own, split as the schedule says; the optimizer sleeps too, and
messages wait for the delay of their link. What is measured is then the schedule and
the runtime's overhead, on as many stages as are wanted, whatever the number of cores.

One step at a time, each from a common start, or steps in a row, post-validated or
behind a barrier: then a stage may begin a step while others still end the last one.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from zbpp.core import Costs, Schedule, Timeline
from zbpp.diagnostics import timeline
from zbpp.emulation.layers import sleep_until, sleeping_chunks
from zbpp.emulation.network import DelayedTransport, SleepingCollectives
from zbpp.models import layers_from
from zbpp.pipeline import Pipeline
from zbpp.runtime.policies import Execution, StepPolicy
from zbpp.simulator import bubble_rate, simulate, steady_step_time, step_time

__all__ = [
    "Emulation",
    "emulate",
    "emulated_batch",
    "emulated_pipeline",
    "steps_in_a_row",
]

_WARM_UP = 2  # steps that are not counted: the first one learns the shapes
_SETTLING = 2  # more of them, for steps in a row: until all stages lead as they will


@dataclass(frozen=True)
class Emulation:
    """Measured figures, beside those of the simulator; times in ms.

    Medians over the counted steps; of steps in a row, over the times from the end of
    one to that of the next, and the bubble is that of the last step.
    """

    schedule: Schedule
    n_steps: int
    step_ms: float
    simulated_step_ms: float
    bubble_rate: float
    simulated_bubble_rate: float
    post_validation: bool | None = None

    def as_dict(self) -> dict[str, object]:
        """The numbers and what they belong to, for a JSON line."""
        names = ("n_steps", "step_ms", "simulated_step_ms", "bubble_rate",
                 "simulated_bubble_rate", "post_validation")  # fmt: skip
        return {
            "final": True,
            "mode": self.schedule.name,
            "n_stages": self.schedule.n_stages,
            "n_microbatches": self.schedule.n_microbatches,
            **{name: getattr(self, name) for name in names},
        }


class _SleepingOptimizer(torch.optim.Optimizer):
    """Takes a given time, and leaves the parameters alone."""

    def __init__(self, parameters: Sequence[nn.Parameter], seconds: float) -> None:
        super().__init__(parameters, {})
        self._seconds = seconds

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Sleep."""
        sleep_until(time.perf_counter() + self._seconds)


def emulate(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    n_steps: int,
    timeout_s: float = 600.0,
    post_validation: bool | None = None,
) -> Emulation:
    """Run a schedule on sleeping layers (every rank must call).

    Args:
        schedule: what to run.
        costs: in ms. A message takes its link's ``comm``, or the time that it
            takes by itself if that is longer; the simulator counts ``comm``.
        n_steps: steps to count, after some that are not.
        timeout_s: how long a stage may wait for another.
        post_validation: None: one step at a time, from a common start to the last
            stage's end, the sum over the stages as fast as it is. Else steps in a row,
            whose sums take ``costs.reduction``: True: validated in the next step;
            False: behind a barrier.
    """
    # the costs are those of chunks, recomputed layers included
    schedule = replace(schedule, split=None, recompute=None)
    costs = costs or Costs()
    pipeline = emulated_pipeline(
        schedule,
        costs,
        timeout_s=timeout_s,
        post_validation=post_validation,
    )
    one_by_one = post_validation is None
    simulated = simulate(pipeline.schedule, costs)
    measure = _one_by_one if one_by_one else steps_in_a_row
    step_ms, bubble = measure(
        pipeline, n_steps, emulated_batch(pipeline), simulated.sending
    )
    return Emulation(
        schedule=schedule,
        n_steps=n_steps,
        step_ms=step_ms,
        simulated_step_ms=step_time(simulated)
        if one_by_one
        else steady_step_time(pipeline.schedule, costs),
        bubble_rate=bubble,
        simulated_bubble_rate=bubble_rate(simulated),
        post_validation=post_validation,
    )


def emulated_pipeline(
    schedule: Schedule,
    costs: Costs,
    *,
    timeout_s: float = 600.0,
    post_validation: bool | None = None,
) -> Pipeline:
    """Make a pipeline of layers that sleep, one a chunk; arguments as for `emulate`."""
    placement = schedule.placement
    times = costs.on(placement)
    build: Callable[[range], list[nn.Module]] = partial(sleeping_chunks, times)
    pipeline = Pipeline(
        layers_from(build, n_layers=placement.n_chunks),
        replace(schedule, split=(1,) * placement.n_chunks),
        loss_fn=_mean,
        optimizer=_sleeping_optimizer,
        device="cpu",
        step=StepPolicy(post_validation=bool(post_validation)),
        execution=Execution(timeout_s=timeout_s),
    )
    for stage, executor in pipeline.stages.executors.items():
        transport = executor.transport
        slow_sums = post_validation is not None
        if slow_sums or any(times.hops):
            transport = DelayedTransport(
                transport, times, stage=stage, slow_sums=slow_sums
            )
        sleeping = SleepingCollectives(times, executor.stage.chunks.values())
        executor.use_network(transport, sleeping)
    return pipeline


def _one_by_one(
    pipeline: Pipeline, n_steps: int, batch: Tensor, sending: Sequence[float] = ()
) -> tuple[float, float]:
    """Median step time in ms and bubble rate of steps from a common start."""
    steps, bubbles = [], []
    for step in range(_WARM_UP + n_steps):
        pipeline.gather(None)  # all ranks start together
        start = time.perf_counter()
        pipeline.step(batch, batch)
        took = max(pipeline.gather(time.perf_counter() - start))
        measured = timeline(pipeline)
        if step >= _WARM_UP:
            steps.append(took * 1e3)
            bubbles.append(_bubble(measured, sending))
    return statistics.median(steps), statistics.median(bubbles)


def steps_in_a_row(
    pipeline: Pipeline, n_steps: int, batch: Tensor, sending: Sequence[float] = ()
) -> tuple[float, float]:
    """Median time in ms between the ends of steps, and the bubble rate of the last.

    Args:
        pipeline: of any layers; every rank must call.
        n_steps: to count, after some that are not.
        batch: inputs and targets in one.
        sending: as in `Timeline`; sleeping passes end with that.
    """
    pipeline.step(batch, batch)
    pipeline.gather(None)  # the first step is slow
    ends = []
    for _ in range(_WARM_UP + _SETTLING + n_steps):
        pipeline.step(batch, batch)
        ends.append(time.perf_counter())
    last = [max(of_ranks) for of_ranks in zip(*pipeline.gather(ends), strict=True)]
    bubble = _bubble(timeline(pipeline), sending)
    pipeline.synchronize()
    steps = [after - before for before, after in pairwise(last)][-n_steps:]
    return statistics.median(steps) * 1e3, bubble


def _bubble(measured: Timeline, sending: Sequence[float]) -> float:
    """The bubble rate, with sends, which sleep in their passes, as no work."""
    in_s = tuple(send_ms / 1e3 for send_ms in sending)
    return bubble_rate(replace(measured, sending=in_s))


def emulated_batch(pipeline: Pipeline) -> Tensor:
    """Return inputs and targets of a step in one."""
    return torch.zeros(pipeline.n_microbatches, 1, dtype=torch.float64)


def _sleeping_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Make one that sleeps for the sum of its parameters' ``step_s``."""
    seconds = sum(getattr(parameter, "step_s", 0.0) for parameter in parameters)
    return _SleepingOptimizer(parameters, seconds)


def _mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean()
