"""Trainings of one rank on the simulated device; tests run them in processes."""

from functools import partial
from typing import Any

import mesh_runs
import torch
from small_model import batch, make_pipeline
from torch import Tensor

import simgpu
from simgpu.processes import Found, watched
from zbpp import Costs, plan

__all__ = ["Case", "all_of", "on_mesh", "small"]

STEPS = 4

Trained = tuple[Any, dict[str, Tensor]]
"""The results that a rank is told (losses, norms, ...), and its parameters."""

Case = tuple[str, tuple[Any, ...], dict[str, Any], dict[str, Any]]
"""A kind of run, its arguments, its options, and settings of the device."""


def foreach(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, foreach=True)


def small(
    mode: str,
    n_stages: int | None = None,
    *,
    folder: str = "",
    switches: bool = False,
    **more: Any,
) -> Trained:
    """A few clipped steps, rolled back where that comes late; losses and outputs.

    Args:
        mode: of the schedule.
        n_stages: None: as many as processes.
        folder: where a second pipeline takes over from the first one; empty: none does.
        switches: change to another order of the same mode after two steps.
        more: keywords of the pipeline.
    """
    settings: dict[str, Any] = {
        "optimizer": foreach,
        "device": simgpu.DEVICE,
        "clip_grad_norm": 0.5,
        "post_validation": True,
        "timeout_s": 60.0,
    } | more
    numbers = []
    pipeline = make_pipeline(mode, n_stages, **settings)
    for step in range(STEPS):
        if folder and step == 2:
            pipeline.save(folder, wait=True)
            pipeline.close()
            pipeline = make_pipeline(mode, n_stages, **settings)
            pipeline.load(folder)
        if switches and step == 2:
            n, m = pipeline.schedule.n_stages, pipeline.n_microbatches
            costs = Costs(f=1, b=3, w=2)
            pipeline.switch(plan(mode, n_stages=n, n_microbatches=m, costs=costs))
        result = pipeline.step(*batch(step))
        numbers += [result.loss, result.grad_norm]
    numbers.append(pipeline.evaluate(*batch(99, samples=7), n_microbatches=3))
    outputs = pipeline.predict(batch(98)[0], everywhere=True)
    numbers.append(float(outputs.double().sum()))
    parameters = {n: p.detach().cpu() for n, p in pipeline.named_parameters()}
    pipeline.close()
    return numbers, parameters


def on_mesh(mode: str, how: str, **more: Any) -> Trained:
    """The trainings of the tests of replicas and shards."""
    found = mesh_runs.train(mode, how, device=simgpu.DEVICE, **more)
    parameters = {name: p.cpu() for name, p in found.parameters.items()}
    return (found.results, found.validation), parameters


RUNS = {"small": small, "on mesh": on_mesh}


def all_of(cases: list[Case]) -> list[Found]:
    """Runs one after the other."""
    return [
        watched(partial(RUNS[kind], *args, **more), **settings)
        for kind, args, more, settings in cases
    ]
