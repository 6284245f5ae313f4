"""Losses that are modules or sums: buffers, modes, parameters, and the whole batch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from pool import Pool
from small import batch, linears, make, refusal
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import zbpp

LossFn = Callable[..., Any]
sgd = partial(torch.optim.SGD, lr=0.1)


def pipeline_of(loss_fn: LossFn, **more: Any) -> zbpp.Pipeline:
    return make(loss_fn=loss_fn, **more)


# Buffers and mode of a module.


class Counting(nn.Module):
    """Counts its calls."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(()), persistent=persistent)

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        self.n.add_(1.0)
        return mse_loss(y, t)


@pytest.mark.parametrize("schedule", ["ZBV", "ZBH1"])
def test_a_replay_changes_buffers_once(schedule: str) -> None:
    loss_fn = Counting(persistent=False)
    how = {"schedule": schedule, "post_validation": True, "clip_grad_norm": 0.01}
    with pipeline_of(loss_fn, **how) as pipeline:
        rollbacks = sum(pipeline.step(*batch()).rollbacks for _ in range(4))
    assert rollbacks == 4
    assert loss_fn.n == 4 * 4


def test_buffers_that_change_and_would_not_be_saved_are_refused() -> None:
    pipeline = pipeline_of(Counting(persistent=True))
    text = refusal(pipeline.step, *batch())
    assert "loss_fn changes its buffer n" in text and "persistent=False" in text
    pipeline = pipeline_of(nn.CrossEntropyLoss(weight=torch.arange(8.0)))
    assert not pipeline.step(batch()[0], torch.arange(8)).skipped


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, y: Tensor, t: Tensor, scale: float = 1.0) -> Tensor:
        assert self.drop.training == self.training
        return mse_loss(self.drop(y), t) * scale


@pytest.mark.parametrize("wrap", [lambda module: module, partial(partial, scale=1.0)])
def test_a_loss_evaluates_in_eval_mode(wrap: Callable[[Any], Any]) -> None:
    module = Dropping()
    pipeline = pipeline_of(wrap(module))
    assert pipeline.evaluate(*batch()) == pipeline.evaluate(*batch())
    assert module.training and module.drop.training


# Parameters that no layer, or only another stage, has.


class Scaled(nn.Module):
    def __init__(self, *, trained: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=trained)

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        return mse_loss(y * self.scale, t)


@pytest.mark.parametrize("wrap", [lambda module: module, partial])
def test_parameters_of_a_loss_are_refused(wrap: Callable[[Any], Any]) -> None:
    text = refusal(pipeline_of, wrap(Scaled()))
    assert "parameters to train (scale)" in text and "the last layer" in text
    assert not pipeline_of(Scaled(trained=False)).step(*batch()).skipped


def test_unregistered_parameters_of_a_loss_are_refused() -> None:
    scale = nn.Parameter(torch.tensor(2.0))

    def loss_fn(y: Tensor, t: Tensor) -> Tensor:
        return mse_loss(y * scale, t)

    text = refusal(pipeline_of(loss_fn).step, *batch())
    assert "parameter of shape ()" in text
    for n_stages in (1, 2):
        text = refusal(
            pipeline_of,
            loss_fn,
            n_stages=n_stages,
            optimizer=lambda parameters: sgd([*parameters, scale]),
        )
        assert "added 1 parameter(s) that no layer of the stage has (of shape" in text


READS = "the loss reads a parameter of shape (8, 8) that the last stage does not have"


def read_the_first_weight(n_stages: int | None) -> str:
    model = linears()
    pipeline = pipeline_of(
        lambda y, t: mse_loss(y @ model[0].weight, t),
        schedule="1F1B",
        model=model,
        n_stages=n_stages,
    )
    try:
        return f"loss {pipeline.step(*batch()).loss}"
    except (RuntimeError, ValueError) as error:
        return str(error)


@pytest.mark.dist
def test_a_loss_that_reads_another_stages_parameter_is_refused(pool: Pool) -> None:
    assert READS in read_the_first_weight(2)
    assert read_the_first_weight(1).startswith("loss ")
    first, second = pool.run(read_the_first_weight, 2, None)
    assert READS in second
    assert "rank 1 failed first" in first and READS in first


# Sums over the batch.

SUM = nn.MSELoss(reduction="sum")
SUMS: dict[str, tuple[LossFn, str | None]] = {
    "module": (SUM, None),
    "partial": (partial(mse_loss, reduction="sum"), None),
    "function": (
        lambda y, t: mse_loss(y, t, reduction="sum"),
        "sum",
    ),
}


def loss_and_norm(x: Tensor, y: Tensor) -> Any:
    """Loss and gradient norm of the sum over the batch."""
    model = linears()
    loss = SUM(model(x), y)
    norm = nn.utils.get_total_norm(torch.autograd.grad(loss, [*model.parameters()]))
    return pytest.approx((loss.item(), norm.item()), rel=1e-5)


@pytest.mark.parametrize("n", [8, 7, 5])
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_the_sum_over_the_batch(name: str, n: int) -> None:
    loss_fn, weigh = SUMS[name]
    pipeline = pipeline_of(loss_fn, weigh=weigh)
    evaluated = pipeline.evaluate(*batch(n))
    result = pipeline.step(*batch(n))
    assert evaluated == pytest.approx(result.loss)
    assert (result.loss, result.grad_norm) == loss_and_norm(*batch(n))


def test_the_norm_of_a_gradient_read_in_pieces_is_exact() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 300), torch.randn(2, 300)  # 90,000 numbers in a gradient
    pipeline = make(linears(2, width=300), n_microbatches=2, optimizer=None)
    found = pipeline.step(x, y).grad_norm
    gradients = [p.grad.double() for _, p in pipeline.named_parameters()]
    assert found == pytest.approx(nn.utils.get_total_norm(gradients).item(), rel=1e-12)


def test_a_summed_loss_over_several_calls_is_the_sum() -> None:
    pipeline = pipeline_of(SUM)
    x, y = batch(9)
    for part in (slice(0, 5), slice(5, 9)):
        pipeline.forward_backward(x[part], y[part], n_calls=2)
    result = pipeline.optim_step()
    assert (result.loss, result.grad_norm) == loss_and_norm(x, y)


def sum_over_replicas() -> tuple[float, float]:
    mesh = zbpp.mesh(stages=2, data_parallel=2)
    pipeline = pipeline_of(SUM, mesh=mesh)
    share = slice(0, 5) if pipeline.place.replica == 0 else slice(5, 9)
    x, y = batch(9)
    result = pipeline.step(x[share], y[share])
    return result.loss, result.grad_norm


@pytest.mark.dist
def test_a_summed_loss_over_replicas_is_the_sum(pool: Pool) -> None:
    for found in pool.run(sum_over_replicas, 4):
        assert found == loss_and_norm(*batch(9))


@pytest.mark.parametrize("post_validation", [False, True])
def test_a_step_whose_loss_is_nan_is_skipped(post_validation: bool) -> None:
    """The second micro-batch has no tokens, and micro-batches weigh by samples."""
    model = linears()
    pipeline = pipeline_of(
        nn.functional.cross_entropy,
        model=model,
        weigh="samples",
        post_validation=post_validation,
    )
    before = [p.clone() for p in model.parameters()]
    labels = torch.arange(8)
    labels[2:4] = -100
    result = pipeline.step(batch()[0], labels)
    pipeline.synchronize()
    assert result.skipped and result.loss != result.loss
    assert all(map(torch.equal, before, model.parameters()))
    assert not pipeline.step(batch()[0], torch.arange(8)).skipped
