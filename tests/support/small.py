"""Small pipelines, for tests of one thing."""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zbpp

__all__ = ["batch", "in_policies", "linears", "make", "refusal"]

_POLICIES: dict[str, Any] = {
    "numerics": zbpp.Numerics,
    "step": zbpp.StepPolicy,
    "execution": zbpp.Execution,
}


def linears(n: int = 4, width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(n)))


def make(model: Any = None, schedule: Any = "ZBH1", **settings: Any) -> zbpp.Pipeline:
    """A pipeline of two stages, or of all processes; of Linears, or of another model.

    Settings of policies are given by their names.
    """
    settings = {
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "loss_fn": nn.functional.mse_loss,
        "n_stages": None if dist.is_initialized() else 2,
        "n_microbatches": 4,
        "device": "cpu",
        "timeout_s": 60.0,
    } | settings
    model = linears() if model is None else model
    return zbpp.Pipeline(model, schedule, **in_policies(settings))


def in_policies(settings: dict[str, Any]) -> dict[str, Any]:
    """Put those of policies into these, unless a policy is given."""
    settings = {**settings}
    for name, kind in _POLICIES.items():
        names = [field.name for field in fields(kind) if field.name in settings]
        if policy := {name: settings.pop(name) for name in names}:
            settings.setdefault(name, kind(**policy))
    return settings


def batch(n: int = 8, step: int = 0) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, n, 8, generator=torch.Generator().manual_seed(step))
    return x, y


def refusal(call: Callable[..., Any], *args: Any, **more: Any) -> str:
    """Call something that must refuse the request; return its words."""
    with pytest.raises(zbpp.RequestError) as refused:
        call(*args, **more)
    return str(refused.value)
