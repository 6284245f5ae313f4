"""Pipelines in processes, over the simulated NCCL: same bits, no race, no circle."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from small_model import assert_same, batch, make_pipeline

import simgpu
from simgpu.processes import Found, SimulatedPool, watched
from zbpp.runtime.optim.patience import Patience

GPU = simgpu.DEVICE
STEPS = 4
MODES = ("1F1B", "ZBH1", "ZBH2", "ZBV", "VPP", "VHalf")

Trained = tuple[list[tuple[float, float]], float, dict[str, torch.Tensor]]


@pytest.fixture(scope="session")
def pool() -> Iterator[SimulatedPool]:
    workers = SimulatedPool()
    yield workers
    workers.close()


def foreach(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, foreach=True)


def train(mode: str, n_stages: int | None = None, **more: Any) -> Trained:
    """Losses and norms, a validation loss, this process's parameters."""
    settings: dict[str, Any] = {
        "optimizer": foreach,
        "device": GPU,
        "clip_grad_norm": 0.5,
        "patience": Patience(failures=11, window=10),
        "timeout_s": 60.0,
    }
    with make_pipeline(mode, n_stages, **(settings | more)) as pipeline:
        results = [pipeline.step(*batch(step)) for step in range(STEPS)]
        validation = pipeline.evaluate(*batch(99, samples=7), n_microbatches=3)
        parameters = {n: p.detach().cpu() for n, p in pipeline.named_parameters()}
    losses = [(result.loss, result.grad_norm) for result in results]
    return losses, validation, parameters


def on_a_rank(mode: str, settings: dict[str, Any], more: dict[str, Any]) -> Found:
    return watched(partial(train, mode, **more), **settings)


@pytest.fixture(scope="session")
def reference() -> Trained:
    simgpu.begin("eager")
    return train("FThenB", 1)


@pytest.mark.parametrize("mode", MODES)
def test_modes(mode: str, pool: SimulatedPool, reference: Trained) -> None:
    found = pool.run(on_a_rank, 2, mode, {}, {})
    parameters = {}
    for rank in found:
        assert rank.value[:2] == reference[:2]
        assert rank.reports == []
        parameters |= rank.value[2]
    assert_same(parameters, reference[2])
