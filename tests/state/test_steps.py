"""When steps are speculative, what follows from skipped ones, and steps in parts."""

import copy
import math
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from histories import (
    INF,
    SPIKE,
    BadGradient,
    Case,
    Run,
)
from pool import Pool
from same import bytes_of
from small import batch, linears, make, refusal
from torch import Tensor, nn

import zbpp
from zbpp import diagnostics
from zbpp.runtime import LossScaler, NonFiniteError, PeerError
from zbpp.simulator import bubble_rate

VALID = None


def steps(case: Case, bad_gradients: list[BadGradient | None]) -> Run:
    run = Run(case)
    for bad in bad_gradients:
        run.step(bad)
    return run


# Speculation.


def test_ten_valid_steps_in_a_row_make_the_next_ones_speculative() -> None:
    """The clipped steps 9 and 20 are not speculative, and step 31 is."""
    bad_gradients = (
        [VALID] * 9 + [SPIKE] + [VALID] * 9 + [SPIKE] + [VALID] * 10 + [SPIKE] * 2
    )
    run = steps(Case(post_validation=None, n_microbatches=1), bad_gradients)
    rolled_back = [i for i, x in enumerate(run.results) if x.rollbacks]
    assert rolled_back == [30]


def test_the_timeline_of_a_replay_shows_the_forwards_twice() -> None:
    run = steps(Case(n_stages=3, n_microbatches=4), [SPIKE, VALID])
    timeline = diagnostics.timeline(run.pipeline)
    rows = [[str(slot.job) for slot in row] for row in timeline.rows]
    assert " ".join(rows[0][:7]) == "0F0 0F1 0F2 V 0F0 0F1 0F2"
    assert " ".join(rows[2][:4]) == "2F0 V 2F0 2B0"
    assert 0 <= bubble_rate(timeline) < 1


def test_jobs_run_in_the_order_of_the_schedule_after_a_switch() -> None:
    run = Run(Case(mode="ZBV", n_microbatches=4))
    for mode in ("VMin", "VHalf"):
        run.step()
        run.switch(mode)
        run.step()
        rows = diagnostics.timeline(run.pipeline).rows
        orders = tuple(tuple(slot.job for slot in row) for row in rows)
        assert orders == run.pipeline.schedule.orders
        assert run.pipeline.schedule.name == mode


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_hooks_of_steps_see_the_valid_step_once(kind: str) -> None:
    """An average of the weights, for instance, cannot be rolled back."""
    seen: dict[bool, list[bytes]] = {}
    for speculative in (True, False):
        run = Run(Case(n_stages=3, post_validation=speculative))
        seen[speculative] = []

        def note(optimizer: Any, *_: Any, of: list[bytes] = seen[speculative]) -> None:
            of.append(bytes_of(optimizer.param_groups[0]["params"][0]))

        for optimizer in run.pipeline.optimizers:
            getattr(optimizer, f"register_step_{kind}_hook")(note)
        for bad in (VALID, SPIKE, INF, VALID):
            run.step(bad)
        run.close()
    assert seen[True] == seen[False] and len(seen[True]) == 3 * 3


# Writes between a speculative step and its validation.


def clamp(run: Run) -> None:
    with torch.no_grad():
        run.layers[2].weight.clamp_(-0.1, 0.1)


def other_memory(run: Run) -> None:
    weight = run.layers[2].weight
    weight.data = weight.data.clone()


@pytest.mark.parametrize(
    ("write", "then", "name"),
    [
        (clamp, "step", "layers.2.weight changed after"),
        (other_memory, "synchronize", "layers.2.weight changed after"),
    ],
)
def test_a_write_before_the_validation_is_named(
    write: Callable[[Run], None], then: str, name: str
) -> None:
    run = steps(Case(), [VALID, VALID])
    write(run)
    text = refusal(getattr(run, then))
    assert name in text and "call pipeline.synchronize() before you write" in text
    run = steps(Case(), [VALID, VALID])
    run.synchronize()
    write(run)
    run.step()
    run.close()


# Hooks on modules, through which a state_dict is that of a validated step.


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_only_a_state_dict_of_the_model_itself_validates_the_step(
    duplicate: Callable[[nn.Module], nn.Module],
) -> None:
    """A look at a weight, and a state_dict of a copy, do not: it is not clipped yet."""
    model = linears()
    pipeline = make(model, post_validation=True, clip_grad_norm=1e-3)
    copied = duplicate(model)
    pipeline.step(*batch())
    copied.state_dict()
    before = model[0].weight.detach().clone()
    after = model.state_dict()["0.weight"]
    assert not torch.equal(before, after)
    assert torch.allclose(after, copied.state_dict()["0.weight"], atol=1e-3)


def test_a_closed_pipeline_leaves_no_hooks_behind() -> None:
    model = linears()
    before = pickle.dumps(model)
    pipeline = make(model, optimizer=partial(torch.optim.SGD, lr=0.0))
    pipeline.step(*batch())
    assert pickle.dumps(model) != before
    pipeline.close()
    assert pickle.dumps(model) == before


# The loss scale.


def test_the_loss_scale_changes_as_that_of_torch() -> None:
    theirs = torch.amp.GradScaler(
        "cpu", init_scale=2.0**10, growth_interval=3, enabled=True
    )
    ours = LossScaler(2.0**10, growth_interval=3)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for finite in (True, True, False, True, True, True, True, False, False, True):
        weight.grad = torch.ones(1) if finite else torch.full((1,), math.inf)
        theirs.scale(torch.ones(1))
        theirs.step(optimizer)
        theirs.update()
        ours.update(finite)
        assert ours.scale == theirs.get_scale()
    again = LossScaler()
    again.load_state_dict(ours.state_dict())
    assert again.state_dict() == ours.state_dict()
    assert "growth_interval is -1" in refusal(LossScaler, growth_interval=-1)


def test_skips_of_the_scale_search_are_not_counted_as_faults() -> None:
    """The scales 256 to 2 may shrink; at 1 the second skip in a row is a fault."""
    case = Case(grows=True, max_consecutive_skips=2)
    run = steps(case, [INF] * 9)
    run.synchronize()
    assert run.pipeline.loss_scaler.scale == 0.5
    with pytest.raises(NonFiniteError, match=r"^2 step\(s\)"):
        run.step(INF)
        run.synchronize()


# The diagnosis of many skips.


def diagnose(case: Case, bad: BadGradient) -> tuple[str, int]:
    """The message, and after how many steps it came."""
    run = Run(case)
    for step in range(20):
        try:
            run.step(bad if step >= 2 else VALID)
        except NonFiniteError as error:
            return str(error), step
    raise AssertionError("the run went on")


@pytest.mark.parametrize(
    ("mode", "early", "n_skips"),
    [("ZBH1", True, 3), ("ZBV", True, 1), ("ZBV", False, 3), ("1F1B", False, 1)],
)
def test_too_many_skips_raise_and_name_the_first_layer(
    mode: str, early: bool, n_skips: int
) -> None:
    for layer, microbatch in ((5, 2), (0, 0), (7, 1)):
        bad = BadGradient(math.nan, microbatch, layer)
        case = Case(
            mode=mode,
            n_stages=4,
            post_validation=early,
            max_consecutive_skips=n_skips,
        )
        message, step = diagnose(case, bad)
        assert message.startswith(f"{n_skips} step(s) in a row were skipped")
        assert f"came up in layers.{layer}:" in message
        assert f"in step {1 + n_skips} (from 0)" in message
        assert step == 1 + n_skips + early


# After an error within a step; those of one process are in test_histories.py.


def interrupt_rank_0(mode: str, folder: str) -> list[str]:
    run = Run(Case(mode=mode, n_stages=None), folder)
    for _ in range(2):
        run.step(VALID)
    run.pipeline.save(folder, wait=True)
    if run.pipeline.rank == 0:
        run.fail_in(0, "B", ValueError("rank 0 has had enough"))
    try:
        for _ in range(2):
            run.step(VALID)
    except (ValueError, PeerError) as error:
        return [str(error), *run.refusals()]
    return ["nothing was raised"]


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["1F1B", "ZBH1"])
def test_after_an_interrupt_all_ranks_refuse_calls(
    mode: str, pool: Pool, tmp_path: Path
) -> None:
    first, second = pool.run(interrupt_rank_0, 2, mode, str(tmp_path))
    assert first[0] == "rank 0 has had enough"
    assert "rank 0 failed first" in second[0]
    for texts in (first, second):
        assert len(texts) == 2
        assert texts[1].endswith(f"(load the last checkpoint, from {tmp_path})")


# Steps in parts, and other schedules: what is refused.


def test_wrong_calls_within_a_step_are_refused() -> None:
    inputs, targets = batch(12)
    pipeline = make()
    assert "comes after forward_backward" in refusal(pipeline.optim_step)
    pipeline.forward_backward(inputs[:8], targets[:8], n_calls=2)
    text = refusal(pipeline.forward_backward, inputs[8:], targets[8:], n_calls=2)
    assert "has weight 4, and the first one 8" in text
    assert "there was 1" in refusal(pipeline.optim_step)
    text = refusal(pipeline.forward_backward, inputs[:8], targets[:8], n_calls=3)
    assert "n_calls is 3, and 2 in the first call" in text
    pipeline.forward_backward(inputs[:8], targets[:8], n_calls=2)
    assert "call it first" in refusal(pipeline.evaluate, inputs, targets)
    for call in (pipeline.step, partial(pipeline.forward_backward, n_calls=2)):
        assert "call optim_step()" in refusal(call, inputs[:8], targets[:8])
    pipeline.synchronize()  # harms nothing
    once = make().step(inputs[:8], targets[:8])
    assert pipeline.optim_step().loss == once.loss
    without = make(optimizer=None)
    text = refusal(without.forward_backward, inputs, targets, n_calls=1)
    assert "optimizer is None" in text


def test_a_call_may_have_another_loss() -> None:
    def doubled(outputs: Tensor, targets: Tensor) -> Tensor:
        return 2 * nn.functional.mse_loss(outputs, targets)

    pipeline = make()
    pipeline.forward_backward(*batch(), n_calls=1, loss_fn=doubled)
    result = pipeline.optim_step()
    assert result.loss == pytest.approx(2 * make().step(*batch()).loss)
    assert pipeline.step(*batch()).loss < result.loss / 2


def test_a_schedule_for_other_layers_is_refused() -> None:
    pipeline = make()
    for mode, m, what in (
        ("ZBV", 4, "the placement"),
        ("ZBH1", 2, "the micro-batches 2"),
    ):
        schedule = zbpp.plan(mode, n_stages=2, n_microbatches=m)
        text = refusal(pipeline.switch, schedule)
        assert f"the schedule to switch to has {what}" in text
    pipeline.step(*batch())


def different_schedules() -> str:
    pipeline = make()
    mode = "ZB" if pipeline.rank else "1F1B"
    return refusal(pipeline.switch, zbpp.plan(mode, n_stages=2, n_microbatches=4))


@pytest.mark.dist
def test_ranks_must_switch_to_the_same_schedule(pool: Pool) -> None:
    texts = pool.run(different_schedules, 2)
    assert all("different schedules" in text for text in texts)
