"""Random numbers belong to the caller; layers draw the same in every run of a job.

That all modes draw alike is shown by the rows of `test_one_process` with models that
draw.
"""

import importlib
import random
from typing import Any

import pytest
import torch
from cases import Case, make
from pool import Pool
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import zbpp

DRAWS = Case(model="draws", clip=0.05)


def states() -> tuple[Any, ...]:
    numpys = importlib.import_module("numpy.random").get_state()
    parts = torch.get_rng_state().tolist(), random.getstate(), numpys[1].tolist()
    return *parts, numpys[2:]


@pytest.mark.parametrize(
    "more",
    [{}, {"seed": None}, {"recompute": "all"}, {"post_validation": True}],
    ids=str,
)
@pytest.mark.parametrize("mode", ["1F1B", "ZBV"])
def test_steps_leave_the_generators_as_they_were(
    mode: str, more: dict[str, Any]
) -> None:
    case = Case(model="draws", clip=0.05, mode=mode, **more)
    pipeline = make(case)
    importlib.import_module("numpy.random").standard_normal()  # a second one is kept
    batch = case.batch(0)
    before = states()
    for step in range(3):
        pipeline.step(*batch)
        assert states() == before, step
    pipeline.evaluate(*batch)
    pipeline.predict(batch[0])
    pipeline.forward_backward(*batch, n_calls=1)
    pipeline.optim_step()
    pipeline.close()
    assert states() == before


class Draws(nn.Module):
    """Draws from a generator, from some forward on."""

    def __init__(self, generator: str, since: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        nn.init.constant_(self.linear.weight, 0.1)
        self.generator, self.since, self.n = generator, since, 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        x = self.linear(x)
        if self.n <= self.since:
            return x
        if self.generator == "torch":
            return nn.functional.dropout(x, 0.3)
        return x * random.random()


def losses(generator: str, seed: int, since: int = 0) -> list[float]:
    """Of steps that change nothing, so that only random numbers differ."""
    layers = [Draws(generator, since), nn.Linear(8, 8)]
    nn.init.constant_(layers[1].weight, 0.1)
    nn.init.zeros_(layers[1].bias)
    nn.init.zeros_(layers[0].linear.bias)
    torch.manual_seed(seed)
    pipeline = zbpp.Pipeline(
        layers, "1F1B", n_stages=2, n_microbatches=4, loss_fn=mse_loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
    )  # fmt: skip
    x = torch.ones(8, 8)
    return [pipeline.step(x, x).loss for _ in range(4)]


@pytest.mark.parametrize("generator", ["torch", "python"])
def test_draws_follow_the_callers_generator_and_each_step(generator: str) -> None:
    assert losses(generator, 0) == losses(generator, 0) != losses(generator, 1)
    assert len(set(losses(generator, 0))) == 4


def test_a_layer_that_draws_late_draws_other_numbers_in_every_step() -> None:
    found = losses("python", 0, since=8)
    assert found[0] == found[1] and len(set(found[1:])) == 3


def replicas_draw() -> list[float]:
    mesh = zbpp.mesh(stages=1, data_parallel=2)
    batch = DRAWS.batch(0)
    with make(DRAWS, mesh=mesh, n_stages=None) as pipeline:
        result = pipeline.step(*batch, return_outputs=True)
        return result.outputs.flatten().tolist()


@pytest.mark.dist
def test_replicas_draw_other_numbers(pool: Pool) -> None:
    first, second = pool.run(replicas_draw, 2)
    assert first != second


def shuffled(mode: str, rate: float, seed: int | None, n_stages: int | None) -> float:
    """The last loss of some epochs of the plainest loader there is."""
    torch.manual_seed(0)
    data = torch.randn(64, 8)
    layers = [
        nn.Sequential(nn.Linear(8, 8), nn.Dropout(rate)),
        *(nn.Linear(8, 8) for _ in range(3)),
    ]
    pipeline = zbpp.Pipeline(
        layers,
        mode,
        loss_fn=mse_loss,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.01),
        n_stages=n_stages,
        n_microbatches=4,
        numerics=zbpp.Numerics(seed=seed),
    )
    loader = DataLoader(TensorDataset(data, data), 16, shuffle=True)
    for _ in range(3):
        for inputs, targets in loader:
            loss = pipeline.step(inputs, targets).loss
    pipeline.close()
    return loss


def shuffled_in_turn(rows: list[tuple[Any, ...]]) -> list[float]:
    return [shuffled(*row, None) for row in rows]


@pytest.mark.dist
def test_a_shuffled_loader_reads_alike_on_all_ranks(pool: Pool) -> None:
    rows = [("ZBH1", 0.1, None), ("1F1B", 0.1, 1)]
    expected = [shuffled(*row, 2) for row in rows]
    assert pool.run(shuffled_in_turn, 2, rows) == [expected] * 2


def test_a_seed_changes_no_data() -> None:
    assert shuffled("1F1B", 0.0, None, 1) == shuffled("ZBH1", 0.0, 5, 2)
    assert shuffled("1F1B", 0.1, None, 1) != shuffled("1F1B", 0.1, 5, 1)
