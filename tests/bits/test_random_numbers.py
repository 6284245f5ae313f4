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

import zbpp

DRAWS = Case(model="draws", clip=0.05)


def states() -> tuple[Any, ...]:
    numpys = importlib.import_module("numpy.random").get_state()
    parts = torch.get_rng_state().tolist(), random.getstate(), numpys[1].tolist()
    return *parts, numpys[2:]


def states_move(mode: str, more: dict[str, Any]) -> list[int]:
    """Calls of a pipeline after which the generators have other states than before."""
    case = Case(model="draws", clip=0.05, mode=mode, **more)
    importlib.import_module("numpy.random").standard_normal()  # a second one is kept
    with make(case) as pipeline:
        batch = case.batch(0)
        calls: list[Any] = [
            *[lambda: pipeline.step(*batch)] * 3,
            lambda: pipeline.evaluate(*batch),
            lambda: pipeline.predict(batch[0]),
            lambda: pipeline.forward_backward(*batch, n_calls=1),
            pipeline.optim_step,
            pipeline.close,
        ]
        before, found = states(), []
        for i, call in enumerate(calls):
            call()
            found += [i] if states() != before else []
        return found


@pytest.mark.dist
@pytest.mark.parametrize(
    "more",
    [{}, {"seed": None}, {"recompute": "all"}, {"post_validation": True}],
    ids=str,
)
@pytest.mark.parametrize("mode", ["1F1B", "ZBV"])
def test_calls_leave_the_generators_as_they_were(
    pool: Pool, mode: str, more: dict[str, Any]
) -> None:
    """So that all ranks shuffle alike, and shuffle as one process does."""
    assert states_move(mode, more) == []
    assert pool.run(states_move, 2, mode, more) == [[], []]


class Draws(nn.Module):
    """Draws from a generator."""

    def __init__(self, generator: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        nn.init.constant_(self.linear.weight, 0.1)
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.generator == "torch":
            return nn.functional.dropout(x, 0.3)
        return x * random.random()


def losses(
    generator: str, seed: int, numerics: zbpp.Numerics | None = None
) -> list[float]:
    """Of steps that change nothing, so that only random numbers differ."""
    layers = [Draws(generator), nn.Linear(8, 8)]
    nn.init.constant_(layers[1].weight, 0.1)
    nn.init.zeros_(layers[1].bias)
    nn.init.zeros_(layers[0].linear.bias)
    torch.manual_seed(seed)
    pipeline = zbpp.Pipeline(
        layers, "1F1B", n_stages=2, n_microbatches=4, loss_fn=mse_loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
        numerics=numerics or zbpp.Numerics(),
    )  # fmt: skip
    x = torch.ones(8, 8)
    return [pipeline.step(x, x).loss for _ in range(4)]


@pytest.mark.parametrize("generator", ["torch", "python"])
def test_draws_follow_the_callers_generator_or_a_seed(generator: str) -> None:
    found, seed = losses(generator, 0), zbpp.Numerics(seed=5)
    assert found == losses(generator, 0) != losses(generator, 1)
    assert len(set(found)) == 4, "another one in each step"
    seeded = [losses(generator, i, numerics=seed) for i in (0, 1)]
    assert seeded[0] == seeded[1] != found


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
