"""Gradients of layers in a pipeline beside those of a model that nothing cuts."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import zbpp

N_MICROBATCHES, WIDTH = 4, 8
Gradients = dict[str, Tensor | None]


def batch() -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(1)
    inputs, targets = torch.randn(2, N_MICROBATCHES, 5, 7, WIDTH)
    return list(inputs), list(targets)


def plain(build: Callable[[], list[nn.Module]]) -> Gradients:
    """The gradients of a loop over micro-batches in a model that nothing cuts."""
    layers = nn.Sequential(*build())
    for x, target in zip(*batch(), strict=True):
        (mse_loss(layers(x), target) / N_MICROBATCHES).backward()
    return {name: p.grad for name, p in layers.named_parameters()}


def is_same(
    build: Callable[[], list[nn.Module]],
    mode: str,
    n_stages: int | None,
    recompute: str = "none",
) -> bool:
    """Compare this process's gradients after each of two steps of the same batch."""
    layers, expected = build(), plain(build)
    schedule: Any = mode
    if recompute != "none":
        schedule = zbpp.plan_model(
            layers, mode, n_stages=n_stages, n_microbatches=N_MICROBATCHES,
            recompute=recompute, loss_fn=mse_loss,
        )  # fmt: skip
    found = []
    with zbpp.Pipeline(
        layers, schedule, optimizer=None, loss_fn=mse_loss, device="cpu",
        n_stages=n_stages, n_microbatches=N_MICROBATCHES,
    ) as pipeline:  # fmt: skip
        for _ in range(2):  # the second one knows all shapes
            for _, p in pipeline.named_parameters():
                p.grad = None
            pipeline.step(*batch())
            found += [
                (name.removeprefix("layers."), p.grad)
                for name, p in pipeline.named_parameters()
            ]
    assert found
    return all(_equal(gradient, expected[name]) for name, gradient in found)


def _equal(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return torch.equal(found, expected)
