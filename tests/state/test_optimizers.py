"""Schedulers of several optimizers: their states, and refusals.

That every optimizer of torch is rolled back to the bit is in test_histories.py; what
parameters without one and plain loops do, in tests/checkpoint/test_places.py.
"""

import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from small import batch, linears, refusal
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, SequentialLR, StepLR

import zbpp

sgd = partial(torch.optim.SGD, lr=0.1)


def model() -> nn.Sequential:
    return nn.Sequential(*linears(), nn.Linear(8, 4), nn.Linear(4, 8))


def make(optimizer: Any, n_stages: int = 2) -> zbpp.Pipeline:
    return small.make(model(), n_stages=n_stages, optimizer=optimizer)


def two_kinds(parameters: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """As Muon is used: one optimizer for the matrices, another one for the rest."""
    every = list(parameters)
    return [sgd([p for p in every if (p.dim() > 1) == x]) for x in (True, False)]


def step_rate(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return StepLR(optimizer, 1, gamma=0.1)


def sequence(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return SequentialLR(optimizer, [step_rate(optimizer), step_rate(optimizer)], [2])


def groups_of(parameters: Any, *, empty: bool) -> torch.optim.Optimizer:
    """Two groups, of which the second has parameters of the last stage alone."""
    parts: dict[bool, list[Any]] = {False: [], True: []}
    for parameter in parameters:
        parts[parameter.shape == (4, 8)].append(parameter)
    groups: list[dict[str, Any]] = [{"params": parts[False]}]
    if parts[True] or empty:
        groups.append({"params": parts[True], "lr": 0.2})
    return torch.optim.SGD(groups, lr=0.1)


@pytest.mark.parametrize("scheduler", [step_rate, sequence])
def test_schedulers_of_one_stage_alone_are_refused(scheduler: Any) -> None:
    pipeline = make(sgd)
    first, second = map(scheduler, pipeline.optimizers)
    for some in ([first], [second]):
        assert "train at different rates" in refusal(pipeline.attach, *some)
    pipeline.attach(first, second)


def test_one_of_two_optimizers_may_have_schedulers() -> None:
    every = (pipeline := make(two_kinds)).optimizers
    pipeline.attach(*map(step_rate, every[::2]))
    text = refusal(pipeline.attach, step_rate(every[0]), step_rate(every[3]))
    assert "for x in pipeline.optimizers" in text


@pytest.mark.parametrize(
    ("n_scheduled", "n_attached", "n_warnings"), [(0, 0, 0), (2, 2, 0), (2, 0, 1)]
)
def test_a_save_warns_once_of_schedulers_that_are_not_attached(
    n_scheduled: int,
    n_attached: int,
    n_warnings: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pipeline = make(sgd)
    schedulers = [step_rate(x) for x in pipeline.optimizers[:n_scheduled]]
    pipeline.attach(*schedulers[:n_attached])
    with caplog.at_level(logging.WARNING, logger="zbpp"):
        for _ in range(2):
            pipeline.step(*batch())
            pipeline.save(tmp_path, wait=True)
    assert caplog.text.count("LR scheduler that is not attached") == n_warnings


@pytest.mark.parametrize("scheduler", [step_rate, sequence])
@pytest.mark.parametrize("optimizer", [two_kinds, partial(groups_of, empty=True)])
def test_one_state_of_schedulers_fits_any_number_of_stages(
    scheduler: Any, optimizer: Any, tmp_path: Path
) -> None:
    made = optimizer(list(model().parameters()))
    expected = [scheduler(one) for one in (made if isinstance(made, list) else [made])]
    for n_stages in (2, 4, 1):
        pipeline = make(optimizer, n_stages)
        schedulers = [scheduler(one) for one in pipeline.optimizers]
        pipeline.attach(*schedulers)
        pipeline.load(tmp_path, missing_ok=True)
        pipeline.step(*batch())
        for one in expected:
            one.optimizer.step()
        for one in (*schedulers, *expected):
            one.step()
        pipeline.save(tmp_path, wait=True)
        assert len(pipeline.state_dict()["schedulers"]) == len(expected)
        rates = [one.get_last_lr() for one in expected]
        assert [one.get_last_lr() for one in schedulers] == rates * n_stages
        groups = [[g["lr"] for g in one.param_groups] for one in pipeline.optimizers]
        assert groups == rates * n_stages


def test_states_of_other_schedulers_are_refused(tmp_path: Path) -> None:
    pipeline = make(partial(groups_of, empty=False))
    pipeline.attach(*map(step_rate, pipeline.optimizers))
    text = refusal(pipeline.save, tmp_path)
    assert "the stages have StepLR 0 of SGD 0 with different states" in text
    assert "empty ones too" in text
    saved, other = make(partial(groups_of, empty=True)), make(sgd)
    for one in (saved, other):
        one.attach(*map(step_rate, one.optimizers))
    text = refusal(other.load_state_dict, saved.state_dict())
    assert "StepLR 0 of SGD 0 has 2 parameter groups, here 1" in text
