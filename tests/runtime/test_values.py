"""Dicts, masks and changing shapes between chunks: the bits of a plain loop."""

from typing import Any

import masked_model
import pytest
import torch
from masked_model import M, batch, build, cut, loss_fn, train
from pool import Pool
from small_model import adamw, assert_same
from torch import Tensor, nn

MODES = ("1F1B", "ZBH1", "ZBV")


def train_plainly(steps: int = 10) -> tuple[list[float], dict[str, Tensor]]:
    """One process, micro-batch by micro-batch, all clipped as a whole."""
    model = nn.Sequential(*build(range(masked_model.N_LAYERS)))
    optimizer = adamw(list(model.parameters()))
    losses = []
    for step in range(steps):
        inputs, labels = cut(batch(step))
        each = []
        for i in range(M):
            part = {name: x.tensor_split(M)[i] for name, x in inputs.items()}
            each.append(loss_fn(model(part), labels.tensor_split(M)[i]))
            (each[-1] / M).backward()
        losses.append(float(torch.stack(each).detach().double().mean()))
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {f"layers.{n}": p.detach() for n, p in model.named_parameters()}


def clip(model: nn.Sequential) -> None:
    """As the pipeline: squares in float64, layer by layer."""
    layers = [
        torch.stack([p.grad.double().norm().square() for p in layer.parameters()])
        for layer in model
    ]
    norm = float(torch.stack([squares.sum() for squares in layers]).sum().sqrt())
    if norm > 0.5:
        for p in model.parameters():
            p.grad.mul_(0.5 / norm)


@pytest.fixture(scope="module")
def alone() -> masked_model.Found:
    return train("1F1B", 1)


def test_one_stage_is_the_plain_loop(alone: masked_model.Found) -> None:
    losses, parameters = train_plainly()
    assert [loss for loss, _ in alone[0]] == pytest.approx(losses, rel=1e-6)
    for name, value in parameters.items():
        torch.testing.assert_close(alone[1][name], value, rtol=1e-4, atol=1e-5)
    first, parameters = train_plainly(1)
    assert alone[0][0][0] == first[0]  # to the last bit, before anything is clipped


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n_stages", [1, 2, 4])
def test_dicts_of_changing_lengths(
    mode: str, n_stages: int, alone: masked_model.Found
) -> None:
    losses, parameters = train(mode, n_stages)
    assert losses == alone[0]
    assert_same(parameters, alone[1])


@pytest.mark.parametrize("rollback", ["deferred", "snapshot"])
def test_rolled_back_steps(rollback: str, alone: masked_model.Found) -> None:
    losses, parameters = train("ZBV", 2, post_validation=True, rollback=rollback)
    assert losses == alone[0]
    assert_same(parameters, alone[1])
    barrier = train("ZBV", 2, post_validation=False)
    assert barrier[0] == losses


def train_rank(mode: str, more: dict[str, Any]) -> masked_model.Found:
    return train(mode, None, **more)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("mode", "n"),
    [
        ("ZBV", 2),
        ("1F1B", 2),
        ("VPP", 2),
        pytest.param("ZBV", 4, marks=pytest.mark.slow),
        pytest.param("ZBH1", 4, marks=pytest.mark.slow),
    ],
)
def test_dicts_of_changing_lengths_between_processes(
    pool: Pool, mode: str, n: int, alone: masked_model.Found
) -> None:
    parts = pool.run(train_rank, n, mode, {})
    assert all(losses == alone[0] for losses, _ in parts)
    assert_same({k: v for _, part in parts for k, v in part.items()}, alone[1])
