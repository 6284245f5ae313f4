"""Batches of wrong sizes are refused with the numbers; others work as in a loop."""

from collections import OrderedDict, UserDict
from functools import partial

import pytest
import torch
from pool import Pool
from small_model import N_LAYERS, batch, build, loss_fn, make_pipeline, refusal
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from zbpp.pipeline import Pipeline
from zbpp.runtime.microbatches import merge, split_inputs, split_targets
from zbpp.runtime.values import as_value

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


def test_dicts_and_nested_containers_are_cut() -> None:
    whole = {
        "ids": torch.arange(7),
        "both": (torch.ones(7, 2), [torch.zeros(7), None]),
        "rate": 0.5,
        "scale": torch.tensor(2.0),
    }
    pieces = split_targets(whole, 3)
    assert [len(piece["ids"]) for piece in pieces] == [3, 2, 2]
    assert all(piece["rate"] == 0.5 for piece in pieces)
    assert all(piece["scale"] is whole["scale"] for piece in pieces)
    assert [len(piece["both"][1][0]) for piece in pieces] == [3, 2, 2]
    joined = merge(pieces)
    assert torch.equal(joined["ids"], whole["ids"]) and joined["both"][1][1] is None
    assert len(split_inputs({"x": torch.ones(6)}, 7)) == 6
    assert "no samples" in refusal(split_inputs, {"x": torch.ones(0)}, 7)
    assert "without tensors of samples" in refusal(split_inputs, {"x": 1}, 2)
    assert "without tensors of samples" in refusal(split_inputs, (torch.tensor(1),), 2)


def test_dicts_of_tokenizers_are_dicts() -> None:
    class Encoding(UserDict[str, Tensor]):
        """As `transformers.BatchEncoding` is."""

    for kind in (Encoding, OrderedDict):
        given = kind({"ids": torch.arange(4), "mask": torch.ones(4)})
        for piece in (*split_inputs(given, 2), *split_inputs([given] * 2, 2)):
            assert sorted(as_value(piece)) == ["ids", "mask"]


def predict(n_stages: int | None, everywhere: bool) -> tuple[bool, Tensor | None]:
    pipeline = make_pipeline(
        "1F1B", n_stages, model=partial(build, dropout=0.5), seed=1
    )
    inputs, targets = batch(0, samples=8)
    pipeline.step(inputs, targets)
    loss = pipeline.evaluate(inputs, targets)
    found = pipeline.predict(inputs, everywhere=everywhere)
    assert pipeline.evaluate(inputs, targets) == loss
    pipeline.step(inputs, targets)
    return pipeline.needs_targets, found


def test_predictions_are_the_outputs_of_the_whole_batch() -> None:
    pipeline = make_pipeline("ZBV", 2)
    inputs, targets = batch(0, samples=7)
    expected = inputs
    for _, layer in sorted(pipeline.named_layers()):
        expected = layer(expected)
    found = pipeline.predict(inputs)
    assert not found.requires_grad
    torch.testing.assert_close(found, expected)
    loss = pipeline.evaluate(inputs, targets)
    assert float(loss_fn(found, targets)) == pytest.approx(loss, rel=1e-6)
    parts = [inputs[:2], inputs[2:4, :3], inputs[4:]]
    ragged = pipeline.predict(parts, n_microbatches=3)
    assert [part.shape for part in ragged] == [(2, 5, 11), (2, 3, 11), (3, 5, 11)]


@pytest.mark.dist
def test_predictions_are_where_the_last_chunk_is_or_everywhere(pool: Pool) -> None:
    _, expected = predict(2, False)
    assert expected is not None and expected.shape == (8, 5, 11)
    for is_last, found in pool.run(predict, 2, None, False):
        assert (found is not None) == is_last
        assert found is None or torch.equal(found, expected)
    for _, found in pool.run(predict, 2, None, True):
        assert torch.equal(found, expected)


def test_losses_of_the_micro_batches() -> None:
    inputs, targets = batch(0)
    result = make_pipeline("ZBV", 2).step(inputs, targets)
    plain = nn.Sequential(*build(range(N_LAYERS)))
    with torch.no_grad():
        pairs = zip(inputs.split(2), targets.split(2), strict=True)
        assert result.losses == tuple(float(loss_fn(plain(x), t)) for x, t in pairs)
