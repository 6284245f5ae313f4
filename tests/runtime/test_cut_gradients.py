"""A cut, or a layer that is recomputed, changes nothing about which gradients there are
and in which order they are added."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import cut_runs
import pytest
import torch
from cut_runs import N_MICROBATCHES, WIDTH, batch
from pool import Pool
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import zbpp
from zbpp.runtime import PeerError, ShapeError, stage, values
from zbpp.runtime import recompute as recomputing
from zbpp.runtime.support.strides import strides_of, with_strides


class Twice(nn.Module):
    """Hands on one tensor under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.linear(x)
        return {"hidden": y, "residual": y}


class InTurns(Twice):
    """Uses them in turns, so that one sum of gradients is not that of two sums."""

    def forward(self, value: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        x, residual = value["hidden"], value["residual"]
        y = torch.sin(x * 1.3) + torch.cos(residual * 0.7)
        return y + torch.tanh(x * 0.3) + torch.sin(residual * 0.1) + self.linear(x)


class Expanded(nn.Module):
    """Hands on an expanded tensor beside another one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), (x * 3.0).expand(3, *x.shape)


class ReadsIt(Expanded):
    """Reads the expanded tensor, and hands it on."""

    def forward(  # type: ignore[override]
        self, value: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        x, expanded = value
        return self.linear(x) + torch.sin(expanded * 1.7).mean(), expanded


class EndsIt(Expanded):
    """Reads the expanded tensor, and hands on another one alone."""

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        x, expanded = value
        return self.linear(x) + torch.sin(expanded).sum(0) + torch.cos(expanded).sum(0)


class Hooks(nn.Module):
    """Halves the gradient of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda dx: dx / 2)
        return self.linear(x)


class Stops(nn.Module):
    """Lets no gradient through."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.detach())


class StopsSome(Stops):
    """Lets no gradient of some micro-batches through."""

    def forward(self, x: Tensor) -> Tensor:
        stops = bool(x[0, 0, 0] > 0)
        return super().forward(x) if stops else self.linear(x)


class DropsOne(nn.Module):
    """Reads one of the two tensors that it is handed."""

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return value[0]


class Apart(nn.Module):
    """Computes two tensors from parameters of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.two(x)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


MODELS: dict[str, Sequence[Callable[[], nn.Module]]] = {
    "twice": (linear, Twice, InTurns, linear),
    "expanded": (linear, Expanded, ReadsIt, EndsIt),
    "hooked": (linear, linear, Hooks, linear),
    "stopped": (linear, linear, Stops, linear),
    "sometimes": (linear, linear, StopsSome, linear),
    "dropped": (linear, Apart, DropsOne, linear),
}


def build(model: str) -> list[nn.Module]:
    torch.manual_seed(0)
    return [layer() for layer in MODELS[model]]


def is_same(model: str, *case: Any) -> bool:
    return cut_runs.is_same(partial(build, model), *case)


def as_two(value: Any, *origins: Any) -> Any:
    """A value as it travels, where each place has a tensor of its own."""
    if isinstance(value, dict):
        value = {name: x.view_as(x) for name, x in value.items()}
    return AS_TENSORS(value, *origins)


AS_TENSORS = values.as_tensors


def of_zeros(found: Sequence[Tensor | None]) -> Any:
    """Gradients as they travel, zeros for those that are missing."""
    like = torch.zeros(5, 7, WIDTH)
    return tuple(like if dx is None else dx for dx in found)


CASES = [("1F1B", 4), ("ZBH1", 2), ("ZBV", 2), ("1F1B", 1, "all"), ("ZBV", 2, "all")]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_those_of_a_model_without_cuts(model: str, case: Any) -> None:
    assert is_same(model, *case)


def test_two_sums_of_one_tensor_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "as_tensors", as_two)
    assert not is_same("twice", "1F1B", 4)


def test_a_copy_that_sums_what_is_expanded_would_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def copy_of(tensor: Tensor) -> Tensor:
        strides = strides_of(tensor)
        return tensor.clone() if strides is None else with_strides(tensor, strides)

    monkeypatch.setattr(recomputing, "copy_of", copy_of)
    assert not is_same("expanded", "1F1B", 1, "all")


def test_a_hook_that_is_registered_twice_would_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recomputing, "_cut_off", lambda tensor: tensor)
    assert not is_same("hooked", "1F1B", 1, "all")


@pytest.mark.parametrize("model", ["stopped", "dropped"])
def test_gradients_of_zeros_would_show(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "gradients_of", of_zeros)
    assert not is_same(model, "1F1B", 4)


def in_processes(mode: str) -> dict[str, bool]:
    return {model: is_same(model, mode, None) for model in MODELS}


def in_processes_with_zeros(mode: str) -> bool:
    right, stage.gradients_of = stage.gradients_of, of_zeros
    try:
        return is_same("stopped", mode, None)
    finally:
        stage.gradients_of = right


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["1F1B", "ZBV"])
def test_so_are_those_of_stages_in_processes(pool: Pool, mode: str) -> None:
    assert all(all(same.values()) for same in pool.run(in_processes, 2, mode))
    assert not all(pool.run(in_processes_with_zeros, 2, mode))


def freeze_between_steps() -> str:
    """Words of the rank that finds it; none where nothing is frozen."""
    layers = build("stopped")
    pipeline = zbpp.Pipeline(
        layers, "1F1B", optimizer=None, loss_fn=mse_loss, device="cpu",
        n_microbatches=N_MICROBATCHES, execution=zbpp.Execution(timeout_s=20.0),
    )  # fmt: skip
    pipeline.step(*batch())
    pipeline.step(*batch())
    for layer in layers[:2]:
        layer.requires_grad_(False)
    try:
        pipeline.step(*batch())
    except (ShapeError, PeerError) as error:
        return str(error)
    return "nothing"


@pytest.mark.dist
def test_freezing_between_steps_is_said(pool: Pool) -> None:
    words, _ = pool.run(freeze_between_steps, 2)
    assert "parameters were frozen or thawed" in words
