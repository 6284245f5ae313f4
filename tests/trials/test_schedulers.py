"""LR schedulers that are not attached, or attached for some stages only."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from small_model import refusal
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, SequentialLR, StepLR

import zbpp

LOST = "LR scheduler that is not attached"


def two_kinds(parameters: Any) -> list[torch.optim.Optimizer]:
    weights = [p for p in parameters if p.dim() > 1]
    others = [p for p in parameters if p.dim() == 1]
    return [torch.optim.AdamW(weights), torch.optim.SGD(others, lr=0.1)]


def make(optimizer: Any = torch.optim.AdamW) -> zbpp.Pipeline:
    torch.manual_seed(0)
    return zbpp.Pipeline(
        [nn.Linear(8, 8) for _ in range(4)],
        "ZBH1",
        loss_fn=nn.functional.mse_loss,
        optimizer=optimizer,
        n_stages=2,
        n_microbatches=2,
    )


def step(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return StepLR(optimizer, 1, gamma=0.1)


def sequence(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return SequentialLR(optimizer, [step(optimizer), step(optimizer)], [2])


@pytest.mark.parametrize("scheduler", [step, sequence])
def test_schedulers_of_one_stage_alone_are_refused(scheduler: Any) -> None:
    pipeline = make()
    first, second = map(scheduler, pipeline.optimizers)
    for some in ([first], [second]):
        assert "train at different rates" in refusal(pipeline.attach, *some)
    pipeline.attach(first, second)


def test_one_of_two_kinds_may_have_schedulers() -> None:
    pipeline = make(two_kinds)
    every = pipeline.optimizers
    pipeline.attach(*map(step, every[::2]))
    text = refusal(pipeline.attach, step(every[0]), step(every[3]))
    assert "for x in pipeline.optimizers" in text


@pytest.mark.parametrize(
    ("scheduled", "attached", "n_warnings"),
    [(slice(0), slice(0), 0), (slice(2), slice(2), 0), (slice(2), slice(0), 1)],
)
def test_a_save_warns_once_of_schedulers_that_are_not_attached(
    scheduled: slice,
    attached: slice,
    n_warnings: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pipeline = make()
    schedulers = [step(optimizer) for optimizer in pipeline.optimizers[scheduled]]
    pipeline.attach(*schedulers[attached])
    x, y = torch.randn(2, 4, 8)
    with caplog.at_level(logging.WARNING, logger="zbpp"):
        for _ in range(2):
            pipeline.step(x, y)
            pipeline.save(tmp_path, wait=True)
    assert caplog.text.count(LOST) == n_warnings
