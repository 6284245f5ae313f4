"""The parts that all contenders have in common, and those that they are made of."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbpp.bench.request import BenchRequest
from zbpp.core import Timeline
from zbpp.runtime.support.pytree import map_tensors, tensors_in
from zbpp.simulator import bubble_rate, stage_span, work
from zbpp.training.user_model import UserModel, optimizer_class

__all__ = [
    "Contender",
    "Field",
    "Measured",
    "StepBatch",
    "autocast_of",
    "gather",
    "make_optimizer",
    "measured_of",
    "own_loss",
    "step_batch",
]

_DTYPES = {"fp32": None, "bf16": torch.bfloat16}


class Contender(Protocol):
    """A model cut into stages, trained by a schedule; this process's share."""

    n_jobs: int
    """F, B, W and BW of this process in a step."""

    def step(self) -> None:
        """Train on the batch once, optimizer included."""

    def settle(self) -> None:
        """Wait for what the last step still has to decide."""

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of this process's parameters by ``layers.<index>.<name>``."""

    def measured(self, n_steps: int) -> "Measured | None":
        """Read the times of the jobs of so many steps (every rank must call).

        None: they cannot be told.
        """

    def close(self) -> None:
        """End."""


@dataclass(frozen=True)
class Measured:
    """Jobs of steps, and the medians of their bubbles.

    Args:
        timeline: of the last step, in ms.
        bubble: that of the bottleneck (`bubble_rate`).
        bubble_by_stage: the same with the work of each stage.
    """

    timeline: Timeline
    bubble: float
    bubble_by_stage: tuple[float, ...]


def measured_of(timelines: Sequence[Timeline]) -> Measured:
    """Take figures of steps, whose times are in seconds; oldest first."""
    by_stage = zip(*map(_idle_by_stage, timelines), strict=True)
    return Measured(
        _in_ms(timelines[-1]),
        median(map(bubble_rate, timelines)),
        tuple(map(median, by_stage)),
    )


@dataclass(frozen=True)
class StepBatch:
    """Inputs and targets of each micro-batch, and what a step has of them.

    ``tokens`` is None for inputs that are no tokens.
    """

    inputs: list[Any]
    targets: list[Any]
    samples: int
    tokens: int | None


def step_batch(loaded: UserModel, n_microbatches: int) -> StepBatch:
    """Make the batch of a step from the micro-batch of a model.

    Micro-batches differ: a mistake that takes one for another would not show else.
    Whole numbers of two dimensions and more are rolled along the last one, floating
    ones are scaled by no more than a quarter; all else is alike in all micro-batches.
    """
    targets = loaded.targets if loaded.loss_fn else torch.zeros(1)
    first = next(iter(tensors_in(loaded.inputs)), torch.zeros(1))
    is_tokens = not first.is_floating_point() and first.dim() == 2
    samples = len(first) if first.dim() else 1
    return StepBatch(
        inputs=[
            _varied(loaded.inputs, i, n_microbatches) for i in range(n_microbatches)
        ],
        targets=[_varied(targets, i, n_microbatches) for i in range(n_microbatches)],
        samples=samples * n_microbatches,
        tokens=first.numel() * n_microbatches if is_tokens else None,
    )


def _varied(thing: Any, index: int, n: int) -> Any:
    def vary(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return tensor * (1 - index / (4 * n))
        return tensor.roll(index, -1) if tensor.dim() > 1 else tensor

    return map_tensors(thing, vary)


@dataclass(frozen=True)
class Field:
    """Alike for all contenders: what is asked for, where they run, and their batch."""

    request: BenchRequest
    device: torch.device
    batch: StepBatch

    def model(self) -> UserModel:
        """The model with the weights that it starts with, in every call the same."""
        torch.manual_seed(self.request.seed)
        return self.request.load()


def own_loss(outputs: Tensor, targets: object) -> Tensor:
    """The last layer has put it out."""
    return outputs


def autocast_of(request: BenchRequest) -> torch.dtype | None:
    """Compute dtype of the forward."""
    return _DTYPES[request.dtype]


def make_optimizer(
    request: BenchRequest,
) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """Return what makes the optimizer of a stage, alike for all contenders."""
    kind = optimizer_class(request.optimizer)
    more = {"fused": True} if kind in (torch.optim.Adam, torch.optim.AdamW) else {}
    return lambda parameters: kind(parameters, lr=1e-5, **more)


def gather(thing: Any) -> list[Any]:
    """Give every process the picklable things of all, by rank."""
    things: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(things, thing)
    return things


def _idle_by_stage(timeline: Timeline) -> list[float]:
    """For each stage the share of the largest span that is not its work."""
    stages = range(timeline.placement.n_stages)
    longest = max(stage_span(timeline, stage) for stage in stages)
    return [1 - busy / longest if longest > 0 else 0.0 for busy in work(timeline)]


def _in_ms(timeline: Timeline) -> Timeline:
    """Return a timeline in ms that begins at 0."""
    zero = min(row[0].start for row in timeline.rows if row)
    return replace(
        timeline,
        clock_error=1e3 * timeline.clock_error,
        rows=tuple(
            tuple(
                replace(
                    slot, start=1e3 * (slot.start - zero), end=1e3 * (slot.end - zero)
                )
                for slot in row
            )
            for row in timeline.rows
        ),
    )
