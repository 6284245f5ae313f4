"""Early steps that are validated later leave the bits of steps behind a barrier."""

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from histories import (
    ALWAYS,
    SPIKE,
    Event,
    History,
    Injector,
    Outcome,
    batch,
    bytes_of,
    compare,
    difference,
    draw,
    look,
    make,
    run,
    same,
)
from moments import uncertain_sums
from pool import Pool
from small_model import batch as tokens
from small_model import make_pipeline, refusal
from torch import Tensor

from zbpp.core import Check, Pass, PassKind, Placement, Schedule, Step
from zbpp.runtime import optimizer as optimizer_module
from zbpp.runtime.copies import Copies
from zbpp.runtime.errors import PeerError
from zbpp.runtime.group_values import GroupValues
from zbpp.runtime.loss_scale import LossScaler
from zbpp.runtime.optimizer import StageOptimizer
from zbpp.runtime.patience import Patience
from zbpp.runtime.rewind import Rewind
from zbpp.runtime.snapshot import Snapshot
from zbpp.runtime.speculate import Deferred
from zbpp.simulator import bubble_rate

INF = Event(5, "norm.weight", 0, math.inf)
pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def check(seeds: range) -> int:
    """Compare the histories of some seeds; return how many steps were taken back."""
    rollbacks = 0
    for seed in seeds:
        history = draw(seed)
        found, ours = compare(history)
        assert found is None, f"{found}\n{history}"
        rollbacks += sum(ours.rollbacks)
    return rollbacks


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_random_histories(first: int) -> None:
    assert check(range(first, first + 20)) > 20


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(60, 1000, 94))
def test_a_thousand_random_histories(first: int) -> None:
    assert check(range(first, first + 94)) > 94


# Negative controls: each part of a rollback is needed, and its lack is noticed.


def _no_undo(self: Deferred) -> None:
    """The parameters stay as the early step has made them."""


def _commit_nothing(self: Deferred) -> Iterator[None]:
    """m and v stay those of the step before."""
    return iter(())


def _commit_too_late(self: StageOptimizer) -> None:
    """The next step then finds the state of the step before."""


def _copy_once(self: Copies, tensor: Tensor) -> Tensor:
    """The copies stay those of the first step."""
    return self._room(tensor)


@torch.no_grad()
def _undo_parameters_only(self: Snapshot) -> None:
    for parameter in self._taken:
        parameter.copy_(self._copies.of(parameter))


def _validate_without_replay(self: StageOptimizer, job: Any) -> bool:
    self._settle(job)
    self._replay = False
    return False


def _run_with_values_of_now(self: GroupValues, action: Callable[[], object]) -> None:
    action()


def _rewind_without_buffers(self: Rewind) -> None:
    self._end = self._random()
    self._stage.discard()


BROKEN = {
    "undo": (Deferred, "undo", _no_undo, {"rollback": "deferred"}),
    "copy": (Copies, "take", _copy_once, {"rollback": "deferred"}),
    "finish": (StageOptimizer, "before_gradients", _commit_too_late, {}),
    "commit": (Deferred, "commit", _commit_nothing, {"optimizer": "adamw"}),
    "state": (Snapshot, "undo", _undo_parameters_only, {"rollback": "snapshot"}),
    "replay": (StageOptimizer, "validate", _validate_without_replay, {}),
    "rates": (GroupValues, "run", _run_with_values_of_now, {"scheduler": "steps"}),
    "buffers": (Rewind, "rewind", _rewind_without_buffers, {}),
    "scale": (LossScaler, "update", None, {"loss_scale": True}),
}


@pytest.mark.parametrize("part", BROKEN)
def test_a_broken_rollback_is_noticed(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, broken, fixed = BROKEN[part]
    fixed = {"n_stages": 3, "patience": ALWAYS, "optimizer": "adamw"} | fixed
    events = (None, SPIKE, None, INF, None, SPIKE)
    looks = ("", "", "state_dict", "", "", "")
    history = draw(5, n_microbatches=3, events=events, looks=looks, **fixed)
    assert compare(history)[0] is None
    plain = run(history, 3, post_validation=False)
    if broken is None:  # of the two runs, only the early one may be broken
        broken = partial(_twice, getattr(owner, name))
        monkeypatch.setattr(owner, name, lambda self, finite: broken(self, finite))
    else:
        monkeypatch.setattr(owner, name, broken)
    with uncertain_sums(0):
        try:
            ours = run(history, 3, post_validation=True)
        except RuntimeError as error:  # autograd sees that the weights are others
            assert "modified by an inplace operation" in str(error)
        else:
            assert difference(ours, plain) is not None


def _twice(update: Callable[..., None], scaler: LossScaler, finite: bool) -> None:
    update(scaler, finite)
    update(scaler, finite)


# Between processes.


def run_rank(history: History, post_validation: bool) -> Outcome:
    return run(history, None, post_validation=post_validation)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("seed", "mode", "n_stages"),
    [(1, "ZBH1", 2), (2, "ZBV", 3), (3, "ZBH2", 4), (4, "1F1B", 3), (6, "ZBV", 2)],
)
def test_histories_between_processes(
    pool: Pool, seed: int, mode: str, n_stages: int
) -> None:
    history = draw(
        seed,
        mode=mode,
        n_microbatches=4,
        patience=ALWAYS,
        events=(SPIKE, None, INF, INF, None, SPIKE),
        looks=("read", "", "evaluate", "", "state_dict", ""),
    )
    ours = pool.run(run_rank, n_stages, history, True)
    theirs = pool.run(run_rank, n_stages, history, False)
    for mine, other in zip(ours, theirs, strict=True):
        assert difference(mine, other) is None
        assert mine.rollbacks == [1, 0, 1, 1, 0, 1]


def run_unseeded(history: History, post_validation: bool) -> Outcome:
    return run(history, None, post_validation=post_validation, seed=None)


@pytest.mark.dist
def test_random_numbers_of_torch_are_drawn_once_more(pool: Pool) -> None:
    history = draw(
        1, mode="ZBH2", dropout=0.3, n_microbatches=4, patience=ALWAYS,
        events=(None, SPIKE, INF, None), looks=("",) * 4,
    )  # fmt: skip
    ours = pool.run(run_unseeded, 2, history, True)
    theirs = pool.run(run_unseeded, 2, history, False)
    for mine, other in zip(ours, theirs, strict=True):
        assert difference(mine, other) is None
    seeded = pool.run(run_rank, 2, history, True)
    assert difference(ours[0], seeded[0]) is not None


def read_on_one_rank_only(history: History) -> tuple[list[float], dict[str, Any]]:
    """Rank 0 looks after every step; the others look at the end only."""
    pipeline = make(history, None, post_validation=True)
    injector = Injector(pipeline)
    seen = []
    for step, event in enumerate(history.events):
        injector.begin(event)
        result = pipeline.step(*batch(history, step))
        if pipeline.rank == 0:
            seen.append(result.loss)
            if step % 2:
                pipeline.synchronize()
    state = look(pipeline, [])
    pipeline.close()
    return seen, state


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["ZBH1", "ZBV"])
def test_one_rank_may_look_while_the_others_go_on(pool: Pool, mode: str) -> None:
    events = (None, SPIKE, SPIKE, INF, INF, None, SPIKE)
    history = draw(
        1, mode=mode, n_microbatches=4, patience=ALWAYS, optimizer="fused",
        events=events, looks=("",) * len(events), scheduler=None,
    )  # fmt: skip
    looked = pool.run(read_on_one_rank_only, 3, history)
    plain = pool.run(run_rank, 3, history, False)
    assert looked[0][0] == [loss for loss, _, _ in plain[0].results]
    for (_, state), outcome in zip(looked, plain, strict=True):
        assert all(same(value, outcome.states[-1][key]) for key, value in state.items())


def wait_at_v() -> str:
    """Rank 1 has sent all gradients of a step, and then hangs."""
    pipeline = make_pipeline("ZBH1", None, timeout_s=1.0)
    pipeline.step(*tokens(0))
    if pipeline.rank == 1:
        reduce = StageOptimizer.reduce

        def late(self: StageOptimizer, transport: Any) -> None:
            time.sleep(3)
            reduce(self, transport)

        StageOptimizer.reduce = late
    try:
        for step in (1, 2):
            pipeline.step(*tokens(step))
    except PeerError as error:
        return str(error)
    finally:
        if pipeline.rank == 1:
            StageOptimizer.reduce = reduce
    return "no error"


@pytest.mark.dist
def test_a_stage_that_waits_at_v_says_so(pool: Pool) -> None:
    message, _ = pool.run(wait_at_v, 2)
    assert message == (
        "stage 0 waits at V for the sum over the other stages: no answer in 1 s"
    )


# What a script sees.


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
    message = refusal(make_pipeline, "ZBV", 2, optimizer=None, post_validation=True)
    assert "no step to validate" in message


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
    assert "'deferred' or 'snapshot'" in refusal(make_pipeline, "ZBH1", 2, rollback="x")
    assert "choose 1 or more" in refusal(
        make_pipeline, "ZBH1", 2, max_consecutive_skips=0
    )
    assert "failures is 0" in refusal(Patience, failures=0)
    assert "loss scale of 0" in refusal(make_pipeline, "ZBH1", 2, loss_scale=0.0)
    assert "growth_interval is -1" in refusal(LossScaler, growth_interval=-1)


def test_a_state_dict_is_validated_wherever_it_is_asked_for() -> None:
    history = draw(
        2, mode="ZBH1", n_stages=3, optimizer="adamw", events=(None, SPIKE),
        looks=("", ""), patience=ALWAYS, scheduler=None, loss_scale=False,
    )  # fmt: skip
    plain = run(history, 3, post_validation=False).states[-1]

    def after_a_spike() -> Any:
        pipeline = make(history, 3, post_validation=True)
        injector = Injector(pipeline)
        layers = dict(pipeline.named_layers())
        for step, event in enumerate(history.events):
            injector.begin(event)
            pipeline.step(*batch(history, step))
        return pipeline, torch.nn.ModuleDict(
            {name.replace(".", "_"): layer for name, layer in layers.items()}
        )

    with uncertain_sums(1):
        _, model = after_a_spike()
        held = model.state_dict()
        assert same(held["layers_2.linear.weight"], plain["layers.2.linear.weight"])
        pipeline, _ = after_a_spike()
        state = pipeline.optimizers[0].state_dict()["state"][0]["exp_avg"]
        assert same(state, plain["stage 0, 0, exp_avg"])


def test_gradients_are_gone_after_a_step_as_they_are_behind_a_barrier() -> None:
    """So a script that zeroes them itself does no harm."""
    history = draw(
        7, mode="ZBH1", n_stages=3, optimizer="adamw", events=(None, SPIKE, None),
        looks=("",) * 3, patience=ALWAYS, scheduler=None, loss_scale=False,
    )  # fmt: skip
    plain = run(history, 3, post_validation=False).states[-1]
    pipeline = make(history, 3, post_validation=True)
    injector = Injector(pipeline)
    parameters = [p for _, p in pipeline.named_parameters()]
    with uncertain_sums(0):
        for step, event in enumerate(history.events):
            injector.begin(event)
            pipeline.step(*batch(history, step))
            assert all(p.grad is None for p in parameters)
            for optimizer in pipeline.optimizers:
                optimizer.zero_grad(set_to_none=False)
    state = look(pipeline, [])
    assert all(same(value, plain[key]) for key, value in state.items())


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_a_step_with_hooks_waits_so_that_they_see_the_right_one_once(kind: str) -> None:
    """An average of the weights, say, cannot be taken back."""
    history = draw(
        2, mode="ZBH1", n_stages=3, optimizer="adamw", patience=ALWAYS,
        events=(None, SPIKE, INF, None), looks=("",) * 4, scheduler=None,
    )  # fmt: skip
    seen: dict[bool, list[bytes]] = {}
    for early in (True, False):
        noted = seen[early] = []
        pipeline = make(history, 3, post_validation=early)
        injector = Injector(pipeline)

        def note(optimizer: Any, *_: Any, noted: list[bytes] = noted) -> None:
            noted.append(bytes_of(optimizer.param_groups[0]["params"][0]))

        for optimizer in pipeline.optimizers:
            getattr(optimizer, f"register_step_{kind}_hook")(note)
        with uncertain_sums(0):
            for step, event in enumerate(history.events):
                injector.begin(event)
                pipeline.step(*batch(history, step))
            pipeline.close()
    assert seen[True] == seen[False] and len(seen[True]) == 3 * 3


def test_the_timeline_of_a_replay_holds_what_really_ran() -> None:
    history = draw(
        7, mode="ZBH1", n_stages=3, optimizer="adamw", events=(SPIKE,), looks=("",),
        patience=ALWAYS, n_microbatches=4,
    )  # fmt: skip
    pipeline = make(history, 3, post_validation=True)
    injector = Injector(pipeline)
    injector.begin(SPIKE)
    pipeline.step(*batch(history, 0))
    injector.begin(None)
    pipeline.step(*batch(history, 1))
    rows = [[str(slot.job) for slot in row] for row in pipeline.timeline().rows]
    assert " ".join(rows[0][:7]) == "0F0 0F1 0F2 V 0F0 0F1 0F2"
    assert " ".join(rows[2][:4]) == "2F0 V 2F0 2B0"
    assert 0 <= bubble_rate(pipeline.timeline()) < 1


def test_a_closed_pipeline_refuses_to_go_on() -> None:
    with make_pipeline("ZBH1", 2) as pipeline:
        pipeline.step(*tokens(0))
    pipeline.close()
    with pytest.raises(RuntimeError, match="the pipeline is closed"):
        pipeline.step(*tokens(1))
    assert len(list(pipeline.named_parameters())) > 3


def test_looking_from_within_a_step_is_refused() -> None:
    pipeline = make_pipeline("ZBH1", 2)
    layer = dict(pipeline.named_layers())["layers.3"]
    handle = layer.register_forward_hook(lambda *_: layer.state_dict() and None)
    with pytest.raises(RuntimeError, match="in the middle of a step"):
        pipeline.step(*tokens(0))
    handle.remove()


def test_an_interrupted_step_is_not_taken_for_a_whole_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipeline = make_pipeline("ZBH1", 2)
    with uncertain_sums(0):
        pipeline.step(*tokens(0))

    def interrupted(self: Deferred) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Deferred, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pipeline.synchronize()
    with pytest.raises(RuntimeError, match="go on from a checkpoint"):
        pipeline.synchronize()


def test_an_interrupted_early_step_is_left_to_v(monkeypatch: Any) -> None:
    plain = make_pipeline("ZBH1", 2, post_validation=False)
    plain.step(*tokens(0))
    pipeline = make_pipeline("ZBH1", 2)
    step, calls = optimizer_module.Deferred._step, []

    def interrupted(self: Deferred, *args: Any) -> Any:
        calls.append(1)
        found = step(self, *args)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(Deferred, "_step", interrupted)
    with uncertain_sums(0), pytest.raises(KeyboardInterrupt):
        pipeline.step(*tokens(0))
    first = dict(pipeline._executors[0].stage.chunks[0].layers[0].named_parameters())
    expected = dict(plain._executors[0].stage.chunks[0].layers[0].named_parameters())
    weight = first["weight"].detach()
    assert not same(weight, expected["weight"])  # not stepped
