"""`estimate`: every stage of every mode, and the largest micro-batch that fits."""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Unpack

from zbpp.core import Costs, RequestError
from zbpp.memory.estimate import Estimate, Steps, estimate_modes
from zbpp.memory.layers import Tracing, model_memory
from zbpp.memory.model import ModelMemory, default_optimizer
from zbpp.models.entry import AnyModel
from zbpp.planning import USUAL_MODES
from zbpp.planning.replicas import Shard, check_replicas
from zbpp.runtime.optim.make import MakeOptimizer
from zbpp.runtime.stage import LossFn

__all__ = ["estimate", "largest_microbatch", "most_that_fits"]

_MOST_SAMPLES = 2**20
_GROWTH = 64  # in one step


def estimate(
    model: AnyModel,
    batch: Any,
    loss_fn: LossFn | None = None,
    *,
    n_stages: int,
    n_microbatches: int,
    modes: Sequence[str] = USUAL_MODES,
    optimizer: MakeOptimizer | None = default_optimizer,
    split: Sequence[int] | None = None,
    post_validation: bool | None = None,
    costs: Costs | None = None,
    data_parallel: int = 1,
    shard: Shard = "none",
    **tracing: Unpack[Tracing],
) -> Estimate:
    """Bytes that every stage holds under every mode, without a weight.

    The arguments that `zbpp.Pipeline` has too mean the same there; `layer_memory`
    explains the model, and `Tracing` the rest.

    Args:
        model: as for `layer_memory`.
        batch: as for `layer_memory`.
        loss_fn: as for `layer_memory`.
        n_stages: stages.
        n_microbatches: micro-batches in a step.
        modes: modes, or schedule files.
        optimizer: called with fake parameters; None: there is no step.
        split: layers of each chunk.
        post_validation: None: as `zbpp.Pipeline` decides it.
        costs: times to plan for.
        data_parallel: replicas of every stage.
        shard: state that replicas hold in parts: none, optimizer, gradients or
            parameters; each includes those before.
        tracing: see `Tracing`.

    Raises:
        RequestError: the model has no layers or decides by its data, or no mode can
            be had.
    """
    memory = model_memory(model, batch, loss_fn, **tracing)
    check_replicas(data_parallel, shard)
    steps = Steps(
        optimizer,
        post_validation,
        split,
        data_parallel=data_parallel,
        shard=shard,
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

    @cache
    def of_size(samples: int) -> ModelMemory | None:
        if samples == memory.fake.samples:
            return memory
        try:
            return memory.of_size(samples)
        except (RuntimeError, RequestError):  # a layer does not take this size
            return None

    @cache
    def peak(mode: str, samples: int) -> float:
        size = of_size(samples)
        try:
            return math.inf if size is None else estimated(size, [mode]).peak(mode)
        except (RuntimeError, RequestError):
            return math.inf

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
