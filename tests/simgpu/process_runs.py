"""Trainings of one rank on the simulated device; tests run them in processes."""

from functools import partial
from typing import Any

import mesh_runs
import torch
from small_model import batch, make_pipeline
from torch import Tensor

import simgpu
from simgpu.processes import Found, watched
from zbpp.runtime.optim.patience import Patience

__all__ = ["all_of", "on_mesh", "small"]

STEPS = 4

Trained = tuple[Any, dict[str, Tensor]]
"""What all ranks agree on (losses, norms, ...), and this rank's parameters."""


def foreach(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, foreach=True)


def small(mode: str, n_stages: int | None = None, **more: Any) -> Trained:
    """A few clipped steps, rolled back where that comes late; an uneven evaluation."""
    settings: dict[str, Any] = {
        "optimizer": foreach,
        "device": simgpu.DEVICE,
        "clip_grad_norm": 0.5,
        "patience": Patience(failures=11, window=10),
        "timeout_s": 60.0,
    }
    with make_pipeline(mode, n_stages, **(settings | more)) as pipeline:
        results = [pipeline.step(*batch(step)) for step in range(STEPS)]
        validation = pipeline.evaluate(*batch(99, samples=7), n_microbatches=3)
        parameters = {n: p.detach().cpu() for n, p in pipeline.named_parameters()}
    losses = [(result.loss, result.grad_norm) for result in results]
    return (losses, validation), parameters


def on_mesh(mode: str, how: str, **more: Any) -> Trained:
    """The trainings of the tests of replicas and shards."""
    found = mesh_runs.train(mode, how, device=simgpu.DEVICE, **more)
    parameters = {name: p.cpu() for name, p in found.parameters.items()}
    return (found.results, found.validation), parameters


RUNS = {"small": small, "on mesh": on_mesh}


def all_of(
    cases: list[tuple[str, tuple[Any, ...], dict[str, Any], dict[str, Any]]],
) -> list[Found]:
    """Runs one after the other: kind, arguments, options, settings of the device."""
    return [
        watched(partial(RUNS[kind], *args, **more), **settings)
        for kind, args, more, settings in cases
    ]
