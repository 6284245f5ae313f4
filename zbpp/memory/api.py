"""`estimate`: every stage of every mode, and the largest micro-batch that fits."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zbpp.core import Costs, RequestError
from zbpp.memory.estimate import DEFAULT_MODES, Estimate, Steps, estimate_modes
from zbpp.memory.layers import model_memory
from zbpp.memory.model import ModelMemory, default_optimizer
from zbpp.models.given import Given
from zbpp.runtime.optim.stage_optimizer import MakeOptimizer
from zbpp.runtime.stage import LossFn

__all__ = ["estimate", "largest_microbatch", "most_that_fits"]

_MOST_SAMPLES = 2**20


def estimate(
    model: Given,
    batch: Any,
    loss_fn: LossFn | None = None,
    *,
    n_stages: int,
    n_microbatches: int,
    modes: Sequence[str] = DEFAULT_MODES,
    optimizer: MakeOptimizer | None = default_optimizer,
    n_layers: int | None = None,
    split: Sequence[int] | None = None,
    microbatch_size: int | None = None,
    post_validation: bool | None = None,
    rollback: str = "auto",
    costs: Costs | None = None,
    device: torch.device | str = "cpu",
    autocast: torch.dtype | None = None,
    exact_sums: bool = True,
) -> Estimate:
    """Bytes that every stage holds under every mode; nothing is run.

    The arguments that `zbpp.Pipeline` has too mean the same there.

    Args:
        model: as `zbpp.Pipeline` takes it.
        batch: inputs and targets of one micro-batch, or what the model itself takes.
        loss_fn: the mean over a micro-batch; None: the model's own, or the last layer
            puts it out.
        n_stages: stages.
        n_microbatches: micro-batches in a step.
        modes: modes, or schedule files.
        optimizer: called with fake parameters; None: there is no step.
        n_layers: of a builder.
        split: layers of each chunk.
        microbatch_size: samples of a micro-batch, if not those of the batch.
        post_validation: None: as `zbpp.Pipeline` decides it.
        rollback: way of post-validation.
        costs: times to plan for.
        device: whose kernels are taken; GPUs need a CUDA build, and no GPU.
        autocast: compute dtype of the forward.
        exact_sums: add gradients in micro-batch order.

    Raises:
        RequestError: the model has no layers or decides by its data, or no mode can
            be had.
    """
    memory = model_memory(
        model,
        batch,
        loss_fn,
        n_layers=n_layers,
        microbatch_size=microbatch_size,
        device=device,
        autocast=autocast,
        exact_sums=exact_sums,
    )
    steps = Steps(optimizer, post_validation, rollback, split)
    return estimate_modes(
        memory,
        steps,
        modes,
        n_stages=n_stages,
        n_microbatches=n_microbatches,
        costs=costs,
    )


def largest_microbatch(
    memory: ModelMemory,
    limit: float,
    estimated: Callable[[ModelMemory], Estimate],
    modes: Sequence[str],
) -> dict[str, int]:
    """The most samples of a micro-batch with which each mode fits a limit; 0: none.

    Every size is traced anew: not all that a pass takes grows with the samples.

    Args:
        memory: of any size.
        limit: bytes of a stage.
        estimated: estimates the modes of a model.
        modes: to be searched.
    """
    known: dict[int, Estimate | None] = {}

    def fits(samples: int, mode: str) -> bool:
        if samples not in known:
            try:
                known[samples] = estimated(memory.of_size(samples))
            except (RuntimeError, RequestError):  # a layer does not take this size
                known[samples] = None
        found = known[samples]
        return found is not None and mode in found.modes and found.peak(mode) <= limit

    return {mode: most_that_fits(lambda n, mode=mode: fits(n, mode)) for mode in modes}  # type: ignore[misc]


def most_that_fits(fits: Callable[[int], bool]) -> int:
    """The largest number that fits, by doubling and halving; 0: not even 1."""
    if not fits(1):
        return 0
    least = 1
    while least < _MOST_SAMPLES and fits(2 * least):
        least *= 2
    above = 2 * least
    while above - least > 1:
        middle = (least + above) // 2
        least, above = (middle, above) if fits(middle) else (least, middle)
    return least
