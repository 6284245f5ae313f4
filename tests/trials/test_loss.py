"""Losses that are modules, sums, or NaN: buffers, modes, parameters, scale."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from flat import flat_pipeline
from pool import Pool
from small_model import refusal
from torch import Tensor, nn
from torch.nn import functional

import zbpp

LossFn = Callable[..., Any]


def layers(n: int = 4) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(8, 8) for _ in range(n)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def make(loss_fn: LossFn, schedule: str = "ZBH1", **more: Any) -> zbpp.Pipeline:
    settings: dict[str, Any] = {
        "optimizer": sgd,
        "n_stages": 2,
        "n_microbatches": 4,
        "model": layers(),
    } | more
    model = settings.pop("model")
    return flat_pipeline(model, schedule=schedule, loss_fn=loss_fn, **settings)


def batch(n: int = 8) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, n, 8, generator=torch.Generator().manual_seed(0))
    return x, y


class Counting(nn.Module):
    """Counts its calls."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(()), persistent=persistent)

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        self.n.add_(1.0)
        return functional.mse_loss(y, t)


# Buffers and mode of a module.


@pytest.mark.parametrize("schedule", ["ZBV", "ZBH1"])
def test_a_replay_changes_buffers_once(schedule: str) -> None:
    loss_fn = Counting(persistent=False)
    with make(loss_fn, schedule, clip_grad_norm=0.01, post_validation=True) as pipeline:
        rollbacks = sum(pipeline.step(*batch()).rollbacks for _ in range(4))
        pipeline.synchronize()
    assert rollbacks == 4
    assert loss_fn.n == 4 * 4


def test_buffers_that_change_and_would_not_be_saved_are_refused() -> None:
    pipeline = make(Counting(persistent=True))
    text = refusal(pipeline.step, *batch())
    assert "loss_fn changes its buffer n" in text and "persistent=False" in text


def test_constant_buffers_are_no_matter() -> None:
    loss_fn = nn.CrossEntropyLoss(weight=torch.arange(8.0))
    pipeline = make(loss_fn)
    x, _ = batch()
    for _ in range(2):
        assert not pipeline.step(x, torch.arange(8)).skipped


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, y: Tensor, t: Tensor, scale: float = 1.0) -> Tensor:
        assert self.drop.training == self.training
        return functional.mse_loss(self.drop(y), t) * scale


@pytest.mark.parametrize("wrap", [lambda module: module, partial(partial, scale=1.0)])
def test_a_loss_evaluates_in_eval_mode(wrap: Callable[[Any], Any]) -> None:
    module = Dropping()
    pipeline = make(wrap(module))
    assert pipeline.evaluate(*batch()) == pipeline.evaluate(*batch())
    assert module.training and module.drop.training
    module.drop.eval()
    pipeline.evaluate(*batch())
    assert not module.drop.training


# Parameters that no layer has.


class Scaled(nn.Module):
    def __init__(self, *, trained: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=trained)

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        return functional.mse_loss(y * self.scale, t)


@pytest.mark.parametrize("wrap", [lambda module: module, partial])
def test_parameters_of_a_loss_are_refused(wrap: Callable[[Any], Any]) -> None:
    text = refusal(make, wrap(Scaled()))
    assert "parameters to train (scale)" in text and "the last layer" in text
    assert not make(Scaled(trained=False)).step(*batch()).skipped


@pytest.mark.parametrize("n_stages", [1, 2])
def test_an_optimizer_of_other_parameters_is_refused(n_stages: int) -> None:
    scale = nn.Parameter(torch.tensor(2.0))
    text = refusal(
        make,
        lambda y, t: functional.mse_loss(y * scale, t),
        schedule="1F1B",
        n_stages=n_stages,
        optimizer=lambda parameters: sgd([*parameters, scale]),
    )
    assert "added 1 parameter(s) that no layer of the stage has (of shape ())" in text


def read_the_first_weight(n_stages: int | None) -> str:
    model = layers()
    pipeline = make(
        lambda y, t: functional.mse_loss(y @ model[0].weight, t),
        "1F1B",
        model=nn.Sequential(*model),
        n_stages=n_stages,
        timeout_s=60.0,
    )
    try:
        return f"loss {pipeline.step(*batch()).loss}"
    except (RuntimeError, ValueError) as error:
        return str(error)


READS = "the loss reads a parameter of shape (8, 8) that the last stage does not have"


def test_a_loss_that_reads_another_stages_parameter_is_refused() -> None:
    assert READS in read_the_first_weight(2)
    assert "loss" in read_the_first_weight(1)


@pytest.mark.dist
def test_it_is_refused_in_processes(pool: Pool) -> None:
    first, second = pool.run(read_the_first_weight, 2, None)
    assert READS in second
    assert "rank 1 failed first" in first and READS in first


def test_a_loss_that_reads_a_loose_parameter_is_refused() -> None:
    scale = nn.Parameter(torch.tensor(2.0))
    pipeline = make(lambda y, t: functional.mse_loss(y * scale, t))
    assert "parameter of shape ()" in refusal(pipeline.step, *batch())


# Sums.


def sums() -> Iterator[tuple[str, LossFn, dict[str, Any]]]:
    mse = functional.mse_loss
    yield "module", nn.MSELoss(reduction="sum"), {}
    yield "partial", partial(mse, reduction="sum"), {}
    yield "function", lambda y, t: mse(y, t, reduction="sum"), {"weigh": "sum"}


def whole(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Loss and gradient norm of the sum over the batch."""
    model = nn.Sequential(*layers())
    loss = functional.mse_loss(model(x), y, reduction="sum")
    loss.backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    return loss.item(), norm.item()


@pytest.mark.parametrize("n", [8, 7, 3])
@pytest.mark.parametrize("name, loss_fn, more", [*sums()])
def test_a_sum_is_the_sum_over_the_batch(
    name: str, loss_fn: LossFn, more: dict[str, Any], n: int
) -> None:
    pipeline = make(loss_fn, **more)
    loss, norm = whole(*batch(n))
    assert pipeline.evaluate(*batch(n)) == pytest.approx(loss, rel=1e-5)
    result = pipeline.step(*batch(n))
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)


def test_a_sum_over_several_calls() -> None:
    pipeline = make(nn.MSELoss(reduction="sum"))
    x, y = batch()
    for part in (slice(0, 5), slice(5, 8)):
        pipeline.forward_backward(x[part], y[part], n_calls=2)
    result = pipeline.optim_step()
    assert (result.loss, result.grad_norm) == pytest.approx(whole(x, y), rel=1e-5)


def sum_over_replicas() -> tuple[float, float]:
    mesh = zbpp.mesh(stages=2, data_parallel=2)
    pipeline = make(nn.MSELoss(reduction="sum"), mesh=mesh, n_stages=None)
    own = slice(0, 5) if pipeline.place.replica == 0 else slice(5, 8)
    x, y = batch()
    result = pipeline.step(x[own], y[own])
    return result.loss, result.grad_norm


@pytest.mark.dist
def test_a_sum_over_replicas(pool: Pool) -> None:
    for found in pool.run(sum_over_replicas, 4):
        assert found == pytest.approx(whole(*batch()), rel=1e-5)


def test_a_sum_is_weighed_by_nothing_else() -> None:
    text = refusal(make, nn.MSELoss(reduction="sum"), weigh="tokens")
    assert "reduction='sum'" in text and "weigh is 'tokens'" in text
    text = refusal(make, nn.MSELoss(reduction="none"))
    assert "reduction='none'" in text


# A micro-batch in which nothing counts.


def tokens(*, masked: slice) -> tuple[Tensor, Tensor]:
    x, _ = batch()
    labels = torch.arange(8)
    labels[masked] = -100
    return x, labels


@pytest.mark.parametrize("post_validation", [False, True])
@pytest.mark.parametrize(
    ("weigh", "masked", "skipped"),
    [
        ("samples", slice(0, 2), True),
        ("samples", slice(0, 1), False),
        ("tokens", slice(0, 2), False),
        ("tokens", slice(0, 8), True),
    ],
)
def test_a_step_with_the_loss_nan_is_skipped(
    weigh: str, masked: slice, skipped: bool, post_validation: bool
) -> None:
    model = layers()
    pipeline = make(
        functional.cross_entropy,
        model=model,
        weigh=weigh,
        post_validation=post_validation,
    )
    before = [p.clone() for layer in model for p in layer.parameters()]
    result = pipeline.step(*tokens(masked=masked))
    pipeline.synchronize()
    assert result.skipped is skipped
    assert torch.tensor(result.loss).isnan().item() is skipped
    after = [p for layer in model for p in layer.parameters()]
    assert all(map(torch.equal, before, after)) is skipped
    assert not pipeline.step(*tokens(masked=slice(0))).skipped
