"""Batches of wrong sizes are refused with the numbers; others work as in a loop."""

import pytest
import torch
from pool import Pool
from small_model import batch, make_pipeline, refusal
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from zbpp.pipeline import Pipeline

BOTH = "inputs has 12 samples and targets 6"


def tolerant(outputs: Tensor, targets: Tensor) -> Tensor:
    """Take targets of any number, as losses that broadcast do."""
    return outputs.mean() + targets.float().mean()


def misfit(schedule: str, n_stages: int | None, call: str) -> str:
    pipeline = make_pipeline(schedule, n_stages, loss_fn=tolerant)
    inputs, targets = batch(0)
    message = refusal(getattr(pipeline, call), inputs, targets[:6])
    getattr(pipeline, call)(inputs, targets)  # it harms nothing
    return message


@pytest.mark.parametrize("call", ["step", "evaluate"])
@pytest.mark.parametrize("schedule", ["1F1B", "ZBV"])
def test_targets_of_another_number(schedule: str, call: str) -> None:
    assert BOTH in misfit(schedule, 2, call)


@pytest.mark.dist
@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_targets_of_another_number_in_another_process(pool: Pool, call: str) -> None:
    for message in pool.run(misfit, 2, "1F1B", None, call):
        assert BOTH in message


def misfit_later() -> str:
    pipeline = make_pipeline("1F1B", None)
    inputs, targets = batch(0)
    pipeline.step(inputs, targets)
    try:
        pipeline.step(inputs, targets[:6])
    except (ValueError, RuntimeError) as error:
        pipeline.__exit__(type(error), error, None)
        return str(error)
    return "nothing"


@pytest.mark.dist
def test_targets_of_another_number_in_a_later_step(pool: Pool) -> None:
    for message in pool.run(misfit_later, 2):
        assert BOTH in message


def test_a_list_of_micro_batches_of_several_sizes() -> None:
    pipeline = make_pipeline("ZBH1", 2)
    uneven = [x.split([3, 1, 2, 2, 2, 2]) for x in batch(0)]
    pipeline.step(*map(list, uneven))
    pipeline = make_pipeline("ZBH1", 2)
    even = [list(x.split(2)) for x in batch(0)]
    assert pipeline.step(*even).loss == make_pipeline("1F1B", 1).step(*batch(0)).loss
    pipeline.evaluate(*map(list, uneven))


def test_a_tuple_of_tensors_of_several_numbers() -> None:
    pipeline = make_pipeline("ZBH1", 2)
    inputs, targets = batch(0)
    message = refusal(pipeline.step, (inputs, inputs[:6]), targets)
    assert "inputs is a tuple of tensors of [12, 6] samples" in message


def test_lists_may_hold_targets_of_their_own_shape() -> None:
    """One target for each token: a list says what belongs together."""
    inputs, targets = batch(0)
    flat = [part.flatten() for part in targets.split(2)]
    pipeline = make_pipeline("ZBH1", 2)
    pipeline.step(inputs, flat)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul_(2.0))


@pytest.mark.parametrize("schedule", ["1F1B", "FThenB", "ZBH1"])
def test_a_layer_that_works_in_place_on_its_micro_batch(schedule: str) -> None:
    torch.manual_seed(0)
    layers = [InPlace(), nn.Linear(4, 4)]
    data, targets = torch.randn(8, 4), torch.randn(8, 4)
    expected = []
    for x, y in zip(data.clone().split(2), targets.split(2), strict=True):
        loss = mse_loss(layers[1](layers[0](x)), y) / 4
        loss.backward()
        expected.append(loss.item())
    gradients = [p.grad.clone() for m in layers for p in m.parameters()]
    for layer in layers:
        layer.zero_grad()
    pipeline = Pipeline(
        layers, loss_fn=mse_loss, optimizer=None, schedule=schedule, n_stages=2,
        n_microbatches=4,
    )  # fmt: skip
    assert pipeline.step(data, targets).loss == pytest.approx(sum(expected))
    for p, gradient in zip(
        (p for m in layers for p in m.parameters()), gradients, strict=True
    ):
        assert torch.equal(p.grad, gradient)
