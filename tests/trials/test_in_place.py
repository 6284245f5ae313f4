"""Layers that write to what they are called with: the plain loop's bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import zbpp

M = 4


class Writes(nn.Module):
    """Writes in place, then computes."""

    def __init__(self, write: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        self.write(x)
        return self.linear(x)


class Adds(nn.Module):
    """Adds to an auxiliary loss and to a counter that the first layer begins."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.index = index

    def forward(self, value: Any) -> dict[str, Tensor]:
        if self.index == 0:
            zeros = torch.zeros(()), torch.zeros((), dtype=torch.int64)
            value = {"x": value, "aux": zeros[0], "count": zeros[1]}
        value["aux"] += value["x"].pow(2).mean()
        value["count"] += 1
        value["x"] = self.linear(value["x"])
        return value


class Late(nn.Module):
    """Does not write to its input before the third forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.linear(x.add_(1.0) if self.count > 2 else x)


def slice_(x: Tensor) -> None:
    x[..., :4] += 1.0


WRITES: dict[str, Callable[[Tensor], object]] = {
    "add": lambda x: x.add_(1.0),
    "multiply": lambda x: x.mul_(1.5),
    "relu": torch.relu_,
    "slice": slice_,
}
NAMES = [*WRITES, "aux"]


def make(name: str) -> list[nn.Module]:
    torch.manual_seed(0)
    if name == "aux":
        return [Adds(i) for i in range(4)]
    return [nn.Linear(8, 8), *(Writes(WRITES[name]) for _ in range(3))]


def loss_fn(outputs: Any, targets: Tensor) -> Tensor:
    if isinstance(outputs, dict):
        return mse_loss(outputs["x"], targets) + 0.1 * outputs["aux"] / outputs["count"]
    return mse_loss(outputs, targets)


def batch(step: int) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(step))
    return x, y


Trained = tuple[list[float], dict[str, Tensor]]


def plain(name: str) -> Trained:
    model = nn.Sequential(*make(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        x, y = batch(step)
        total = 0.0
        for part, targets in zip(x.clone().chunk(M), y.chunk(M), strict=True):
            loss = loss_fn(model(part), targets)
            (loss / M).backward()
            total += loss.item() / M
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    parameters = {f"layers.{k}": p.detach() for k, p in model.named_parameters()}
    return losses, parameters


def train(name: str, mode: str, n_stages: int | None, recompute: str) -> Trained:
    layers = make(name)
    plan = zbpp.plan_model(
        layers, mode, loss_fn=loss_fn, optimizer=torch.optim.SGD,
        n_stages=n_stages, n_microbatches=M, recompute=recompute,
    )  # fmt: skip
    pipeline = zbpp.Pipeline(
        layers, plan, loss_fn=loss_fn, n_microbatches=M,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        execution=zbpp.Execution(timeout_s=60.0),
    )  # fmt: skip
    losses = [pipeline.step(*batch(step)).loss for step in range(2)]
    parameters = {k: p.detach().clone() for k, p in pipeline.named_parameters()}
    pipeline.close()
    return losses, parameters


def check(found: Trained, expected: Trained) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    for name, p in found[1].items():
        torch.testing.assert_close(p, expected[1][name])


@pytest.mark.parametrize(
    ("mode", "n_stages", "recompute"),
    [("1F1B", 4, "none"), ("ZBH1", 2, "none"), ("ZBV", 2, "all")],
)
@pytest.mark.parametrize("name", NAMES)
def test_layers_may_write_to_their_input(
    name: str, mode: str, n_stages: int, recompute: str
) -> None:
    check(train(name, mode, n_stages, recompute), plain(name))


def train_all(mode: str) -> list[Trained]:
    return [train(name, mode, None, "none") for name in NAMES]


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["1F1B", "ZBV"])
def test_so_they_may_between_processes(pool: Pool, mode: str) -> None:
    for found in pool.run(train_all, 2, mode):
        for name, of_name in zip(NAMES, found, strict=True):
            check(of_name, plain(name))


def test_a_first_write_that_comes_late_is_refused_with_a_way_out() -> None:
    layers = [nn.Linear(8, 8), Late()]
    pipeline = zbpp.Pipeline(
        layers, "1F1B", loss_fn=mse_loss, optimizer=None, n_stages=2, n_microbatches=M
    )
    with pytest.raises(RuntimeError, match="in-place") as info:
        pipeline.step(*batch(0))
    notes = "".join(info.value.__notes__)
    assert "layers.1 (layer 1)" in notes and "let it write to x.clone()" in notes
