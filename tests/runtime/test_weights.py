"""Uneven micro-batches and tokens that do not count: the loss of the whole batch."""

import math
from collections.abc import Callable
from typing import Any

import masked_model
import pytest
import torch
from flat import flat_pipeline
from masked_model import IGNORED, N_LAYERS, M, build, cut
from pool import Pool
from small_model import assert_same, refusal
from torch import Tensor, nn

from zbpp.pipeline import Pipeline
from zbpp.runtime.microbatches import count_samples


def loss_fn(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    logits = outputs["logits"].flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED)


def sample_loss(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    """A mean over samples, each with the sum over its tokens."""
    flat, kind = outputs["logits"].flatten(0, 1), "sum"
    total = nn.functional.cross_entropy(flat, labels.flatten(), reduction=kind)
    return total / len(labels)


def tokens(labels: Tensor) -> float:
    return float((labels != IGNORED).sum())


LOSSES: dict[str, tuple[Any, Callable[[Any], float]]] = {
    "samples": (sample_loss, count_samples),
    "tokens": (loss_fn, tokens),
}


def make(mode: str, n_stages: int | None, weigh: Any, **more: Any) -> Pipeline:
    settings = {"optimizer": None, "loss_fn": LOSSES.get(weigh, (loss_fn,))[0]} | more
    return flat_pipeline(
        build, n_layers=N_LAYERS, schedule=mode, n_stages=n_stages, weigh=weigh,
        n_microbatches=M, **settings,
    )  # fmt: skip


def batch(step: int, samples: int = 11) -> tuple[dict[str, Tensor], Tensor]:
    return cut(masked_model.batch(step, samples))


Found = tuple[float, tuple[float, ...], dict[str, Tensor]]


def ours(mode: str, n_stages: int | None, weigh: Any) -> Found:
    """Loss, losses and gradients of one step."""
    pipeline = make(mode, n_stages, weigh)
    result = pipeline.step(*batch(0))
    loss, losses = result.loss, result.losses
    assert pipeline.evaluate(*batch(0)) == loss
    named = {n: p.grad.clone() for n, p in pipeline.named_parameters()}
    pipeline.close()
    return loss, losses, named


def plain(weigh: str, m: int = M) -> Found:
    """The same in plain torch: every micro-batch by its share."""
    model = nn.Sequential(*build(range(N_LAYERS)))
    inputs, labels = batch(0)
    one_loss, count = LOSSES[weigh]
    targets = labels.tensor_split(m)
    total = sum(map(count, targets))
    losses = []
    for i, target in enumerate(targets):
        part = {name: x.tensor_split(m)[i] for name, x in inputs.items()}
        losses.append(one_loss(model(part), target))
        (losses[-1] * (count(target) / total)).backward()
    values = torch.stack(losses).detach().double()
    weights = torch.tensor([count(t) for t in targets], dtype=torch.float64)
    mean = float((values * weights).sum() / weights.sum())
    named = {f"layers.{n}": p.grad for n, p in model.named_parameters()}
    return mean, tuple(values.tolist()), named


@pytest.mark.parametrize("weigh", LOSSES)
@pytest.mark.parametrize(("mode", "n"), [("1F1B", 1), ("ZBH1", 2)])
def test_micro_batches_by_their_weights(weigh: str, mode: str, n: int) -> None:
    found, same, whole = ours(mode, n, weigh), plain(weigh), plain(weigh, 1)
    assert found[:2] == same[:2]
    assert_same(found[2], same[2])
    assert found[0] == pytest.approx(whole[0], rel=1e-6)
    for name, gradient in whole[2].items():
        torch.testing.assert_close(found[2][name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.dist
@pytest.mark.parametrize("weigh", LOSSES)
def test_weights_between_processes(pool: Pool, weigh: str) -> None:
    same = plain(weigh)
    parts = pool.run(ours, 2, "ZBH1", None, weigh)
    assert [part[:2] for part in parts] == [same[:2]] * 2
    assert_same({k: v for part in parts for k, v in part[2].items()}, same[2])


def test_weights_may_be_any_function() -> None:
    function = ours("ZBH1", 2, tokens)
    by_name = ours("ZBH1", 2, "tokens")
    assert function[:2] == by_name[:2]
    assert_same(function[2], by_name[2])


def test_a_micro_batch_without_tokens() -> None:
    """It has no mean: in plain torch it would be NaN."""
    inputs, labels = batch(0, samples=M)
    labels[1] = IGNORED
    pipeline = make("ZBV", 2, "tokens")
    result = pipeline.step(inputs, labels)
    assert result.losses[1] == 0.0 and math.isfinite(result.loss)
    assert pipeline.evaluate(inputs, labels) == result.loss
    others = [0, 2, 3]
    three = flat_pipeline(
        build, n_layers=N_LAYERS, schedule="ZBV", n_stages=2, n_microbatches=3,
        loss_fn=loss_fn, optimizer=None, weigh="tokens",
    )  # fmt: skip
    rest = {name: x[others] for name, x in inputs.items()}
    assert three.step(rest, labels[others]).loss == result.loss
    expected = dict(three.named_parameters())
    for name, p in pipeline.named_parameters():
        assert torch.equal(p.grad, expected[name].grad), name


def test_a_batch_without_tokens_moves_nothing() -> None:
    inputs, labels = batch(0, samples=M)
    pipeline = make("ZBV", 2, "tokens")
    result = pipeline.step(inputs, labels.fill_(IGNORED))
    assert math.isnan(result.loss) and result.grad_norm == 0.0
    assert all(not p.grad.any() for _, p in pipeline.named_parameters())


def test_wrong_weights_are_refused() -> None:
    pipeline = make("1F1B", 2, lambda labels: -1.0)
    assert "give 0 or more" in refusal(pipeline.step, *batch(0))
    pipeline = make("1F1B", 2, "tokens")
    inputs, labels = batch(0, samples=M)
    targets = [{"answers": part} for part in labels.split(1)]
    assert "no tokens can be counted" in refusal(pipeline.step, inputs, targets)
