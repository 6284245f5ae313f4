"""A pipeline measures its layers first, and then trains as if it had not."""

from functools import partial

import pytest
import torch
from pool import Pool
from small_model import (
    N_LAYERS,
    Block,
    assert_same,
    batch,
    build,
    make_pipeline,
    refusal,
)
from torch import Tensor, nn


class WithBatchNorm(Block):
    """A block with buffers that every forward changes, and dropout."""

    def __init__(self) -> None:
        super().__init__(dropout=0.2)
        self.batch_norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.batch_norm(super().forward(x))


def unseeded(layers: range) -> list[nn.Module]:
    """Layers whose weights come from the generator as it stands."""
    return [
        nn.Embedding(11, 16)
        if index == 0
        else nn.Linear(16, 11)
        if index == N_LAYERS - 1
        else WithBatchNorm()
        for index in layers
    ]


Outcome = tuple[list[float], dict[str, Tensor], dict[str, Tensor]]


def train(n_stages: int | None, **settings: object) -> Outcome:
    torch.manual_seed(5)
    pipeline = make_pipeline(n_stages=n_stages, **settings)
    losses = [pipeline.step(*batch(step)).loss for step in range(4)]
    parameters = {n: p.detach().clone() for n, p in pipeline.named_parameters()}
    buffers = {
        f"{name}.{n}": b.clone()
        for name, layer in pipeline.named_layers()
        for n, b in layer.named_buffers()
    }
    pipeline.close()
    return losses, parameters, buffers


def listed() -> list[nn.Module]:
    torch.manual_seed(5)
    return unseeded(range(N_LAYERS))


def same(one: Outcome, other: Outcome) -> None:
    assert one[0] == other[0]
    for mine, theirs in zip(one[1:], other[1:], strict=True):
        assert_same(mine, theirs)


@pytest.mark.parametrize("mode", [pytest.param("auto", marks=pytest.mark.slow), "ZBV"])
def test_training_is_as_without_measuring(mode: str) -> None:
    settings = {"mode": mode, "seed": 3, "split": "balanced", "watch": False}
    measured = train(2, model=listed(), example=batch(0), **settings)
    plain = train(2, mode="ZBH1", model=listed(), seed=3)
    same(measured, plain)


@pytest.mark.slow
def test_a_builder_draws_the_weights_that_it_would_have_drawn() -> None:
    settings = {"model": unseeded, "seed": 3, "split": [2] * 3 + [3]}
    measured = train(4, mode="ZBH1", example=batch(0), **settings)
    same(measured, train(4, mode="ZBH1", **settings))


def heavy_head(layers: range) -> list[nn.Module]:
    built = build(layers)
    if layers[-1] == N_LAYERS - 1:
        wide = nn.Linear(16, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 11)
        built[-1] = nn.Sequential(*wide)
    return built


@pytest.mark.slow
def test_a_heavy_head_gets_a_stage_of_its_own() -> None:
    pipeline = make_pipeline("ZBH1", 3, model=heavy_head, example=batch(0))
    assert [len(layers) for layers in pipeline.split][-1] == 1
    even = make_pipeline("ZBH1", 3, model=heavy_head)
    assert [len(layers) for layers in even.split] == [3, 3, 3]


@pytest.mark.slow
def test_the_limit_holds_for_what_is_estimated_in_bytes() -> None:
    assert "the smallest limit that works" in refusal(
        partial(make_pipeline, "auto", 2, example=batch(0), memory_limit="20KiB")
    )
    pipeline = make_pipeline("auto", 2, example=batch(0), memory_limit="1GiB")
    assert sum(pipeline.schedule.split) == N_LAYERS


def test_an_example_must_be_a_pair() -> None:
    text = refusal(partial(make_pipeline, "auto", 2, example=batch(0)[0]))
    assert "give (inputs, targets) of one step" in text


def train_in_processes() -> Outcome:
    torch.set_num_threads(1)
    return train(
        None, mode="auto", model=listed(), example=batch(0), seed=3, watch=False
    )


@pytest.mark.slow
@pytest.mark.dist
def test_in_two_processes(pool: Pool) -> None:
    ranks = pool.run(train_in_processes, 2)
    joined = ranks[0][0], *(ranks[0][i] | ranks[1][i] for i in (1, 2))
    same(joined, train(1, mode="ZBH1", model=listed(), seed=3))
