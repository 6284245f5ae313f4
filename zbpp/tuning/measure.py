"""Costs of a model's layers before its first step: measured times, estimated memory.

    model --> pipeline, one chunk a stage, even split --profile--> times, messages
          --> fake tensors --layer_memory--> bytes

The pipeline is closed again, and leaves parameters, optimizers and random generators
as they were: layers may then go where the plan wants them.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from zbpp.core import LayerCosts, RequestError
from zbpp.runtime.microbatches import Batch, split_inputs, split_targets
from zbpp.runtime.support.random_state import random_state, set_random_state
from zbpp.runtime.values import as_value

__all__ = ["SAFE_MODE", "MeasuredPipeline", "measure_layers"]

SAFE_MODE = "ZBH1"
"""Splits the backward, and holds no more than 1F1B."""


class ProfileOfLayers(Protocol):
    """The part of `zbpp.profiling.Profile` that is used here."""

    @property
    def layers(self) -> LayerCosts:
        """Costs of each layer."""


class MeasuredPipeline(Protocol):
    """The part of `zbpp.Pipeline` that is used here."""

    rank: int

    @property
    def n_microbatches(self) -> int:
        """Micro-batches in a step."""

    def profile(
        self, inputs: Batch | None = None, targets: Batch | None = None
    ) -> ProfileOfLayers:
        """Measure."""

    def gather(self, thing: Any) -> list[Any]:
        """Give every process the things of all."""

    def close(self) -> None:
        """End."""


def measure_layers(
    build: Callable[..., MeasuredPipeline],
    model: Any,
    example: tuple[Batch, Batch],
    *,
    device: torch.device,
    estimate: Callable[[tuple[Any, Any]], LayerCosts],
) -> LayerCosts:
    """Profile the layers, and estimate their memory (every rank must call).

    Args:
        build: makes a pipeline of a model and a ``schedule``.
        model: as `zbpp.Pipeline` takes it; given layers end where they were.
        example: inputs and targets of one step, on every rank.
        device: of the pipeline.
        estimate: gives the memory of the layers for a micro-batch.

    Returns:
        Costs in ms and bytes, the same on every rank.

    Raises:
        RequestError: the batch does not fit.
        PeerError: another stage died or did not answer.
    """
    if not (isinstance(example, tuple) and len(example) == 2):
        raise RequestError(
            f"example is a {type(example).__name__}; give (inputs, targets) of one "
            "step, on every rank"
        )
    homes = _homes(model)
    before = random_state(device)
    pipeline = build(model, schedule=SAFE_MODE)
    m = pipeline.n_microbatches
    inputs, targets = split_inputs(example[0], m)[0], split_targets(example[1], m)[0]
    memory = None
    if pipeline.rank == 0:
        memory = estimate((as_value(inputs), targets))
    memory = pipeline.gather(memory)[0]
    assert memory is not None, "rank 0 has estimated it"
    times = pipeline.profile(*example).layers
    pipeline.close()
    for layer, home in homes:
        layer.to(home)
    set_random_state(before, device)  # a builder may have drawn the weights
    return times.with_memory_of(memory)


def _homes(model: Any) -> list[tuple[nn.Module, torch.device]]:
    """Layers that exist already, and where their parameters are."""
    if not isinstance(model, nn.Sequential | nn.ModuleList | Sequence):
        return []
    layers: list[nn.Module] = list(model)
    return [
        (layer, p.device)
        for layer in layers
        if (p := next(layer.parameters(), None)) is not None
    ]
