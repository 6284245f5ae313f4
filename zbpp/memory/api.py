"""`estimate`: every stage of every mode, and the largest micro-batch that fits."""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

from zbpp.core import Costs, RequestError
from zbpp.memory.estimate import Estimate, Steps, estimate_modes
from zbpp.memory.layers import model_memory
from zbpp.memory.model import ModelMemory, default_optimizer
from zbpp.models.given import Given
from zbpp.planning import USUAL_MODES
from zbpp.planning.replicas import Shard, check_replicas
from zbpp.runtime.compiled.layers import Compiling
from zbpp.runtime.optim.make import MakeOptimizer
from zbpp.runtime.stage import LossFn

__all__ = ["estimate", "largest_microbatch", "most_that_fits"]

_MOST_SAMPLES = 2**20
_GROWTH = 64  # in one step


def estimate(
    model: Given,
    batch: Any,
    loss_fn: LossFn | None = None,
    *,
    n_stages: int,
    n_microbatches: int,
    modes: Sequence[str] = USUAL_MODES,
    optimizer: MakeOptimizer | None = default_optimizer,
    n_layers: int | None = None,
    split: Sequence[int] | None = None,
    microbatch_size: int | None = None,
    post_validation: bool | None = None,
    costs: Costs | None = None,
    device: torch.device | str = "cpu",
    autocast: torch.dtype | None = None,
    exact_sums: bool = True,
    data_parallel: int = 1,
    shard: Shard = "none",
    alternating_buffers: bool = False,
    compile: Compiling = False,
) -> Estimate:
    """Bytes that every stage holds under every mode, without a weight.

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
        costs: times to plan for.
        device: whose kernels are taken; cuda needs a GPU, and leaves it alone.
        autocast: compute dtype of the forward.
        exact_sums: add gradients in micro-batch order.
        data_parallel: replicas of every stage.
        shard: state that replicas hold in parts: none, optimizer, gradients or
            parameters; each includes those before.
        alternating_buffers: layers are gathered and reduced in buffers of a stage.
        compile: as in `zbpp.Pipeline`, without seed and recompute; a layer that takes
            several graphs counts as it is.

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
        compile=compile,
    )
    check_replicas(data_parallel, shard, alternating_buffers=alternating_buffers)
    steps = Steps(
        optimizer,
        post_validation,
        split,
        data_parallel=data_parallel,
        shard=shard,
        alternating_buffers=alternating_buffers,
    )
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
    estimated: Callable[[ModelMemory, Sequence[str]], Estimate],
    modes: Sequence[str],
) -> dict[str, int]:
    """The most samples of a micro-batch with which each mode fits a limit; 0: none.

    Every size is traced anew: not all that a pass takes grows with the samples.

    Args:
        memory: of any size.
        limit: bytes of a stage.
        estimated: estimates some modes of a model.
        modes: to be searched.
    """
    sizes: dict[int, ModelMemory | None] = {memory.fake.samples: memory}

    @cache
    def peak(mode: str, samples: int) -> float:
        try:
            if samples not in sizes:
                sizes[samples] = None  # unless it can be traced
                sizes[samples] = memory.of_size(samples)
            size = sizes[samples]
            found = None if size is None else estimated(size, [mode])
        except (RuntimeError, RequestError):  # a layer does not take this size
            found = None
        return math.inf if found is None else found.peak(mode)

    first = memory.fake.samples
    return {mode: most_that_fits(partial(peak, mode), limit, first) for mode in modes}


def most_that_fits(need: Callable[[int], float], limit: float, first: int = 1) -> int:
    """The largest number whose need is within a limit; 0: not even 1.

    The need grows with the number, and nearly as a straight line: the next number is
    where the line through two known ones meets the limit, or in the middle of what is
    left where that has not helped.

    Args:
        need: of a number from 1 on; inf: it cannot be had.
        limit: of the need.
        first: the number to begin with.
    """
    low, at_low = 0, 0.0
    high = _MOST_SAMPLES + 1
    n, before = first, math.inf
    while True:
        needed = need(n)
        slope = (needed - at_low) / (n - low)
        if needed <= limit:
            low, at_low = n, needed
        else:
            high = n
        if high - low <= 1:
            return low
        is_stuck = high <= _MOST_SAMPLES and 2 * (high - low) > before
        if 0 < slope < math.inf and not is_stuck:
            n = low + int(min((limit - at_low) / slope, _GROWTH * max(1, low)))
        else:
            n = 2 * low if high > _MOST_SAMPLES else (low + high) // 2
        n, before = min(max(n, low + 1), high - 1), high - low
