"""A profile leaves the weights and buffers that a training starts from."""

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from flat import flat_pipeline
from torch import Tensor, nn

from zbpp.core import RequestError
from zbpp.pipeline import Pipeline
from zbpp.profiling import measure


class Noisy(nn.Module):
    """Draws from Python's and numpy's generators, and counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1  # another tensor each time
        noise = random.random() + float(numpy.random.rand())
        return self.linear(x) * (1 + 1e-3 * noise)


def build() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)),
        Noisy(),
        nn.Linear(6, 3),
    ]


def make(optimizer: Callable[..., torch.optim.Optimizer], **more: Any) -> Pipeline:
    random.seed(1)
    numpy.random.seed(1)
    layers = build()
    torch.manual_seed(1)
    return flat_pipeline(
        layers,
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda ps: optimizer(ps, lr=0.05),
        n_microbatches=3,
        n_stages=2,
        clip_grad_norm=0.5,
        **more,
    )


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randn(12, 6, generator=generator),
        torch.randn(12, 3, generator=generator),
    )


def run(pipeline: Pipeline, *, profiled: bool) -> list[Tensor]:
    """Train, with a profile before the first step."""
    found = []
    if profiled:
        pipeline.profile(*batch(99), rounds=1, memory=True)
    for step in range(4):
        result = pipeline.step(*batch(step))
        found.append(torch.tensor([result.loss, result.grad_norm]))
    found += [p.detach().clone() for _, p in pipeline.named_parameters()]
    for _, layer in pipeline.named_layers():
        found += [b.clone() for b in layer.buffers()]
    for optimizer in pipeline.optimizers:
        for state in optimizer.state.values():
            found += [v for v in state.values() if isinstance(v, Tensor)]
    assert pipeline.n_steps == 4
    return [*found, torch.rand(3), torch.tensor([random.random(), numpy.random.rand()])]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


CASES = [
    (torch.optim.AdamW, {"schedule": "ZBH1"}),
    (torch.optim.SGD, {"schedule": "ZBV", "snapshots": True}),
    (torch.optim.RMSprop, {"schedule": "ZBH1", "post_validation": False}),
]


@pytest.mark.parametrize(("optimizer", "settings"), CASES)
def test_training_goes_on_as_if_there_had_been_no_profile(
    optimizer: Any, settings: dict[str, Any]
) -> None:
    plain = run(make(optimizer, **settings), profiled=False)
    assert same(run(make(optimizer, **settings), profiled=True), plain)


def test_a_profile_comes_before_the_first_step() -> None:
    pipeline = make(torch.optim.AdamW, schedule="ZBH1")
    pipeline.step(*batch(0))
    with pytest.raises(RequestError, match=r"before the first step.*measured_costs"):
        pipeline.profile(*batch(0), rounds=1)


def test_a_profile_that_fails_puts_everything_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no clock")

    monkeypatch.setattr(measure, "time_steps", fail)
    pipeline = make(torch.optim.AdamW, schedule="ZBH1")
    before = [p.detach().clone() for _, p in pipeline.named_parameters()]
    with pytest.raises(OSError, match="no clock"):
        pipeline.profile(*batch(0), rounds=1)
    after = [
        p.detach() for _, layer in pipeline.stages.layers() for p in layer.parameters()
    ]
    assert same(before, after)
