"""The setting of all contenders: options, plan, device, model, batch of a step."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from zbpp.bench.request import BenchOptions, BenchPlan
from zbpp.runtime.support.pytree import tensors_in
from zbpp.training.setup import AUTOCAST, model_of
from zbpp.training.user_model import UserModel

LEARNING_RATE = 1e-5


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
    """Make the batch of a step from the micro-batch of a model."""
    first = next(iter(tensors_in(loaded.inputs)), torch.zeros(1))
    is_tokens = not first.is_floating_point() and first.dim() == 2
    return StepBatch(
        *loaded.batch(n_microbatches),
        samples=(len(first) if first.dim() else 1) * n_microbatches,
        tokens=first.numel() * n_microbatches if is_tokens else None,
    )


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


def gather(thing: Any) -> list[Any]:
    """Give every process the picklable things of all, by rank."""
    things: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(things, thing)
    return things
