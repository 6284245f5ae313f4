"""Faults on demand: ``kind:rank:step:place``, as in ``kill:1:3:0F2``.

``raise`` raises, ``memory`` as torch does when memory runs out; ``kill``, ``stop`` and
``term`` send this process SIGKILL, SIGSTOP or SIGTERM. Steps count from 0. A place is a
job, or a part of a validation: ``commit``, ``undo``, ``redo``, ``replay``; those of
step 2 come in step 3.
"""

import os
import signal
from collections.abc import Callable
from typing import Any

import torch

from zbpp.runtime import executor
from zbpp.runtime.optim import stage_optimizer
from zbpp.runtime.optim.optimizers import StageOptimizers
from zbpp.runtime.replay import Replay

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}


def install(fault: str) -> None:
    """Let a fault happen in this process, for the rest of its life."""
    kind, rank, step, place = fault.split(":")
    if os.environ.get("RANK", "0") != rank:
        return
    stages: list[Any] = []

    def strike(at: str) -> None:
        if at != place or stages[-1].step != int(step):
            return
        if kind in SIGNALS:
            os.kill(os.getpid(), SIGNALS[kind])
        elif kind == "memory":
            raise torch.OutOfMemoryError("memory has run out, as the test asks")
        else:
            raise RuntimeError("a fault that the test asks for")

    def before(function: Callable[..., Any], at: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            strike(at)
            return function(*args, **kwargs)

        return run

    def watched(make: Callable[..., Any]) -> Callable[..., Any]:
        def handler(bound: Any, instruction: Any) -> Any:
            stages.append(bound.executor.stage)
            made = make(bound, instruction)
            made.run = before(made.run, str(instruction))
            return made

        return handler

    handlers: Any = executor.HANDLERS
    handlers.update({key: watched(make) for key, make in handlers.items()})
    for owner, name, at in (
        (StageOptimizers, "commit", "commit"),
        (StageOptimizers, "undo", "undo"),
        (stage_optimizer, "multiply_gradients", "redo"),
        (Replay, "rewind", "replay"),
    ):
        setattr(owner, name, before(getattr(owner, name), at))
