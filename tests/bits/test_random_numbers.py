"""Random numbers belong to the caller; layers draw the same in every run of a job.

That all modes draw alike is shown by the rows of `test_one_process` with models that
draw.
"""

import random
from functools import partial

import pytest
import small
import torch
from cases import Case, make
from pool import Pool
from torch import Tensor, nn

import zbpp

DRAWS = Case(model="draws", clip=0.05)


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


def losses(generator: str, seed: int, numbers: int | None = None) -> list[float]:
    """Of steps that change nothing, so that only random numbers differ."""
    layers = [Draws(generator), nn.Linear(8, 8)]
    nn.init.constant_(layers[1].weight, 0.1)
    nn.init.zeros_(layers[1].bias)
    nn.init.zeros_(layers[0].linear.bias)
    torch.manual_seed(seed)
    pipeline = small.make(
        layers, "1F1B", optimizer=partial(torch.optim.SGD, lr=0.0), seed=numbers
    )
    x = torch.ones(8, 8)
    return [pipeline.step(x, x).loss for _ in range(4)]


@pytest.mark.parametrize("generator", ["torch", "python"])
def test_draws_follow_the_callers_generator_or_a_seed(generator: str) -> None:
    found = losses(generator, 0)
    assert found == losses(generator, 0) != losses(generator, 1)
    assert len(set(found)) == 4, "another one in each step"
    seeded = [losses(generator, i, 5) for i in (0, 1)]
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
