"""Several forward_backward calls and one optim_step are one step with all of it."""

from functools import partial
from typing import Any

import pytest
from pool import Pool
from small_model import assert_same, batch, build, loss_fn, make_pipeline, refusal
from torch import Tensor, nn

from zbpp.pipeline import Pipeline

Outcome = tuple[list[tuple[float, float, bool]], dict[str, Tensor]]


def dropping(layers: range) -> list[nn.Module]:
    return build(layers, dropout=0.3)


def finish(pipeline: Pipeline, results: list[Any]) -> Outcome:
    parameters = {n: p.detach().clone() for n, p in pipeline.named_parameters()}
    numbers = [(r.loss, r.grad_norm, r.skipped) for r in results]
    pipeline.close()
    return numbers, parameters


def whole(mode: str, k: int, n_stages: int | None = 2, **more: Any) -> Outcome:
    pipeline = make_pipeline(mode, n_stages, n_microbatches=2 * k, **more)
    return finish(pipeline, [pipeline.step(*batch(step)) for step in range(4)])


def in_parts(
    mode: str, k: int, n_stages: int | None = 2, *, n_calls: int, **more: Any
) -> Outcome:
    pipeline = make_pipeline(mode, n_stages, n_microbatches=2, **more)
    results = []
    for step in range(4):
        parts = [x.chunk(k) for x in batch(step)]
        for inputs, targets in zip(*parts, strict=True):
            pipeline.forward_backward(inputs, targets, n_calls=n_calls)
        results.append(pipeline.optim_step())
    assert pipeline.n_steps == 4
    return finish(pipeline, results)


def same(left: Outcome, right: Outcome) -> None:
    assert left[0] == right[0]
    assert_same(left[1], right[1])


@pytest.mark.parametrize("mode", ["1F1B", "VPP", "ZBH1", "ZBV"])
def test_calls_add_up_to_one_step_bit_for_bit(mode: str) -> None:
    same(in_parts(mode, 3, n_calls=3), whole(mode, 3))
    same(in_parts(mode, 1, n_calls=1), whole(mode, 1))


@pytest.mark.parametrize("clip", [0.05, 100.0])
def test_speculative_steps_are_validated_in_the_first_call(clip: float) -> None:
    more: dict[str, Any] = {
        "clip_grad_norm": clip,
        "post_validation": True,
        "model": dropping,
        "seed": 5,
    }
    same(in_parts("ZBH1", 3, n_calls=3, **more), whole("ZBH1", 3, **more))


def test_tied_parameters_add_up_too() -> None:
    def tied(layers: range) -> list[nn.Module]:
        built = build(range(9))
        built[8] = nn.Linear(16, 11, bias=False)
        built[8].weight = nn.Parameter(built[0].weight.detach().clone())
        return [built[i] for i in layers]

    more: dict[str, Any] = {"model": tied, "ties": [((0, "weight"), (8, "weight"))]}
    same(in_parts("ZBH1", 3, n_calls=3, **more), whole("ZBH1", 3, **more))


def test_calls_of_other_sizes_are_refused() -> None:
    inputs, targets = batch(0)
    pipeline = make_pipeline("ZBH1", 2, n_microbatches=2)
    call = partial(pipeline.forward_backward, n_calls=2)
    call(inputs[:8], targets[:8])
    assert "weighs 4, and that of the first one 8" in refusal(
        call, inputs[8:], targets[8:]
    )
    call(inputs[:8], targets[:8])
    once = make_pipeline("ZBH1", 2, n_microbatches=2).step(inputs[:8], targets[:8])
    assert pipeline.optim_step().loss == once.loss


def test_the_number_of_calls_is_kept() -> None:
    pipeline = make_pipeline("ZBH1", 2, n_microbatches=2)
    pipeline.forward_backward(*batch(0), n_calls=2)
    assert "there was 1" in refusal(pipeline.optim_step)
    other = refusal(partial(pipeline.forward_backward, n_calls=3), *batch(0))
    assert "n_calls is 3, and 2 in the first call" in other
    pipeline.forward_backward(*batch(0), n_calls=2)
    more = refusal(partial(pipeline.forward_backward, n_calls=2), *batch(0))
    assert "call optim_step()" in more
    assert pipeline.optim_step().loss > 0


def test_a_call_may_have_a_loss_of_its_own() -> None:
    def doubled(outputs: Tensor, targets: Tensor) -> Tensor:
        return 2 * loss_fn(outputs, targets)

    pipeline = make_pipeline("ZBH1", 2, n_microbatches=2)
    pipeline.forward_backward(*batch(0), n_calls=1, loss_fn=doubled)
    result = pipeline.optim_step()
    expected = make_pipeline("ZBH1", 2, n_microbatches=2).step(*batch(0))
    assert result.loss == pytest.approx(2 * expected.loss)
    assert pipeline.step(*batch(0)).loss < expected.loss


def in_parts_here() -> Outcome:
    return in_parts("ZBH1", 3, None, n_calls=3)


@pytest.mark.dist
def test_in_two_processes(pool: Pool) -> None:
    numbers, parameters = in_parts("ZBH1", 3, n_calls=3)
    found = pool.run(in_parts_here, 2)
    assert all(one[0] == numbers for one in found)
    assert_same({**found[0][1], **found[1][1]}, parameters)


def test_what_would_lose_gradients_is_refused() -> None:
    pipeline = make_pipeline("ZBH1", 2, n_microbatches=2)
    assert "comes after forward_backward" in refusal(pipeline.optim_step)
    pipeline.forward_backward(*batch(0), n_calls=1)
    for call in (pipeline.evaluate, pipeline.profile):
        assert "call it first" in refusal(call, *batch(0))
    assert "call optim_step()" in refusal(pipeline.step, *batch(0))
    pipeline.synchronize()  # harms nothing
    assert pipeline.optim_step().loss > 0
    without = make_pipeline("ZBH1", 2, optimizer=None)
    assert "optimizer is None" in refusal(
        partial(without.forward_backward, n_calls=1), *batch(0)
    )
