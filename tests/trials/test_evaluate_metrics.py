"""The metrics of an evaluation are those of the whole batch, as its loss is."""

from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

import zbpp

X, Y = torch.randn((2, 8, 6), generator=torch.Generator().manual_seed(0))


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))


def loss_fn(outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return nn.functional.mse_loss(outputs, targets), {
        "mae": (outputs - targets).abs().mean().detach()
    }


def evaluations(mode: str, n_stages: int | None, m: int) -> list[Any]:
    """Of batches of several sizes, before the first step and after it."""
    pipeline = zbpp.Pipeline(
        layers(),
        mode,
        loss_fn=loss_fn,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.0),
        n_stages=n_stages,
        n_microbatches=m,
    )
    found: list[Any] = []
    for n in (8, 3):
        metrics: dict[str, float] = {}
        found.append((pipeline.evaluate(X[:n], Y[:n], metrics=metrics), metrics))
        result = pipeline.step(X[:n], Y[:n])
        found.append((result.loss, result.metrics))
    assert isinstance(pipeline.evaluate(X, Y), float)
    pipeline.close()
    return found


def expected() -> list[Any]:
    found = []
    with torch.no_grad():
        for n in (8, 3):
            loss, metrics = loss_fn(layers()(X[:n]), Y[:n])
            found += [(loss.item(), {"mae": metrics["mae"].item()})] * 2
    return found


@pytest.mark.parametrize("m", [1, 4, 8])
@pytest.mark.parametrize("mode", ["1F1B", "ZBV"])
def test_they_are_the_same_for_any_number_of_micro_batches(mode: str, m: int) -> None:
    torch.testing.assert_close(evaluations(mode, 2, m), expected())


@pytest.mark.dist
def test_the_last_rank_has_them(pool: Pool) -> None:
    first, last = pool.run(evaluations, 2, "ZBH1", None, 4)
    torch.testing.assert_close(last, expected())
    torch.testing.assert_close(first, [(loss, {}) for loss, _ in expected()])


def test_a_loss_without_metrics_has_none() -> None:
    pipeline = zbpp.Pipeline(
        layers(), "ZBH1", loss_fn=nn.functional.mse_loss,
        optimizer=None, n_stages=2, n_microbatches=2,
    )  # fmt: skip
    metrics: dict[str, float] = {}
    pipeline.evaluate(X, Y, metrics=metrics)
    assert metrics == {}
