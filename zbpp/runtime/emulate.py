"""Layers that sleep instead of computing, split like real ones.

They make schedules of many stages measurable on few cores: a sleeping stage takes no
processor from the others.
"""

import time
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.runtime.split_backward import current_queue

__all__ = ["EmulatedLayer", "sleep_until"]

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


class _Sleep(torch.autograd.Function):
    """The identity; its forward and its two half backwards take their time.

    The time counts from the start of the pass: what torch itself needs is a part of
    it, as it is a part of every measured cost. (So a chunk holds one such layer.)
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, times: tuple[float, ...]
    ) -> Tensor:
        queue = current_queue()
        began = time.perf_counter() if queue is None else queue.began_s
        ctx.weight, ctx.times, ctx.queue = weight, times, queue
        y = x.clone()
        sleep_until(began + times[0])
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        weight, queue, (_, b_s, w_s) = ctx.weight, ctx.queue, ctx.times
        dx = dy.clone()
        if queue is None:
            sleep_until(time.perf_counter() + b_s + w_s)
            return dx, torch.zeros_like(weight), None
        queue.defer(weight, lambda: _slow_zero(weight, queue.began_s + w_s))
        sleep_until(queue.began_s + b_s)
        return dx, None, None


def _slow_zero(weight: Tensor, deadline: float) -> Tensor:
    zero = torch.zeros_like(weight)
    sleep_until(deadline)
    return zero


class EmulatedLayer(nn.Module):
    """Takes given times in F, B and W; its output equals its input.

    Args:
        f_s, b_s, w_s: seconds of forward, input gradient and weight gradient.
        step_s: seconds that an optimizer shall take for this layer; it is an
            attribute of the layer's parameter, ``weight.step_s``.
    """

    def __init__(
        self, f_s: float, b_s: float, w_s: float, *, step_s: float = 0.0
    ) -> None:
        super().__init__()
        self.times = (f_s, b_s, w_s)
        self.weight = nn.Parameter(torch.zeros(()))
        self.weight.step_s = step_s  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Hand on ``x`` of any shape, after ``f_s`` seconds."""
        y: Tensor = _Sleep.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.times
        )
        return y
