"""Scripts may look and act between speculative steps."""

from typing import Any

import pytest
from histories import INF, SPIKE, Injector, batch, draw, make, run
from outcomes import bytes_of, look, same
from small_model import batch as tokens
from small_model import make_pipeline, refusal

from zbpp import diagnostics
from zbpp.core import Check, Pass, PassKind, Placement, Schedule, Step
from zbpp.runtime import LossScaler
from zbpp.simulator import bubble_rate


def has_check(pipeline: Any) -> bool:
    return any(
        isinstance(job, Check) for row in pipeline.schedule.orders for job in row
    )


def test_on_where_the_backward_is_split_and_there_are_stages_to_wait_for() -> None:
    for mode, n_stages, wanted in (
        ("FThenB", 2, False), ("1F1B", 2, False), ("VPP", 2, False), ("ZBH1", 2, True),
        ("ZBH2", 3, True), ("ZBV", 2, True), ("ZBH1", 1, False),
    ):  # fmt: skip
        assert has_check(make_pipeline(mode, n_stages)) is wanted, mode
    assert has_check(make_pipeline("1F1B", 2, post_validation=True))
    assert not has_check(make_pipeline("ZBV", 2, post_validation=False))
    assert not has_check(make_pipeline("ZBV", 2, optimizer=None))


def test_a_schedule_with_a_v_of_its_own_is_run_as_it_is() -> None:
    orders = tuple(
        (
            Check(stage),
            *(Pass(PassKind.F, stage, i) for i in range(2)),
            *(Pass(PassKind.BW, stage, i) for i in range(2)),
            Step(stage),
        )
        for stage in range(2)
    )
    schedule = Schedule("early V", Placement.single(2), 2, orders)
    pipeline = make_pipeline(schedule, None, n_microbatches=2)
    assert pipeline.schedule == schedule
    assert pipeline.step(*tokens(0)).rollbacks == 0


def test_requests_that_make_no_sense_are_refused() -> None:
    assert "from 1 on" in refusal(make_pipeline, "ZBH1", 2, max_consecutive_skips=0)
    assert "growth_interval is -1" in refusal(LossScaler, growth_interval=-1)


def test_gradients_are_gone_after_a_step_as_they_are_behind_a_barrier() -> None:
    """So a script that zeroes them itself does no harm."""
    history = draw(
        7, mode="ZBH1", n_stages=3, optimizer="adamw", events=(None, SPIKE, None),
        looks=("",) * 3, scheduler=None, loss_scale=False,
    )  # fmt: skip
    plain = run(history, 3, post_validation=False).states[-1]
    pipeline = make(history, 3, post_validation=True)
    injector = Injector(pipeline)
    parameters = [p for _, p in pipeline.named_parameters()]
    for step, event in enumerate(history.events):
        injector.begin(event)
        pipeline.step(*batch(history, step))
        assert all(p.grad is None for p in parameters)
        for optimizer in pipeline.optimizers:
            optimizer.zero_grad(set_to_none=False)
    state = look(pipeline, [])
    assert all(same(value, plain[key]) for key, value in state.items())


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_a_step_with_hooks_waits_so_that_they_see_the_valid_one_once(kind: str) -> None:
    """An average of the weights, say, cannot be rolled back."""
    history = draw(
        2, mode="ZBH1", n_stages=3, optimizer="adamw",
        events=(None, SPIKE, INF, None), looks=("",) * 4, scheduler=None,
    )  # fmt: skip
    seen: dict[bool, list[bytes]] = {}
    for speculative in (True, False):
        noted = seen[speculative] = []
        pipeline = make(history, 3, post_validation=speculative)
        injector = Injector(pipeline)

        def note(optimizer: Any, *_: Any, noted: list[bytes] = noted) -> None:
            noted.append(bytes_of(optimizer.param_groups[0]["params"][0]))

        for optimizer in pipeline.optimizers:
            getattr(optimizer, f"register_step_{kind}_hook")(note)
        for step, event in enumerate(history.events):
            injector.begin(event)
            pipeline.step(*batch(history, step))
        pipeline.close()
    assert seen[True] == seen[False] and len(seen[True]) == 3 * 3


def test_the_timeline_of_a_replay_holds_what_really_ran() -> None:
    history = draw(
        7, mode="ZBH1", n_stages=3, optimizer="adamw", events=(SPIKE,), looks=("",),
        n_microbatches=4,
    )  # fmt: skip
    pipeline = make(history, 3, post_validation=True)
    injector = Injector(pipeline)
    injector.begin(SPIKE)
    pipeline.step(*batch(history, 0))
    injector.begin(None)
    pipeline.step(*batch(history, 1))
    rows = [
        [str(slot.job) for slot in row] for row in diagnostics.timeline(pipeline).rows
    ]
    assert " ".join(rows[0][:7]) == "0F0 0F1 0F2 V 0F0 0F1 0F2"
    assert " ".join(rows[2][:4]) == "2F0 V 2F0 2B0"
    assert 0 <= bubble_rate(diagnostics.timeline(pipeline)) < 1


def test_looking_from_within_a_step_is_refused() -> None:
    pipeline = make_pipeline("ZBH1", 2)
    layer = dict(pipeline.named_layers())["layers.3"]
    handle = layer.register_forward_hook(lambda *_: layer.state_dict() and None)
    with pytest.raises(RuntimeError, match="in the middle of a step"):
        pipeline.step(*tokens(0))
    handle.remove()
