"""What a forward may change: its input, buffers, and random numbers that it draws."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "Change",
    "Layer",
    "in_place",
    "pythons_numbers",
    "replaced",
    "running_mean",
    "unmarked_mean",
]

Change = Callable[[Any, Tensor], Tensor]


class Layer(nn.Module):
    """A Linear, and something that a forward does beside."""

    def __init__(self, change: Change | None) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.zeros(64, 128))  # 32 KiB: not small
        self.step = 0
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        if self.change is not None:
            x = self.change(self, x)
        return torch.tanh(self.linear(x))


def in_place(layer: Any, x: Tensor) -> Tensor:
    return x.sub_(0.2)


def pythons_numbers(layer: Any, x: Tensor) -> Tensor:
    return x * random.random()


def running_mean(layer: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        layer.table[0, :8].lerp_(x.mean(0), 0.5)
    return x + layer.table[0, :8]


def unmarked_mean(layer: Any, x: Tensor) -> Tensor:
    """As some vector quantizers do: no version counter sees it."""
    layer.table.data[0, :8].lerp_(x.detach().mean(0), 0.5)
    return x + layer.table[0, :8]


def replaced(layer: Any, x: Tensor) -> Tensor:
    layer.table = layer.table + 0.1
    return x + layer.table[0, :8]
