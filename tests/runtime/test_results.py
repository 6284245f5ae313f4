"""Metrics of loss_fn, and outputs, in the result of a step."""

import copy

import pytest
import torch
from flat import flat_pipeline
from small_model import adamw
from torch import Tensor, nn

import zbpp
from zbpp import RequestError
from zbpp.runtime.optim.decision import StepSums

D, M = 6, 4
STEPS = 3


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(D, D) for _ in range(6)))


def loss_alone(y: Tensor, t: Tensor) -> Tensor:
    return nn.functional.mse_loss(y, t)


def with_metrics(y: Tensor, t: Tensor) -> tuple[Tensor, dict[str, Tensor | float]]:
    return loss_alone(y, t), {"mean": y.mean(), "number": float(t[0, 0]), "one": True}


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(2 * M, D, generator=generator) for _ in range(2))


def pipeline_of(loss_fn: object, mode: str = "ZBV", **more: object) -> zbpp.Pipeline:
    given = {"optimizer": adamw, "n_stages": 2, "n_microbatches": M} | more
    return flat_pipeline(layers(), loss_fn=loss_fn, schedule=mode, **given)


@pytest.mark.parametrize("clip", [None, 1e-3], ids=["valid", "every step rolled back"])
@pytest.mark.parametrize("mode", ["1F1B", "ZBV"])
def test_metrics_are_means_like_the_loss_and_change_no_bit_of_it(mode, clip):
    def run(loss_fn):
        with pipeline_of(loss_fn, mode, clip_grad_norm=clip) as pipeline:
            outputs, found = [], []
            for step in range(STEPS):
                inputs, targets = batch(step)
                outputs.append(pipeline.predict(inputs))
                found.append(pipeline.step(inputs, targets))
            return outputs, found

    _, plain = run(loss_alone)
    outputs, found = run(with_metrics)
    assert [r.loss for r in found] == [r.loss for r in plain]
    assert [r.grad_norm for r in found] == [r.grad_norm for r in plain]
    for step, result in enumerate(found):
        parts = outputs[step].chunk(M)
        assert result.metrics == {
            "mean": pytest.approx(float(torch.stack([y.mean() for y in parts]).mean())),
            "number": pytest.approx(float(batch(step)[1][::2, 0].mean())),
            "one": 1.0,
        }
    assert plain[0].metrics == {} == plain[1].metrics


def test_metrics_are_weighed_as_the_loss_is():
    def weigh(targets: Tensor) -> float:
        return float((targets[:, 0] > 0).sum())

    def loss_fn(y, t):
        loss = loss_alone(y, t)
        return loss, {"loss": loss}

    with pipeline_of(loss_fn, weigh=weigh) as pipeline:
        for step in range(STEPS):
            inputs, targets = batch(step)
            targets[:2] = -1.0  # a micro-batch of weight 0
            result = pipeline.step(inputs, targets)
            assert result.metrics == {"loss": result.loss}
            assert pipeline.evaluate(inputs, targets) > 0


def test_metrics_add_no_sum_to_a_step(monkeypatch):

    def sums_in(loss_fn):
        made = []
        init = StepSums.__init__
        with monkeypatch.context() as patch, pipeline_of(loss_fn) as pipeline:
            patch.setattr(
                StepSums,
                "__init__",
                lambda s, *a, **k: made.append(s) or init(s, *a, **k),
            )
            for step in range(STEPS):
                pipeline.step(*batch(step))
        return len(made)

    assert sums_in(with_metrics) == sums_in(loss_alone)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (
            lambda loss, n: (loss, {"a": loss} if n else {"b": loss}),
            "the metrics b before",
        ),
        (lambda loss, n: (loss, {"a": loss}) if n else loss, "no metrics before"),
        (lambda loss, n: (loss, [loss]), "the metrics .* are a list"),
        (lambda loss, n: (loss, {"a": loss[None]}), r"'a' .* tensor of shape \(1,\)"),
        (lambda loss, n: (loss, {"a": "x"}), "'a' .* is a str"),
        (lambda loss, n: (loss, {}, {}), "must return a scalar tensor"),
    ],
)
def test_metrics_that_do_not_fit_are_refused(returned, words):
    n_calls = iter(range(100))

    def loss_fn(y, t):
        return returned(loss_alone(y, t), next(n_calls))

    with pytest.raises(RequestError, match=words):
        pipeline_of(loss_fn).step(*batch(0))


@pytest.mark.parametrize("mode", ["1F1B", "ZBV"])
def test_outputs_come_in_the_order_of_the_batch_and_only_if_asked_for(mode):
    plain = copy.deepcopy(layers())
    inputs, targets = batch(0)
    with pipeline_of(with_metrics, mode) as pipeline:
        result = pipeline.step(inputs, targets, return_outputs=True)
        expected = torch.cat([plain(part) for part in inputs.chunk(M)])
        assert torch.equal(result.outputs, expected)
        assert not result.outputs.requires_grad
        assert pipeline.step(inputs, targets).outputs is None
        held = [one.stage.outputs for one in pipeline.stages.executors.values()]
        assert held == [None, None]


def in_two_processes(mode: str) -> list[tuple[float, dict[str, float], object]]:
    """Loss, metrics and outputs of each step; run in a worker."""
    given = {"optimizer": adamw, "n_microbatches": M, "schedule": mode}
    pipeline = flat_pipeline(layers(), loss_fn=with_metrics, **given)
    results = [pipeline.step(*batch(i), return_outputs=i == 1) for i in range(STEPS)]
    found = [(r.loss, r.metrics, r.outputs) for r in results]
    pipeline.close()
    return found


@pytest.mark.dist
def test_the_last_process_knows_metrics_and_outputs(pool):
    with pipeline_of(with_metrics, "ZBH1") as pipeline:
        here = [pipeline.step(*batch(i), return_outputs=i == 1) for i in range(STEPS)]
        expected = [(r.loss, r.metrics) for r in here]
    first, last = pool.run(in_two_processes, 2, "ZBH1")
    assert [row[:2] for row in first] == [(loss, {}) for loss, _ in expected]
    assert [row[:2] for row in last] == expected
    assert [row[2] for row in first] == [None] * STEPS
    assert last[0][2] is last[2][2] is None
    assert torch.equal(last[1][2], here[1].outputs)
