"""Layers that communicate, by a clock that goes on only where they say so."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zbpp

WIDTH = 8
FORWARD = {"attention": 3, "dispatch": 2, "experts": 5, "combine": 1}
BACKWARD = {"attention": 4, "dispatch": 3, "experts": 6, "combine": 2}
LOSS = 7
"""All in ms."""


class Clock:
    """The time, in place of `time.perf_counter`."""

    def __init__(self) -> None:
        self.ms = 0

    def __call__(self) -> float:
        return self.ms / 1e3


CLOCK = Clock()


class _Takes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        CLOCK.ms += FORWARD[name]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        CLOCK.ms += BACKWARD[ctx.name]
        return dy.clone(), None


def takes(x: Tensor, name: str) -> Tensor:
    """Hand on a tensor, and let the time go by."""
    result: Tensor = _Takes.apply(x, name)
    return result


def plainly(communicate: Callable[..., Tensor], *args: Any) -> Tensor:
    """The control of `zbpp.overlap_point`."""
    return communicate(*args)


class Ticking(nn.Module):
    """attention | dispatch | experts | combine, and no communication where not asked.

    Args:
        point: what calls each communication; None: there is none.
    """

    def __init__(self, point: Callable[..., Tensor] | None) -> None:
        super().__init__()
        self.point = point
        self.attention, self.experts = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = takes(self.attention(x), "attention")
        if self.point is not None:
            x = self.point(takes, x, "dispatch")
        x = takes(self.experts(x), "experts")
        return x if self.point is None else self.point(takes, x, "combine")


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    CLOCK.ms += LOSS
    return nn.functional.mse_loss(outputs, targets)


def layers(point: Callable[..., Tensor] = zbpp.overlap_point) -> list[nn.Module]:
    """Make a first layer that does not communicate, and three that do."""
    return [Ticking(None), *(Ticking(point) for _ in range(3))]


def build() -> tuple[list[nn.Module], tuple[Tensor, Tensor], Callable[..., Tensor]]:
    """Make the model as `--model` takes it."""
    return layers(), (torch.randn(4, WIDTH), torch.randn(4, WIDTH)), loss_fn
