"""The two passes of a pair take turns at the points of their layers."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import pytest
import torch
from moe import moe_costs
from small_model import assert_same, make_pipeline
from small_model import batch as small_batch
from talking import (
    N_MICROBATCHES,
    PATIENCE_S,
    Log,
    Outcome,
    Talking,
    batch,
    exchange,
    make,
    noted,
    pairs_noted,
    talking,
    train,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zbpp
from zbpp.core import Lane, PassKind, Segment
from zbpp.runtime import WeightQueue
from zbpp.runtime.overlap import OpenPass, Overlap
from zbpp.runtime.support.thread_state import ThreadState
from zbpp.schedules.passes.segments import in_segments

CPU = torch.device("cpu")
F, B, W, _ = PassKind


@contextmanager
def turns_counted() -> Iterator[list[str]]:
    """Within this, pairs that run in turns are noted."""
    with pairs_noted(patience_s=0.0) as logs:
        yield (names := [])
    names += logs


# ---- The order of the turns.


def test_layers_take_turns_as_drawn() -> None:
    """One layer a chunk:

    computes       F attention  B experts   F experts    B attention
    communicates   B combine'   F dispatch  B dispatch'  F combine
    """
    with pairs_noted() as logs:
        train(make(talking(2)), steps=1)
    assert [*logs][:2] == ["(1F1;0BW0)OVERLAP_F_B", "(0F2;1BW1)OVERLAP_F_B"]
    log = logs["(1F1;0BW0)OVERLAP_F_B"]
    assert log.computed == ["F attention1", "B experts0", "F experts1", "B attention0"]
    assert log.communicated == [
        "B combine0",
        "F dispatch1",
        "B dispatch0",
        "F combine1",
    ]
    for log in logs.values():
        assert log.beside == log.communicated  # each of them, in every pair


def test_chunks_of_two_layers_go_on_taking_turns() -> None:
    with pairs_noted() as logs:
        train(make(talking(4)), steps=1)
    log = logs["(0F2;1BW1)OVERLAP_F_B"]
    assert log.computed == [
        "F attention0", "B experts3", "F experts0", "B attention3",
        "F attention1", "B experts2", "F experts1", "B attention2",
    ]  # fmt: skip
    assert log.communicated == [
        "B combine3", "F dispatch0", "B dispatch3", "F combine0",
        "B combine2", "F dispatch1", "B dispatch2", "F combine1",
    ]  # fmt: skip
    assert log.beside == log.communicated


def test_in_a_row_nothing_is_computed_beside_a_communication() -> None:
    """The control of the two above: what they look at can fail."""
    log = Log()
    with pytest.MonkeyPatch.context() as patch, pairs_noted() as logs:
        patch.setattr("talking.LOG", log)
        train(make(talking(2), overlap=False), steps=1)
    assert not logs and log.communicated and not log.beside


def test_a_half_without_points_runs_under_the_others_communication() -> None:
    class Quiet(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return noted(super().forward(x), "quiet")

    with pairs_noted(patience_s=0.0) as logs:
        train(make(nn.Sequential(Talking(0), Quiet(8, 8))), steps=1)
    forward_talks = logs["(0F2;1BW1)OVERLAP_F_B"]
    assert forward_talks.computed == ["F attention0", "B quiet", "F experts0"]
    assert forward_talks.communicated == ["F dispatch0", "F combine0"]
    backward_talks = logs["(1F1;0BW0)OVERLAP_F_B"]
    assert backward_talks.computed == ["F quiet", "B experts0", "B attention0"]
    assert backward_talks.communicated == ["B combine0", "B dispatch0"]


def test_passes_communicate_one_after_the_other() -> None:
    overlap, may_end, starts = Overlap(CPU), threading.Event(), threading.Event()

    def first() -> None:
        assert zbpp.overlap_point(may_end.wait, PATIENCE_S)

    def second() -> None:
        zbpp.overlap_point(starts.set)

    passes = [OpenPass(overlap, x, is_forward=True) for x in (first, second)]
    for each in passes:
        each.go_on()
    assert not starts.wait(0.1)
    may_end.set()
    assert starts.wait(PATIENCE_S)
    for each in passes:
        each.go_on()
        assert each.has_ended


# ---- The bits.


class Checkpointed(nn.Module):
    def __init__(self, index: int, *, use_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.use_reentrant = Talking(index, dropout=0.3), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(
            self.inner, x, use_reentrant=self.use_reentrant, preserve_rng_state=True
        )
        return result


def checkpointed(*, use_reentrant: bool) -> nn.Module:
    first = nn.Linear(8, 8)  # a reentrant checkpoint asks for an input with a gradient
    layers = (Checkpointed(i, use_reentrant=use_reentrant) for i in (1, 2, 3))
    return nn.Sequential(first, *layers)


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "dropout": (lambda: talking(4, dropout=0.3), {}),
    "dropout, recomputed": (lambda: talking(4, dropout=0.3), {"recompute": "all"}),
    "buffers": (lambda: talking(4, norm=nn.BatchNorm1d), {}),
    "buffers, recomputed": (
        lambda: talking(4, norm=nn.BatchNorm1d, dropout=0.3),
        {"recompute": "all"},
    ),
    "checkpoints": (lambda: checkpointed(use_reentrant=False), {}),
    "reentrant checkpoints": (lambda: checkpointed(use_reentrant=True), {}),
    "16 bits": (lambda: talking(4), {"autocast": torch.bfloat16}),
    "rolled back": (
        lambda: talking(4, dropout=0.3),
        {
            "clip_grad_norm": 0.1,
            "post_validation": True,
        },
    ),
    "two stages": (lambda: talking(4, dropout=0.3), {"n_stages": 2, "seed": 3}),
    "sums in products": (lambda: talking(4), {"exact_sums": False}),
}


def trained(case: str, **more: Any) -> Outcome:
    torch.manual_seed(0)
    model, how = CASES[case]
    return train(make(model(), **(how | more)))


@pytest.mark.filterwarnings("ignore:DualPipeV gains little here")  # if reentrant
@pytest.mark.parametrize("case", CASES)
def test_turns_have_the_bits_of_a_row(case: str) -> None:
    with turns_counted() as pairs:
        numbers, state = trained(case)
    assert pairs
    with turns_counted() as none:
        in_a_row = trained(case, overlap=False)
    assert not none and numbers == in_a_row[0]
    assert_same(state, in_a_row[1])


def test_rolled_back_steps_are() -> None:
    """The control: the case above rolls back."""
    numbers, _ = trained("rolled back")
    assert any(rollbacks for *_, rollbacks in numbers)


# ---- Plans with parts, in segments.

PLANS: dict[str, dict[str, Any]] = {
    "ZB": {"mode": "ZB"},
    "ZBV": {"mode": "ZBV"},
    "two stages": {"mode": "ZBV", "n_stages": 2, "seed": 3},
    "B before another B's end": {
        "mode": "ZBVPP", "n_stages": 2, "seed": 3, "memory_limit": 4.0,
    },
    "laid out pairs": {"mode": "DualPipeV", "n_stages": 2, "seed": 3},
    "rolled back": {
        "mode": "ZBV",
        "clip_grad_norm": 0.1,
        "post_validation": True,
    },
    "16 bits": {"mode": "ZBV", "autocast": torch.bfloat16},
    "recomputed": {"mode": "ZBV", "recompute": "all"},
    "sums in products": {"mode": "ZBV", "exact_sums": False},
}  # fmt: skip


def planned(case: str, norm: Any = nn.LayerNorm, **more: Any) -> Outcome:
    """Train layers with dropout by a plan that was made for their parts."""
    how = PLANS[case] | more
    n_stages = how.get("n_stages", 1)
    n_layers = 2 * n_stages
    planned_layers = how.pop("planned_layers", n_layers // n_stages)
    model = talking(n_layers, dropout=0.3, norm=norm)
    return train(
        make(model, in_parts(how.pop("mode"), n_stages, planned_layers), **how)
    )


@cache
def in_parts(mode: str, n_stages: int, n_layers: int) -> zbpp.Plan:
    """A plan for so many layers a stage that exchange tokens."""
    return zbpp.make_plan(
        zbpp.PlanRequest(
            schedule=mode, n_stages=n_stages, n_microbatches=N_MICROBATCHES,
            costs=moe_costs(0.4, n_layers),
        )
    )  # fmt: skip


@contextmanager
def segments_counted() -> Iterator[Counter[str]]:
    """Within this, segments are counted, and W's that begin before their B ends."""
    counted: Counter[str] = Counter()
    go_on, run_first = OpenPass.go_on, WeightQueue.run_first

    def counting(self: OpenPass) -> None:
        counted["segments"] += 1
        go_on(self)

    def beginning(self: WeightQueue, n: int, **how: Any) -> None:
        counted["parts of W"] += n > 0
        run_first(self, n, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpenPass, "go_on", counting)
        patch.setattr(WeightQueue, "run_first", beginning)
        yield counted


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm, pytest.param(nn.BatchNorm1d, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("case", PLANS)
def test_segments_have_the_bits_of_a_row(case: str, norm: Any) -> None:
    with segments_counted() as counted:
        numbers, state = planned(case, norm)
    assert counted["segments"]
    assert counted["parts of W"] or case == "laid out pairs"
    with segments_counted() as none:
        in_a_row = planned(case, norm, overlap=False)
    assert not none and numbers == in_a_row[0]
    assert_same(state, in_a_row[1])


@pytest.mark.parametrize("n_layers", [1, 4])
def test_other_points_than_planned_have_the_same_bits(n_layers: int) -> None:
    """The plan is of fewer, or of more layers than a stage has."""
    numbers, state = planned("ZB", planned_layers=n_layers)
    in_a_row = planned("ZB", planned_layers=n_layers, overlap=False)
    assert numbers == in_a_row[0]
    assert_same(state, in_a_row[1])


class Beside(Log):
    """Those communications that a plan hides last until another pass computes."""

    def __init__(self, hides: list[bool]) -> None:
        super().__init__()
        self._hides = iter(hides)

    def communicate(self, name: str) -> None:
        self.patience_s = 0.0 if self.is_alone or not next(self._hides) else PATIENCE_S
        super().communicate(name)


def hides_behind(one: Segment, later: list[Segment]) -> bool:
    """True if a pass computes beside a segment's communication, not waiting for it."""
    waiting = {one.part.of}
    for segment in later:
        if segment.part.of in waiting:
            return False
        if segment.part.lane is Lane.COMPUTE:
            return True
        waiting.add(segment.part.of)  # communicates next
    return False


def test_segments_go_on_as_planned_and_communicate_beside_one_another() -> None:
    """In steady state, of one stage with two layers in one chunk:

    computes       F attention0  B experts1    F experts0   W of experts1  B attention1
    communicates   B combine1    F dispatch0   B dispatch1  F combine0
    """
    costs = moe_costs(0.4, 2)
    schedule = zbpp.plan("ZB", n_stages=1, n_microbatches=N_MICROBATCHES, costs=costs)
    (order,) = in_segments(schedule, costs).orders
    segments = [x for x in order if isinstance(x, Segment) and x.part.kind is not W]
    hides = [
        hides_behind(x, segments[c + 1 :]) for c, x in enumerate(segments) if x.left
    ]
    assert hides.count(True) > len(hides) / 2
    parts = {F: ("attention", "experts"), B: ("experts", "attention")}
    due = []
    for part in (x.part for x in segments if x.part.lane is Lane.COMPUTE):
        layer, name = divmod(part.index // 2, 2)
        layer = layer if part.kind is F else 1 - layer
        due.append(f"{part.kind} {parts[part.kind][name]}{layer}")
    pipeline = make(talking(2), schedule, costs=costs)
    pipeline.step(*batch(0))
    with pytest.MonkeyPatch.context() as patch, pairs_noted():
        patch.setattr("talking.LOG", log := Beside(hides))
        pipeline.step(*batch(1))
    pipeline.close()
    assert log.computed == due
    assert len(log.communicated) == len(hides)
    assert len(log.beside) == hides.count(True)


def test_layers_without_points_run_whole_passes_of_a_plan_with_parts() -> None:
    with segments_counted() as counted:
        pipeline = make_pipeline("ZBV", 2, costs=moe_costs(0.4, 2))
        pipeline.step(*small_batch(0))
        pipeline.step(*small_batch(1))
        (row, _) = zbpp.diagnostics.timeline(pipeline).rows
        pipeline.close()
    assert not counted and {"0F0", "0B0", "0W0"} <= {str(slot.job) for slot in row}


def test_measured_times_of_segments() -> None:
    pipeline = make(talking(2), "ZBV", costs=moe_costs(0.4, 2))
    for step in range(2):
        pipeline.step(*batch(step))
    (row,) = zbpp.diagnostics.timeline(pipeline).rows
    costs = zbpp.diagnostics.measured_costs(pipeline)
    pipeline.close()
    assert {"0F0.0", "0B0.1", "0W0.0"} <= {str(slot.job) for slot in row}
    assert all(min(times) > 0 for times in (costs.f, costs.b, costs.w))


# ---- Nothing changes elsewhere.


def test_layers_without_points_start_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a pair without points")

    monkeypatch.setattr(OpenPass, "go_on", refuse)
    pipeline = make_pipeline("DualPipeV", 2)
    pipeline.step(*small_batch(0))
    pipeline.close()
    with pytest.raises(AssertionError, match="without points"):  # the control
        train(make(talking(2)), steps=1)


def test_outside_of_a_pipeline_a_point_is_the_call() -> None:
    def swap(given: dict[str, Tensor], *, scale: float) -> dict[str, Tensor]:
        return {"a": given["b"] * scale, "b": given["a"], "counts": given["counts"]}

    def run(call: Any) -> list[Tensor]:
        x, y = (torch.arange(3.0 * i, 3.0 * i + 3, requires_grad=True) for i in (0, 1))
        given = {"a": x * 2, "b": y + x, "counts": torch.tensor([1, 2])}
        result = call(given)
        result["a"].mul_(3.0)  # what it returns may be written to
        assert torch.equal(result["counts"], torch.tensor([1, 2]))
        (result["a"].sum() + (result["b"] ** 2).sum() + x.sum()).backward()
        return [result["a"], result["b"], x.grad, y.grad]

    plain = run(lambda given: swap(given, scale=0.5))
    pointed = run(lambda given: zbpp.overlap_point(swap, given, scale=0.5))
    assert all(map(torch.equal, plain, pointed))


def test_pairs_in_turns_have_times_of_their_own() -> None:
    def measured(**how: Any) -> tuple[set[str], Any]:
        pipeline = make(talking(2), **how)
        pipeline.step(*batch(0))
        (row,) = zbpp.diagnostics.timeline(pipeline).rows
        costs = zbpp.diagnostics.measured_costs(pipeline, joint=True)
        assert zbpp.diagnostics.prediction(pipeline, n=1).step_predicted > 0
        pipeline.close()
        return {str(slot.job) for slot in row}, costs.fb

    jobs, fb = measured()
    assert {"0F0", "(1F1;0BW0)OVERLAP_F_B"} <= jobs and "1F1" not in jobs
    assert len(fb) == 2 and min(fb) > 0
    jobs, fb = measured(overlap=False)
    assert "1F1" in jobs and fb is None


# ---- Errors.


class Breaking(torch.autograd.Function):
    """Raises in one half of the pairs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, where: str, armed: list[bool]) -> Tensor:
        ctx.where, ctx.armed = where, armed
        if where == "F" and armed[0]:
            raise ArithmeticError("F breaks")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        if ctx.where == "B" and ctx.armed[0]:
            raise ArithmeticError("B breaks")
        return dy, None, None


FAILS = {
    "pairs": ({}, {"F": "1F1", "B": "0BW0"}),
    "segments": ({"mode": "ZB", "costs": moe_costs(0.4, 2)}, {"F": "0F1", "B": "0B0"}),
}
"""Of a plan, and the F and the B that its first segments with points are of."""


@pytest.mark.parametrize("plan", FAILS)
@pytest.mark.parametrize("half", ["F", "B"])
@pytest.mark.parametrize("place", ["computes", "communicates"])
def test_an_error_ends_all_open_passes_with_its_words(
    half: str, place: str, plan: str
) -> None:
    armed = [False]

    def breaking(x: Tensor, name: str) -> Tensor:
        result: Tensor = Breaking.apply(x, half, armed)
        return exchange(result, name)

    class Layer(Talking):
        def _part(self, name: str, y: Tensor) -> Tensor:
            y = super()._part(name, y)
            result: Tensor = Breaking.apply(y, half, armed)
            return result

    layers = [
        Layer(i) if place == "computes" else Talking(i, communicate=breaking)
        for i in range(2)
    ]
    how, failing = FAILS[plan]
    pipeline = make(nn.Sequential(*layers), **how)
    go_on = OpenPass.go_on

    def arm(self: OpenPass) -> None:
        armed[0] = True
        go_on(self)

    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(ArithmeticError, match=f"{half} breaks") as caught,
    ):
        patch.setattr(OpenPass, "go_on", arm)
        pipeline.step(*map(torch.randn, (12, 12), (8, 8)))
    job = failing[half]
    notes = caught.value.__notes__
    assert f"in {job}" in notes, notes
    assert any(job in note and "micro-batch" in note for note in notes)
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"zbpp forward", "zbpp backward"}
    with pytest.raises(RuntimeError, match="the pipeline has ended"):
        pipeline.step(*map(torch.randn, (12, 12), (8, 8)))


def test_an_interrupt_ends_both_halves() -> None:
    def interrupted(x: Tensor, name: str) -> Tensor:
        if threading.active_count() > n_threads:
            raise KeyboardInterrupt
        return exchange(x, name)

    n_threads = threading.active_count()
    pipeline = make(nn.Sequential(Talking(0), Talking(1, communicate=interrupted)))
    with pytest.raises(KeyboardInterrupt):
        train(pipeline)
    assert threading.active_count() == n_threads


# ---- The second thread.

COLOUR: ContextVar[str] = ContextVar("colour", default="none")


def state_here() -> dict[str, Any]:
    return {
        "grad": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype of autocast": torch.get_autocast_dtype("cpu"),
        "cache of autocast": torch.is_autocast_cache_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "anomalies": torch.is_anomaly_enabled(),
        "context": COLOUR.get(),
    }


def in_another_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join(60)
    return found[0]


def test_the_state_of_the_caller_is_carried_along() -> None:
    token = COLOUR.set("red")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with (
            torch.no_grad(),
            torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
            torch.device("meta"),
        ):
            here, state = state_here(), ThreadState(CPU)
            assert in_another_thread(lambda: state.run(state_here)) == here
            bare = in_another_thread(state_here)
        names = {name for name, value in bare.items() if value != here[name]}
    finally:
        torch.set_default_dtype(before)
        COLOUR.reset(token)
    assert names >= {"grad", "autocast", "default device", "context"}  # the control
    assert names.isdisjoint({"default dtype", "deterministic", "threads"})
