"""A plain training goes on in a pipeline: weights, moments, rates, and their names."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

import zbpp
import zbpp.checkpoint

DIM, M, HALF, STEPS = 6, 4, 3, 6
mse = nn.functional.mse_loss


class Model(nn.Module):
    """Blocks between an embedding and a head, which may share their weights."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(DIM, DIM, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM)) for _ in range(3)
        )
        self.last = nn.Linear(DIM, DIM, bias=False)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def adamw(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Any:
    """Two groups, as usual: matrices decay."""
    named = list(named_parameters)
    groups = [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=0.05)


def momentum(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Any:
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.05, momentum=0.9)


def two(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Any:
    """An optimizer for matrices, and one for the rest."""
    named = list(named_parameters)
    first = torch.optim.SGD([p for _, p in named if p.dim() > 1], 0.05, momentum=0.9)
    rest = [p for _, p in named if p.dim() == 1]
    return [first, torch.optim.AdamW(rest, lr=0.05)] if rest else [first]


BUILDERS = {"adamw": adamw, "momentum": momentum, "two": two}


def plain(how: str, *, tied: bool) -> tuple[Model, list[Any], list[Any]]:
    model = Model(tied=tied)
    made = BUILDERS[how](model.named_parameters())
    optimizers = made if isinstance(made, list) else [made]
    rates = [torch.optim.lr_scheduler.StepLR(x, 2, 0.5) for x in optimizers]
    return model, optimizers, rates


def batch(step: int) -> tuple[Tensor, Tensor]:
    x, y = torch.randn((2, 8, DIM), generator=torch.Generator().manual_seed(step))
    return x, y


def go_on(
    model: Model, optimizers: Any, rates: Any, steps: Iterable[int]
) -> list[float]:
    losses = []
    for step in steps:
        x, y = batch(step)
        losses.append(0.0)
        for a, b in zip(x.chunk(M), y.chunk(M), strict=True):
            loss = mse(model(a), b) / M
            loss.backward()
            losses[-1] += loss.item()
        for thing in (*optimizers, *rates):
            thing.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return losses


def resume(
    path: str, how: str, mode: str, n_stages: int | None, tied: bool, moments: bool
) -> list[float]:
    """Losses of a pipeline that goes on from the files of a plain training."""
    model, optimizers, rates = plain(how, tied=tied)
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    for thing, state in zip((*optimizers, *rates), saved["rest"], strict=True):
        thing.load_state_dict(state)
    whole = zbpp.checkpoint.plain_state(model, optimizers, schedulers=rates, step=HALF)
    pipeline = zbpp.Pipeline(
        zbpp.cut(model, "blocks", example=(batch(0)[0],)),
        mode,
        loss_fn=mse,
        optimizer=BUILDERS[how],
        n_stages=n_stages,
        n_microbatches=M,
    )
    here = [torch.optim.lr_scheduler.StepLR(x, 2, 0.5) for x in pipeline.optimizers]
    pipeline.attach(*here)
    pipeline.load_state_dict(whole, model_only=not moments)
    losses = []
    for step in range(HALF, STEPS):
        losses.append(pipeline.step(*batch(step)).loss)
        for rate in here:
            rate.step()
    assert pipeline.n_steps == (STEPS if moments else STEPS - HALF)
    pipeline.close()
    return losses


@pytest.fixture
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, list[float]]:
    """The files of a plain training after half of its steps, and the other losses."""
    how, tied = request.param
    model, optimizers, rates = plain(how, tied=tied)
    go_on(model, optimizers, rates, range(HALF))
    path = str(tmp_path / "plain.pt")
    rest = [thing.state_dict() for thing in (*optimizers, *rates)]
    torch.save({"model": model.state_dict(), "rest": rest}, path)
    return path, go_on(model, optimizers, rates, range(HALF, STEPS))


CASES = [("adamw", False), ("adamw", True), ("momentum", False), ("two", True)]


@pytest.mark.parametrize(
    ("saved", "how", "tied"), [(c, *c) for c in CASES], indirect=["saved"]
)
def test_moments_go_into_a_pipeline(
    saved: tuple[str, list[float]], how: str, tied: bool
) -> None:
    path, expected = saved
    found = resume(path, how, "ZBV", 2, tied, True)
    assert found == pytest.approx(expected, rel=1e-5)
    without = resume(path, how, "ZBV", 2, tied, False)
    assert without[1:] != pytest.approx(expected[1:], rel=1e-3), "moments matter"


@pytest.mark.dist
@pytest.mark.parametrize("saved", [("adamw", True)], indirect=True)
def test_moments_go_into_the_stages_of_processes(
    pool: Pool, saved: tuple[str, list[float]]
) -> None:
    path, expected = saved
    for found in pool.run(resume, 2, path, "adamw", "ZBH1", None, True, True):
        assert found == pytest.approx(expected, rel=1e-5)


def test_another_optimizer_is_refused() -> None:
    model, optimizers, _ = plain("momentum", tied=False)
    go_on(model, optimizers, [], range(1))
    state = zbpp.checkpoint.plain_state(model, optimizers)
    pipeline = zbpp.Pipeline(
        zbpp.cut(model, "blocks", example=(batch(0)[0],)),
        loss_fn=mse, optimizer=adamw, n_stages=2, n_microbatches=M,
    )  # fmt: skip
    with pytest.raises(zbpp.RequestError, match="is that of SGD, and the optimizer is"):
        pipeline.load_state_dict(state)
