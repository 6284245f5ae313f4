"""Costs of a model's layers before its first step: measured times, estimated memory.

    model --> pipeline, one chunk a stage, even split --profile--> times, messages
          --> fake tensors --layer_memory--> bytes

The pipeline is closed again, and leaves parameters, optimizers and random generators
as they were: layers may then go where the plan wants them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zbpp.core import CollectiveKind, LayerCosts, RequestError
from zbpp.runtime.microbatches import Batch, split_inputs, split_targets
from zbpp.runtime.support.random_state import random_state, set_random_state
from zbpp.runtime.values import as_value

__all__ = ["SAFE_MODE", "measure_layers"]

SAFE_MODE = "ZBH1"
"""Splits the backward, and holds no more than 1F1B."""


def measure_layers(
    build: Callable[..., Any],
    model: Any,
    example: tuple[Batch, Batch],
    *,
    device: torch.device,
    overlaps: bool,
    estimate: Callable[[tuple[Any, Any]], LayerCosts],
) -> LayerCosts:
    """Profile the layers, and estimate their memory (every rank must call).

    Args:
        build: makes a `zbpp.Pipeline` of the model with a ``schedule``.
        model: as `zbpp.Pipeline` takes it; given layers end where they were.
        example: inputs and targets of one step, on every rank.
        device: of the pipeline.
        overlaps: what layers communicate may be hidden; False, and where layers are
            gathered, costs have no parts.
        estimate: gives the memory of the layers for a micro-batch.

    Returns:
        Costs in ms and bytes, the same on every rank.
    """
    if not (isinstance(example, tuple) and len(example) == 2):
        raise RequestError(
            f"example is a {type(example).__name__}; give (inputs, targets) of one "
            "step, on every rank"
        )
    homes = _homes(model)
    before = random_state(device)
    pipeline = build(schedule=SAFE_MODE)
    m = pipeline.n_microbatches
    inputs, targets = split_inputs(example[0], m)[0], split_targets(example[1], m)[0]
    times: LayerCosts = pipeline.profile(*example).layers
    kinds = {job.kind for job in pipeline.schedule.orders[0]}
    pipeline.close()
    memory = estimate((as_value(inputs), targets))
    if not overlaps or CollectiveKind.UNSHARD in kinds:
        times = replace(times, parts=None)
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
