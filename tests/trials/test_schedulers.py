"""LR schedulers: one state for all stages, attached for all of them."""

import logging
from functools import partial
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


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(8, width) for width in (8, 8, 8, 9)]


def make(optimizer: Any = torch.optim.AdamW, n_stages: int = 2) -> zbpp.Pipeline:
    return zbpp.Pipeline(
        layers(),
        "ZBH1",
        loss_fn=nn.functional.mse_loss,
        optimizer=optimizer,
        n_stages=n_stages,
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
    x, y = torch.ones(4, 8), torch.zeros(4, 9)
    with caplog.at_level(logging.WARNING, logger="zbpp"):
        for _ in range(2):
            pipeline.step(x, y)
            pipeline.save(tmp_path, wait=True)
    assert caplog.text.count(LOST) == n_warnings


def groups_of(parameters: Any, *, empty: bool) -> torch.optim.Optimizer:
    """Two groups, of which the second is of the last layer alone."""
    parts: dict[bool, list[Any]] = {False: [], True: []}
    for parameter in parameters:
        parts[parameter.shape == (9, 8)].append(parameter)
    groups: list[dict[str, Any]] = [{"params": parts[False]}]
    if parts[True] or empty:
        groups.append({"params": parts[True], "lr": 0.2})
    return torch.optim.SGD(groups, lr=0.1)


@pytest.mark.parametrize("scheduler", [step, sequence])
@pytest.mark.parametrize("kind", [two_kinds, partial(groups_of, empty=True)])
def test_one_state_fits_any_number_of_stages(
    scheduler: Any, kind: Any, tmp_path: Path
) -> None:
    plain = kind(list(nn.Sequential(*layers()).parameters()))
    expected = [scheduler(one) for one in (plain if type(plain) is list else [plain])]
    for n_stages in (2, 4, 1):
        pipeline = make(kind, n_stages)
        schedulers = [scheduler(one) for one in pipeline.optimizers]
        pipeline.attach(*schedulers)
        pipeline.load(tmp_path, missing_ok=True)
        pipeline.step(torch.ones(4, 8), torch.zeros(4, 9))
        for one in expected:
            one.optimizer.step()
        for one in (*schedulers, *expected):
            one.step()
        pipeline.save(tmp_path, wait=True)
        assert len(pipeline.state_dict()["schedulers"]) == len(expected)
        rates = [one.get_last_lr() for one in expected]
        assert [one.get_last_lr() for one in schedulers] == rates * n_stages
        assert [
            [group["lr"] for group in one.param_groups] for one in pipeline.optimizers
        ] == rates * n_stages


def test_schedulers_that_differ_between_stages_are_not_saved(tmp_path: Path) -> None:
    pipeline = make(partial(groups_of, empty=False))
    pipeline.attach(*map(step, pipeline.optimizers))
    text = refusal(pipeline.save, tmp_path)
    assert "the stages have StepLR 0 of SGD 0 with different states" in text
    assert "empty ones too" in text


def test_a_state_of_other_groups_is_refused() -> None:
    saved = make(partial(groups_of, empty=True))
    saved.attach(*map(step, saved.optimizers))
    other = make(partial(torch.optim.SGD, lr=0.1))
    other.attach(*map(step, other.optimizers))
    text = refusal(other.load_state_dict, saved.state_dict())
    assert "StepLR 0 of SGD 0 has 2 parameter groups, here 1" in text
