"""A training of two stages in which faults happen; it saves after every second step."""

import signal
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import cases
from cases import Case
from same import difference, flat
from torch import Tensor

import zbpp
from zbpp.checkpoint import newest
from zbpp.runtime.testing import inject

N_STEPS = 6
SPIKE, INF = 1e4, float("inf")
Events = tuple[tuple[int, float], ...]
"""Steps with a factor of their targets."""

CASE = Case(model="norms", clip=5.0, post_validation=True)


def make(mode: str, n_stages: int | None, **more: Any) -> zbpp.Pipeline:
    return cases.make(replace(CASE, mode=mode), n_stages=n_stages, **more)


def batch(step: int, events: Events = ()) -> tuple[Tensor, Tensor]:
    inputs, targets = CASE.batch(step)
    return inputs, targets * dict(events).get(step, 1.0)


def train(mode: str, fault: str, events: Events, folder: str, more: Any = None) -> int:
    """Train, and save if there is a folder; SIGTERM ends the loop after a save."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    with inject(fault) if fault else nullcontext():
        pipeline = make(mode, None, **(more or {}))
        for step in range(N_STEPS):
            pipeline.step(*batch(step, events))
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
        pipeline.step(*batch(step, events))
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
