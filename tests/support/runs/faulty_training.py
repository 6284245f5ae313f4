"""A training of two stages in which faults happen; it saves after every second step."""

import signal
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from histories import difference, flat
from torch import Tensor, nn

import zbpp
from zbpp.checkpoint import newest
from zbpp.runtime.testing import inject

N_STEPS, WIDTH = 6, 8
SPIKE, INF = 1e4, float("inf")
Events = tuple[tuple[int, float], ...]
"""Steps with their term of the last layer's gradient."""

_gradient = [0.0]


class _Adds(torch.autograd.Function):
    """The identity; adds a number to a weight's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.shape = weight.shape
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.full(ctx.shape, _gradient[0])


class Layer(nn.Module):
    """Has a running mean, and the events if it is the last."""

    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.is_last = is_last

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(torch.tanh(self.linear(x)))
        return _Adds.apply(y, self.norm.weight) if self.is_last else y


def make(mode: str, n_stages: int | None, **more: Any) -> zbpp.Pipeline:
    torch.manual_seed(0)
    _gradient[0] = 0.0
    settings = {
        "step": zbpp.StepPolicy(post_validation=True),
        "execution": zbpp.Execution(timeout_s=60),
        "clip_grad_norm": 5.0,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    } | more
    return zbpp.Pipeline(
        [Layer(i == 3) for i in range(4)],
        mode,
        loss_fn=nn.functional.mse_loss,
        n_stages=n_stages,
        n_microbatches=4,
        **settings,
    )


def batch(step: int) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, y


def train(mode: str, fault: str, events: Events, folder: str, more: Any = None) -> int:
    """Train, and save if there is a folder; SIGTERM ends the loop after a save."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    with inject(fault) if fault else nullcontext():
        pipeline = make(mode, None, **(more or {}))
        for step in range(N_STEPS):
            _gradient[0] = dict(events).get(step, 0.0)
            pipeline.step(*batch(step))
            if folder and step % 2:
                pipeline.save(folder, wait=True)
                if any(pipeline.gather(bool(asked))):
                    break
        pipeline.close()
        return pipeline.n_steps


@cache
def states(mode: str, events: Events) -> list[dict[str, Any]]:
    """The states of an undisturbed training that waits for each norm, by step."""
    waits = zbpp.StepPolicy(post_validation=False, max_consecutive_skips=None)
    pipeline = make(mode, 2, step=waits)
    found = [_bits(pipeline)]
    for step in range(N_STEPS):
        _gradient[0] = dict(events).get(step, 0.0)
        pipeline.step(*batch(step))
        found.append(_bits(pipeline))
    return found


def assert_whole(folder: Path, mode: str, events: Events, n_steps: int) -> None:
    """The newest checkpoint has the bits of an undisturbed training."""
    checkpoint = newest(folder)
    assert checkpoint is not None
    with make("1F1B", 1) as pipeline:
        pipeline.load(checkpoint)
        assert pipeline.n_steps == n_steps
        assert difference(_bits(pipeline), states(mode, events)[n_steps]) is None


def _bits(pipeline: zbpp.Pipeline) -> dict[str, Any]:
    state = pipeline.state_dict()
    return dict(flat([state["model"], state["optimizer"]]))
