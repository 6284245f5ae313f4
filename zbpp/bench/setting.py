"""What all contenders share: the model, the batch of a step, the optimizer."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbpp.bench.request import BenchOptions, BenchPlan
from zbpp.runtime.support.pytree import map_tensors, tensors_in
from zbpp.training.setup import AUTOCAST, model_of
from zbpp.training.user_model import UserModel

__all__ = [
    "Setting",
    "StepBatch",
    "gather",
    "make_optimizer",
    "seeded_model",
    "step_batch",
]


@dataclass(frozen=True)
class StepBatch:
    """Inputs and targets of each micro-batch, and how much a step computes on.

    ``tokens`` is None for inputs that are no tokens.
    """

    inputs: list[Any]
    targets: list[Any]
    samples: int
    tokens: int | None


def step_batch(loaded: UserModel, n_microbatches: int) -> StepBatch:
    """Make the batch of a step from the micro-batch of a model.

    Micro-batches differ: else one in place of another would not show in the loss.
    Whole numbers of two dimensions and more are rolled along the last one, floating
    ones are scaled by no more than a quarter; all else is alike in all micro-batches.
    """
    targets = loaded.targets if loaded.loss_fn else torch.zeros(1)
    first = next(iter(tensors_in(loaded.inputs)), torch.zeros(1))
    is_tokens = not first.is_floating_point() and first.dim() == 2
    samples = len(first) if first.dim() else 1
    each = range(n_microbatches)
    return StepBatch(
        inputs=[_varied(loaded.inputs, i, n_microbatches) for i in each],
        targets=[_varied(targets, i, n_microbatches) for i in each],
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
class Setting:
    """Options, plan, device and batch: alike for all contenders."""

    options: BenchOptions
    plan: BenchPlan
    device: torch.device
    batch: StepBatch

    @property
    def autocast(self) -> torch.dtype | None:
        """Compute dtype of the forward."""
        return AUTOCAST[self.options.dtype]

    def model(self) -> UserModel:
        """The model with its first weights, in every call the same."""
        return seeded_model(self.options)


def seeded_model(options: BenchOptions) -> UserModel:
    """The model of a bench: a user's function draws the same in every call."""
    torch.manual_seed(options.seed)
    return model_of(options)


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a stage."""
    return torch.optim.AdamW(parameters, lr=1e-5, fused=True)


def gather(thing: Any) -> list[Any]:
    """Give every process the picklable things of all, by rank."""
    things: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(things, thing)
    return things
