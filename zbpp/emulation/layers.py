"""Layers that sleep instead of computing, split like real ones.

They make schedules of many stages measurable on few cores: a sleeping stage takes no
processor from the others. A message that occupies its sender does so at the end of its
pass: the layers sleep for that too, the last one in F and the first one in B.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from zbpp.core import ChunkCosts
from zbpp.runtime.backward.split import WeightQueue, current_queue

__all__ = ["EmulatedLayer", "sleep_until", "sleeping_chunks"]

_OVERSHOOT_S = 2e-4


def sleep_until(deadline: float) -> None:
    """Wait until `time.perf_counter` reads ``deadline``; a late start is not added.

    Sleeping overshoots by some 0.1 ms, so the last stretch is spent on the clock.
    """
    rest = deadline - time.perf_counter() - _OVERSHOOT_S
    if rest > 0:
        time.sleep(rest)
    while time.perf_counter() < deadline:
        pass


_until: WeakKeyDictionary[WeightQueue, tuple[float, float]] = WeakKeyDictionary()
"""Of each queue the pass that runs, by its start, and when its layers so far end."""


def _take(queue: WeightQueue | None, seconds: float) -> None:
    """Let a layer take its time of the pass that runs."""
    if queue is None:
        sleep_until(time.perf_counter() + seconds)
        return
    began, end = _until.get(queue, (-1.0, 0.0))
    if began != queue.began_s:
        end = queue.began_s
    end += seconds
    _until[queue] = queue.began_s, end
    sleep_until(end)


class _Sleep(torch.autograd.Function):
    """The identity; its forward and its two half backwards take their time.

    The times of a pass's layers count from its start, one after the other: what torch
    itself needs is a part of them, as it is a part of every measured cost. Without a
    queue they count from where the layer begins, and come on top of it.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, times: tuple[float, ...], adds: bool
    ) -> Tensor:
        queue = current_queue()
        ctx.adds = adds
        ctx.weight, ctx.times, ctx.queue = weight, times, queue
        ctx.save_for_backward(x)  # a recomputed layer runs again when it is asked for
        y = x.clone()
        _take(None if adds else queue, times[0])
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        _ = ctx.saved_tensors
        weight, queue, (_, b_s, w_s) = ctx.weight, ctx.queue, ctx.times
        dx = dy.clone()
        if queue is None:
            _take(None, b_s + w_s)
            return dx, torch.zeros_like(weight), None, None
        clock = None if ctx.adds else queue
        queue.defer((weight,), partial(_sleep_in_w, clock, weight, w_s))
        _take(clock, b_s)
        return dx, None, None, None


def _sleep_in_w(
    clock: WeightQueue | None, weight: Tensor, seconds: float
) -> tuple[Tensor | None]:
    """W of a layer: zeros, after its time; where there is a gradient nothing is added.

    Args:
        clock: whose pass the time is counted from; None: it comes on top.
        weight: that gets the zeros.
        seconds: the time.
    """
    zeros = torch.zeros_like(weight) if weight.grad is None else None
    _take(clock, seconds)
    return (zeros,)


class EmulatedLayer(nn.Module):
    """Takes given times in F, B and W; its output equals its input.

    Args:
        f_s, b_s, w_s: seconds of forward, input gradient and weight gradient.
        step_s: seconds that an optimizer shall take for this layer; it is an
            attribute of the layer's parameter, ``weight.step_s``.
        adds: sleep for these times beside what a pass needs by itself, so that this
            shows; else it is a part of them.
    """

    def __init__(
        self,
        f_s: float,
        b_s: float,
        w_s: float,
        *,
        step_s: float = 0.0,
        adds: bool = False,
    ) -> None:
        super().__init__()
        self.adds = adds
        self.ready_s: Callable[[], float] | None = None
        """The time at which its parameters are gathered, if they are."""
        self.times = (f_s, b_s, w_s)
        self.weight = nn.Parameter(torch.zeros(()))
        self.weight.step_s = step_s  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Hand on ``x`` of any shape, after ``f_s`` seconds."""
        queue = current_queue()
        if self.ready_s is not None:
            ready = self.ready_s()
            sleep_until(ready)
            if queue is not None and ready > queue.began_s:
                _until[queue] = queue.began_s, ready
        sleep: Any = _Sleep.apply  # typed from torch 2.14 on
        y: Tensor = sleep(x, self.weight, self.times, self.adds)
        return y


def sleeping_chunks(times: ChunkCosts, chunks: range) -> list[nn.Module]:
    """Make one layer a chunk; a stage's first one carries its optimizer's time."""
    layers: list[nn.Module] = []
    for chunk in chunks:
        stage = times.placement.stage_of[chunk]
        first = times.placement.chunks_of[stage][0]
        layer = EmulatedLayer(
            times.f[chunk] / 1e3,
            times.b[chunk] / 1e3,
            times.w[chunk] / 1e3,
            step_s=times.optimizer[stage] / 1e3 if chunk == first else 0.0,
        )
        layers.append(layer)
    return layers
