"""Layers that sleep, split as torch splits a backward.

torch runs the graph from the outputs to the inputs (its I, our B), and later that from
where the two meet to the parameters (W). So input and parameter have a node each:

    x ------ sleeps b ---.
                          + --- y        forward sleeps f
    weight - sleeps w ---'
"""

import time
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.bench.peer_stage import PeerChunk
from zbpp.core import ChunkCosts
from zbpp.emulation.layers import sleep_until

__all__ = ["sleeping_chunks", "sleeping_loss"]


class _Sleep(torch.autograd.Function):
    """The identity; its backward sleeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        sleep_until(time.perf_counter() + ctx.seconds)
        return dy.clone(), None


class _SleepingLayer(nn.Module):
    def __init__(self, f_s: float, b_s: float, w_s: float, step_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.weight.step_s = step_s  # type: ignore[attr-defined]
        self._times = f_s, b_s, w_s

    def forward(self, x: Tensor) -> Tensor:
        f_s, b_s, w_s = self._times
        sleep_until(time.perf_counter() + f_s)
        if not x.requires_grad:  # of the first stage; its layers need b all the same
            b_s, w_s = 0.0, b_s + w_s
        sleep: Any = _Sleep.apply  # typed from torch 2.14 on
        weight = sleep(self.weight, w_s)
        y: Tensor = sleep(x, b_s) + 0 * weight
        return y


def sleeping_chunks(times: ChunkCosts, stage: int) -> dict[int, PeerChunk]:
    """One layer a chunk of a stage, that sleeps for the chunk's times, in ms."""
    chunks = times.placement.chunks_of[stage]
    device = torch.device("cpu")
    return {
        chunk: PeerChunk(
            [
                _SleepingLayer(
                    times.f[chunk] / 1e3,
                    times.b[chunk] / 1e3,
                    times.w[chunk] / 1e3,
                    times.optimizer[stage] / 1e3 if chunk == chunks[0] else 0.0,
                )
            ],
            chunk,
            device,
            None,
        )
        for chunk in chunks
    }


def sleeping_loss(outputs: Tensor, targets: object) -> Tensor:
    """A mean; there are no targets."""
    return outputs.mean()
