"""Costs of a model's layers before its first step: measured times, and memory.

    model --> pipeline, one chunk a stage, even split --profile--> times, messages
          --> fake tensors --layer_memory--> bytes

The pipeline trains some steps and is closed again. Layers that exist then have their
parameters and buffers back, on the devices where they were, and random generators are
as before: layers may go where the plan wants them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.core import CollectiveKind, LayerCosts, RequestError
from zbpp.diagnostics import profile
from zbpp.runtime.microbatches import Batch, split_inputs, split_targets
from zbpp.runtime.support.random_state import random_state, set_random_state
from zbpp.runtime.values import as_value

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
    kinds = {job.kind for job in pipeline.schedule.orders[0]}
    with _values_restored([layer for _, layer in pipeline.stages.layers()]):
        measured = profile(pipeline, *example)
    pipeline.close()
    costs = measured.layers.with_memory_of(estimate((as_value(inputs), targets)))
    if not overlaps or CollectiveKind.UNSHARD in kinds:
        costs = replace(costs, parts=None)
    for layer, home in homes:
        layer.to(home)
    set_random_state(before, device)  # a builder may have drawn the weights
    return costs


@contextmanager
def _values_restored(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Parameters and buffers are as they were in the end; the host has copies."""
    values = [
        (layer, name, x.detach().to("cpu", copy=True))
        for layer in layers
        for name, x in chain(layer.named_parameters(), layer.named_buffers())
    ]
    yield
    with torch.no_grad():
        for layer, name, value in values:
            module, _, own_name = name.rpartition(".")
            tensor: Tensor = getattr(layer.get_submodule(module), own_name)
            if not tensor.is_inference():
                tensor.copy_(value)


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
