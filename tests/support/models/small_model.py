"""A small model whose layers a builder makes, its data and its pipelines."""

from typing import Any

import torch
from case_models import Block
from torch import Tensor, nn

import zbpp
from zbpp.core import RequestError

__all__ = [
    "N_LAYERS",
    "Block",
    "assert_same",
    "batch",
    "build",
    "make_pipeline",
    "refusal",
]

N_LAYERS = 9


def build(layers: range, *, dropout: float = 0.0) -> list[nn.Module]:
    """Layers of an embedding model over 11 tokens, seeded one by one."""
    built: list[nn.Module] = []
    for index in layers:
        torch.default_generator.manual_seed(index)
        if index == 0:
            built.append(nn.Embedding(11, 16))
        elif index == N_LAYERS - 1:
            built.append(nn.Linear(16, 11))
        else:
            built.append(Block(dropout=dropout))
    return built


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def batch(step: int, samples: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, 11, (samples, 6), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


POLICIES = {
    "numerics": zbpp.Numerics,
    "step": zbpp.StepPolicy,
    "execution": zbpp.Execution,
}
PLANNED = ("split", "example", "memory_limit")


def make_pipeline(mode: str, n_stages: int | None, **more: Any) -> zbpp.Pipeline:
    """A pipeline of the model; each setting goes to the policy that has it."""
    settings: dict[str, Any] = {
        "loss_fn": loss_fn,
        "optimizer": adamw,
        "n_microbatches": 6,
        "n_stages": n_stages,
    } | more

    def taken(names: Any) -> dict[str, Any]:
        return {name: settings.pop(name) for name in names if name in settings}

    for name, kind in POLICIES.items():
        settings[name] = kind(**taken(kind.__dataclass_fields__))
    model: Any = settings.pop("model", build)
    if callable(model):
        model = zbpp.layers_from(model, n_layers=N_LAYERS)
    schedule: Any = mode
    if planned := taken(PLANNED):
        schedule = zbpp.plan_model(model, mode, **planned, **settings)
    return zbpp.Pipeline(model, schedule, **settings)


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Equal to the last bit."""
    assert sorted(left) == sorted(right)
    for name, value in left.items():
        assert torch.equal(value, right[name]), f"{name} differs"


def refusal(function: object, *args: object, **more: object) -> str:
    """Call something that must refuse the request; return its message."""
    try:
        function(*args, **more)  # type: ignore[operator]
    except RequestError as error:
        return str(error)
    raise AssertionError("the request was not refused")
