"""Gradients of contenders, compared over processes that hold different layers.

Each process hashes its own; only gradients whose hashes differ travel, one at a time.
"""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbpp.bench.contender import StepBatch, gather
from zbpp.runtime.loss import loss_alone
from zbpp.runtime.support.devices import accelerator
from zbpp.runtime.support.pytree import map_tensors
from zbpp.training.user_model import UserModel

__all__ = ["Gradients", "compare", "noted", "plain_gradients"]

Gradients = dict[str, Tensor]
"""By ``layers.<index>.<name>``, on the CPU."""

_Hashes = dict[str, tuple[str, tuple[int, ...], torch.dtype]]


def noted(gradients: Mapping[str, Tensor]) -> Gradients:
    """Copy gradients to the CPU."""
    return {name: g.detach().cpu().clone() for name, g in gradients.items()}


def plain_gradients(
    loaded: UserModel,
    batch: StepBatch,
    device: torch.device,
    *,
    autocast: torch.dtype | None,
) -> Gradients:
    """Gradients of the mean loss by a plain loop over the whole model."""

    def here(thing: Any) -> Any:
        return map_tensors(thing, lambda tensor: tensor.to(device))

    layers = [layer.to(device) for layer in loaded.layers()]
    for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
        value = here(inputs)
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            for layer in layers:
                value = layer(value)
            if loaded.loss_fn is not None:
                value = loss_alone(loaded.loss_fn)(value, here(targets))
        (value / len(batch.inputs)).backward()
    return noted(
        {
            name: p.grad
            for index, layer in enumerate(layers)
            for name, p in layer.named_parameters(prefix=f"layers.{index}")
            if p.grad is not None
        }
    )


def compare(reference: Gradients, gradients: Gradients) -> float:
    """Largest difference, relative to the largest gradient of its layer.

    Every rank must call, with the gradients of its own layers. A gradient that is
    missing is all zeros; one that is no number differs by infinity.

    Returns:
        0.0 if all are the same to the last bit.
    """
    before, after = (gather(_hashes(side)) for side in (reference, gradients))
    owner = {name: rank for rank, part in enumerate(before) for name in part}
    holder = {name: rank for rank, part in enumerate(after) for name in part}
    old_hashes = {name: about for part in before for name, about in part.items()}
    new_hashes = {name: about for part in after for name, about in part.items()}
    differing = [
        name
        for name in sorted(old_hashes.keys() | new_hashes)
        if old_hashes.get(name) != new_hashes.get(name)
    ]
    rank = dist.get_rank()
    apart: dict[str, tuple[float, float]] = {}
    for name in differing:
        if name not in old_hashes:  # no such gradient in the reference
            if holder[name] == rank:
                apart[name] = _most(gradients[name]), 0.0
            continue
        expected = _sent(reference.get(name), old_hashes[name], owner[name])
        if holder.get(name, owner[name]) == rank:
            actual = gradients.get(name)
            if actual is None:
                actual = torch.zeros_like(expected)
            same_shape = actual.shape == expected.shape
            away = (
                _most(actual.double() - expected.double())
                if same_shape
                else float("inf")
            )
            apart[name] = away, _most(expected)
    sizes: dict[str, float] = {}
    for name, gradient in reference.items():
        layer = _layer(name)
        sizes[layer] = max(sizes.get(layer, 0.0), _most(gradient))
    largest = {layer: size for part in gather(sizes) for layer, size in part.items()}
    worst = 0.0
    for part in gather(apart):
        for name, (away, size) in part.items():
            scale = max(size, largest.get(_layer(name), 0.0))
            if away > 0 or away != away:
                worst = max(worst, away / scale if scale > 0 else float("inf"))
                worst = float("inf") if away != away else worst
    return worst


def _hashes(gradients: Gradients) -> _Hashes:
    return {
        name: (
            sha256(
                g.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            ).hexdigest(),
            tuple(g.shape),
            g.dtype,
        )
        for name, g in gradients.items()
    }


def _sent(
    gradient: Tensor | None, about: tuple[str, tuple[int, ...], torch.dtype], owner: int
) -> Tensor:
    """Give every process the gradient of one."""
    _, shape, dtype = about
    wire = (dist.get_backend() != "gloo" and accelerator()) or "cpu"
    if dist.get_rank() == owner and gradient is not None:
        message = gradient.to(wire)
    else:
        message = torch.empty(shape, dtype=dtype, device=wire)
    dist.broadcast(message, src=owner)
    return message.cpu()


def _most(gradient: Tensor) -> float:
    return float(gradient.abs().max()) if gradient.numel() else 0.0


def _layer(name: str) -> str:
    return ".".join(name.split(".")[:2])
