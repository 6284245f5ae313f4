"""Tied weights through clipped, skipped and rolled back steps, and what is refused."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import Pool
from small_model import (
    Block,
    adamw,
    assert_same,
    batch,
    loss_fn,
    make_pipeline,
    refusal,
)
from torch import Tensor, nn

from zbpp.pipeline import Pipeline
from zbpp.runtime.ties.plan import check_ties

N_LAYERS = 6


class Spoiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return dx * ctx.factor, None


class Spoil(nn.Module):
    """Multiplies what goes back through it to the embedding, in chosen steps."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return Spoiled.apply(x, self.factor)


class Model:
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.spoil = Spoil()
        blocks = [Block() for _ in range(N_LAYERS - 3)]
        head = nn.Linear(16, 11, bias=False)
        self.layers = [nn.Embedding(11, 16), self.spoil, *blocks, head]
        head.weight = self.layers[0].weight
        self.layers = [layer.to(dtype) for layer in self.layers]

    def pipeline(self, mode: str, n_stages: int | None, **more: object) -> Pipeline:
        settings = {"model": self.layers, "n_layers": None, "clip_grad_norm": 6.0}
        return make_pipeline(mode, n_stages, **(settings | more))


def copies(pipeline: Pipeline) -> list[Tensor]:
    pipeline.synchronize()
    return [
        tie.parameter
        for executor in pipeline.stages.executors.values()
        for tie in executor.stage.ties.held.values()
    ]


Result = tuple[list[object], dict[str, Tensor], int, Tensor]


def faulty_run(
    mode: str, n_stages: int | None, *, steps: int = 12, **more: object
) -> Result:
    """Random steps: usual ones, large ones (clipped), Inf and NaN ones (skipped)."""
    dice = random.Random(3)
    model = Model(more.pop("dtype", torch.float32))
    kind = dice.choices
    settings = {"max_consecutive_skips": None} | more
    pipeline = model.pipeline(mode, n_stages, **settings)
    results = []
    for step in range(steps):
        factors = [1.0, 1.0, 1.0, 60.0, float("inf"), float("nan")]
        model.spoil.factor = kind(factors)[0] if step else 1.0
        results.append(pipeline.step(*batch(step)))
        if step % 5 == 4:
            own = copies(pipeline)
            assert all(torch.equal(own[0], copy) for copy in own)
    told = [repr((r.loss, r.grad_norm, r.skipped)) for r in results]
    own = copies(pipeline)
    assert all(torch.equal(own[0], copy) for copy in own)
    parameters = {n: p.detach().clone() for n, p in pipeline.named_parameters()}
    rollbacks = sum(result.rollbacks for result in results)
    return told, parameters, rollbacks, (own or [torch.empty(0)])[0].detach().clone()


def test_rolled_back_steps_leave_the_bits_of_a_barrier() -> None:
    told, parameters, _, _ = faulty_run("1F1B", 1, post_validation=False)
    assert any("True" in one for one in told)
    for mode, n_stages in (("ZBH1", 2), ("ZBH1", 4), ("ZBV", 2)):
        ours = faulty_run(mode, n_stages, post_validation=True)
        assert ours[2] > 2
        assert ours[0] == told
        assert_same(ours[1], parameters)


@pytest.mark.dist
def test_rollbacks_in_processes(pool: Pool) -> None:
    told, parameters, _, own = faulty_run("1F1B", 1, post_validation=False)
    first, last = pool.run(faulty_run_in_processes, 2)
    assert first[0] == last[0] == told
    assert first[2] > 2
    assert_same(first[1] | last[1], parameters)
    assert torch.equal(first[3], own) and torch.equal(last[3], own)


def faulty_run_in_processes() -> Result:
    return faulty_run("ZBH1", None, post_validation=True)


def test_the_weights_of_the_first_layer_count_at_the_start() -> None:
    """Copies given by a builder differ before the first step, not after."""
    layers = Model().layers
    other = nn.Linear(16, 11, bias=False)
    untied = [*layers[:-1], other]
    ties = [((0, "weight"), (N_LAYERS - 1, "weight"))]
    build = lambda own: untied[own.start : own.stop]  # noqa: E731
    pipeline = make_pipeline(
        "ZBH1", 2, model=build, n_layers=N_LAYERS, ties=ties, clip_grad_norm=6.0
    )
    assert torch.equal(other.weight, layers[0].weight)
    tied = Model().pipeline("ZBH1", 2)
    for step in range(3):
        ours, its = pipeline.step(*batch(step)), tied.step(*batch(step))
        assert (ours.loss, ours.grad_norm) == (its.loss, its.grad_norm)


def gradients_of(n_stages: int) -> Tensor:
    """Of two steps whose gradients nobody clears, with a write in between."""
    model = Model()
    pipeline = model.pipeline("ZBH1", n_stages, optimizer=None, clip_grad_norm=None)
    pipeline.step(*batch(0))
    with torch.no_grad():
        model.layers[0].weight.mul_(0.5)
    pipeline.step(*batch(1))
    assert model.layers[-1].weight is model.layers[0].weight
    return model.layers[0].weight.grad


def test_gradients_without_an_optimizer_are_those_of_the_plain_model() -> None:
    ours = gradients_of(1)
    assert torch.equal(ours, gradients_of(2))
    assert torch.equal(ours, gradients_of(4))
    model = Model()
    for step in range(2):
        inputs, targets = batch(step)
        loss_fn(nn.Sequential(*model.layers)(inputs), targets).backward()
        with torch.no_grad():
            model.layers[0].weight.mul_(0.5 if step == 0 else 1.0)
    plain = model.layers[0].weight.grad
    assert float((ours - plain).norm() / plain.norm()) < 1e-6


def thaw(n_stages: int) -> Tensor:
    model = Model()
    model.layers[0].weight.requires_grad_(False)
    pipeline = model.pipeline("ZBH1", n_stages)
    before = model.layers[0].weight.clone()
    pipeline.step(*batch(0))
    assert all(torch.equal(before, copy) for copy in copies(pipeline))
    model.layers[0].weight.requires_grad_(True)
    pipeline.step(*batch(1))
    pipeline.synchronize()
    return model.layers[0].weight.detach().clone()


def test_a_frozen_tied_weight_stays_until_it_is_thawed() -> None:
    assert torch.equal(thaw(1), thaw(2))
    assert not torch.equal(thaw(2), Model().layers[0].weight)


def one_by_one(slower: set[int]) -> Callable[[list[nn.Parameter]], Any]:
    calls = []

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        calls.append(1)
        return torch.optim.AdamW(parameters, lr=1e-3 if len(calls) in slower else 1e-2)

    return make


def test_unequal_options_are_refused() -> None:
    message = refusal(Model().pipeline, "ZBH1", 2, optimizer=one_by_one({2}))
    assert "layers.0.weight = layers.5.weight must be stepped alike" in message
    assert "0.001" in message and "0.01" in message
    Model().pipeline("ZBH1", 2, optimizer=one_by_one(set()))


def test_options_that_become_unequal_are_noticed() -> None:
    pipeline = Model().pipeline("ZBH1", 2, post_validation=False)
    pipeline.step(*batch(0))
    pipeline.optimizers[1].param_groups[0]["lr"] = 1e-3
    pipeline.step(*batch(1))
    assert "no longer equal" in refusal(pipeline.step, *batch(2))


@pytest.mark.parametrize("n_stages", [1, 2])
def test_sparse_gradients_are_refused(n_stages: int) -> None:
    layers = Model().layers
    sparse = nn.Embedding(11, 16, sparse=True)
    layers[-1].weight = sparse.weight
    pipeline = make_pipeline(
        "1F1B",
        n_stages,
        model=[sparse, *layers[1:]],
        n_layers=None,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
    )
    assert "sparse=False" in refusal(pipeline.step, *batch(0))


def test_ties_that_make_no_sense_are_refused() -> None:
    for tie in ([(0, "a")], [(0, "a"), (0, "b")]):
        assert "two layers or more" in refusal(check_ties, [tie], 4)
    twice = [[(0, "a"), (1, "a")], [(1, "a"), (2, "a")]]
    assert "in no other tie" in refusal(check_ties, twice, 4)
    assert "4 layers, 0 to 3" in refusal(check_ties, [[(0, "a"), (4, "a")]], 4)
    wrong = [((0, "weight"), (2, "nothing"))]
    message = refusal(make_pipeline, "1F1B", 2, ties=wrong, optimizer=adamw)
    assert "layer 2 has no parameter nothing" in message
