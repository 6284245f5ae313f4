"""The batch of a step: micro-batches of the model's sizes that differ.

A mistake that takes one micro-batch for another would not show if all were alike.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zbpp.runtime.support.pytree import map_tensors, tensors_in

if TYPE_CHECKING:
    from zbpp.training.user_model import UserModel

__all__ = ["StepBatch", "step_batch"]


@dataclass(frozen=True)
class StepBatch:
    """Inputs and targets of each micro-batch, and what a step has of them.

    ``tokens`` is None for inputs that are no tokens.
    """

    inputs: list[Any]
    targets: list[Any]
    samples: int
    tokens: int | None


def step_batch(loaded: "UserModel", n_microbatches: int) -> StepBatch:
    """Make the batch of a step from the micro-batch of a model.

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
