"""Memory of each layer of a model, for planners: `zbpp.core.LayerCosts` in bytes."""

from typing import Any, TypedDict, Unpack

import torch

from zbpp.core import LayerCosts
from zbpp.memory.fake import fake_model
from zbpp.memory.model import ModelMemory, default_optimizer
from zbpp.memory.trace import TraceOptions
from zbpp.models.entry import AnyModel, layered_of, model_to_build
from zbpp.runtime.optim.make import MakeOptimizer
from zbpp.runtime.stage import LossFn

__all__ = ["Tracing", "costs_of_layers", "layer_memory", "model_memory"]


class Tracing(TypedDict, total=False):
    """The way in which the layers of a model run; as in `zbpp.Pipeline`."""

    n_layers: int | None
    """Of a builder."""
    microbatch_size: int | None
    """Samples of a micro-batch, if not those of the batch."""
    device: torch.device | str
    """The device whose kernels are taken; cuda needs a GPU, and leaves it alone."""
    autocast: torch.dtype | None
    """Compute dtype of the forward."""
    exact_sums: bool
    """Add gradients in micro-batch order."""


def model_memory(
    model: AnyModel,
    batch: Any,
    loss_fn: LossFn | None = None,
    *,
    n_layers: int | None = None,
    microbatch_size: int | None = None,
    device: torch.device | str = "cpu",
    autocast: torch.dtype | None = None,
    exact_sums: bool = True,
) -> ModelMemory:
    """Trace the layers of a model on fake tensors; `layer_memory` explains the rest."""
    layered = layered_of(model, n_layers)
    if layered.cut_batch is not None and not isinstance(batch, tuple):
        batch = layered.cut_batch(batch)
    inputs, targets = batch
    loss_fn = loss_fn or layered.loss_fn
    device = torch.device(device)
    fake = fake_model(
        model_to_build(model, layered),
        inputs,
        None if loss_fn is None else targets,
        n_layers=layered.n_layers,
        device=device,
    ).of_size(microbatch_size)
    options = TraceOptions(device, loss_fn, autocast, exact_sums)
    return ModelMemory(fake, options, layered.own_name)


def layer_memory(
    model: AnyModel,
    batch: Any,
    loss_fn: LossFn | None = None,
    *,
    optimizer: MakeOptimizer | None = default_optimizer,
    post_validation: bool = True,
    **tracing: Unpack[Tracing],
) -> LayerCosts:
    """Bytes of every layer; its times are left at their defaults.

    No weight is allocated, and no kernel runs: real tensors are copied as fake ones, a
    builder makes fake ones. Equal layers are traced once.

    Args:
        model: as `zbpp.Pipeline` takes it.
        batch: inputs and targets of one micro-batch, or what the model itself takes.
        loss_fn: the mean over a micro-batch; None: the model's own, or the last layer
            puts it out.
        optimizer: as `zbpp.Pipeline` takes it; None: there is none.
        post_validation: count the copy that steps are rolled back with.
        tracing: see `Tracing`.

    Raises:
        RequestError: the model has no layers, or decides by its data.
    """
    memory = model_memory(model, batch, loss_fn, **tracing)
    return costs_of_layers(memory, optimizer, post_validation=post_validation)


def costs_of_layers(
    memory: ModelMemory,
    optimizer: MakeOptimizer | None,
    *,
    post_validation: bool = True,
) -> LayerCosts:
    """`layer_memory` of a model that is traced already."""
    n = memory.n_layers
    whole, recomputed = memory.whole.layers, memory.recomputed().layers
    fixed, peak_o, parameters = [], [], []
    holders: dict[Any, list[int]] = {}
    sizes: dict[Any, tuple[float, float, float]] = {}
    for i in range(n):
        all_of_it = memory.parameters([i])
        new = [p for p in all_of_it if p not in holders]
        gradients = memory.gradients([i])
        step = memory.optimizer([i], optimizer)
        state = step.state + step.rollback * post_validation
        in_step = step.speculative_peak if post_validation else step.peak
        for p in all_of_it:
            holders.setdefault(p, []).append(i)
            share = gradients.get(p, 0) / max(1, sum(gradients.values()))
            size = float(memory.bytes_of([p]))
            fixed_size = size + gradients.get(p, 0) + state * share
            sizes[p] = fixed_size, in_step * share, size
        fixed.append(
            memory.bytes_of([*new, *memory.buffers([i])])
            + sum(gradients[p] for p in new if p in gradients)
            + (state if new else 0)
            + max(0, whole[i].first_f.left - whole[i].f.left)
        )
        parameters.append(memory.bytes_of(new))
        peak_o.append(in_step if new or not all_of_it else 0)
    columns = {
        "m_b": [layer.m_b for layer in whole],
        "m_w": [max(0, layer.m_b + layer.b.left) for layer in whole],
        "m_fixed": fixed,
        "peak_f": [layer.f.peak for layer in whole],
        "peak_b": [max(0, layer.b.peak) for layer in whole],
        "peak_w": [max(0, layer.w.peak) for layer in whole],
        "peak_o": peak_o,
        "m_r": [layer.m_b for layer in recomputed],
        "peak_r": [max(0, layer.f.peak) for layer in recomputed],
        "message": [memory.message(i) for i in range(1, n)],
        "parameters": parameters,
    }
    floats: dict[str, Any] = {
        name: tuple(map(float, column)) or 0.0 for name, column in columns.items()
    }
    tied = tuple((tuple(of), *sizes[p]) for p, of in holders.items() if len(of) > 1)
    return LayerCosts(n_layers=n, tied=tied, **floats)
