"""Random numbers belong to the caller; layers draw the same in every run of a job.

That all modes draw alike is shown by the rows of `test_one_process` with models that
draw.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import Case, make
from pool import Pool

import zbpp

DRAWS = Case(model="draws", clip=0.05)
"""Layers draw from the generators of torch, Python and numpy."""


def losses(seed: int, numbers: int | None = None) -> list[float]:
    """Of steps that change nothing, so that only random numbers differ."""
    case, sgd = replace(DRAWS, seed=numbers), partial(torch.optim.SGD, lr=0.0)
    layers = case.of.layers()
    torch.manual_seed(seed)
    with make(case, model=layers, optimizer=sgd) as pipeline:
        return [pipeline.step(*case.batch(0)).loss for _ in range(4)]


def test_draws_follow_the_callers_generator_or_a_seed() -> None:
    found = losses(0)
    assert found == losses(0) != losses(1)
    assert len(set(found)) == 4, "another one in each step"
    seeded = [losses(i, 5) for i in (0, 1)]
    assert seeded[0] == seeded[1] != found


def replicas_draw() -> list[float]:
    mesh = zbpp.mesh(stages=1, data_parallel=2)
    batch = DRAWS.batch(0)
    with make(DRAWS, mesh=mesh, n_stages=None) as pipeline:
        result = pipeline.step(*batch, return_outputs=True)
        return result.outputs.flatten().tolist()


@pytest.mark.dist
def test_replicas_draw_different_numbers(pool: Pool) -> None:
    first, second = pool.run(replicas_draw, 2)
    assert first != second
