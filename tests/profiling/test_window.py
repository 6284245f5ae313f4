"""Costs of a window of steps, and the prediction beside what was measured."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from small_model import batch, make_pipeline

from zbpp import diagnostics
from zbpp.core import (
    Costs,
    Placement,
    RequestError,
    Slot,
    Step,
    Timeline,
)
from zbpp.planning import plan
from zbpp.profiling.links import Link
from zbpp.profiling.prediction import Prediction, measured_step, predict
from zbpp.profiling.step_times import host_gaps, latencies
from zbpp.profiling.stopwatch import Spread
from zbpp.profiling.window import Wires, window_costs
from zbpp.runtime.job_times import JobTimes
from zbpp.simulator import simulate_iterations, steady_step_time

TIMES = Costs(
    f=(3.0, 4.0), b=(5.0, 2.0), w=(1.0, 2.0), optimizer=(7.0, 6.0), comm=0.5,
    reduction=2.0,
)  # fmt: skip


def in_seconds(timeline: Timeline, *, gap: float = 0.0) -> Timeline:
    """Simulated ms as if measured; each job ends earlier by what the host needs."""
    rows = tuple(
        tuple(Slot(s.job, s.start / 1e3, (s.end - gap) / 1e3) for s in row)
        for row in timeline.rows
    )
    return replace(timeline, rows=rows)


def steps(mode: str, n: int, *, gap: float = 0.0) -> list[Timeline]:
    schedule = plan(mode, n_stages=2, n_microbatches=4)
    return [in_seconds(one, gap=gap) for one in simulate_iterations(schedule, TIMES, n)]


SUM = Spread(2.0, 2.0, 2.0, 2.0)
WIRES = Wires({(0, 1): Link(0.4, 100.0, 0.0)}, SUM, {0: 10})


def test_a_window_gives_all_costs_back() -> None:
    costs = window_costs(steps("ZBH1", 3), {}, splits=[True, True], wires=WIRES)
    for name in ("f", "b", "w", "optimizer", "reduction"):
        assert getattr(costs, name) == pytest.approx(getattr(TIMES, name))
    assert costs.comm == pytest.approx((0.5,))


def test_what_the_host_needs_between_jobs_belongs_to_the_jobs() -> None:
    timelines = steps("ZBH1", 2, gap=0.25)
    assert host_gaps(timelines, None) == pytest.approx([0.25e-3] * 2)
    costs = window_costs(timelines, {}, splits=[True, True], wires=WIRES)
    assert costs.f == pytest.approx(TIMES.f)
    bare = window_costs(steps("ZBH1", 2), {}, splits=[True, True], wires=WIRES)
    assert bare.f == pytest.approx(TIMES.f), "the control: no gap, nothing added"


def test_norms_are_a_part_of_the_optimizers_time() -> None:
    norms = {0: [1e-3, 3e-3, 2e-3], 1: [0.0]}  # means count
    costs = window_costs(steps("ZBH1", 2), norms, splits=[True, True], wires=None)
    assert costs.optimizer == pytest.approx((9.0, 6.0))
    assert costs.comm == 0.0 and costs.reduction == 0.0


def test_messages_take_the_links_of_a_v() -> None:
    wires = Wires({(0, 1): Link(1.0, 10.0, 0.0)}, SUM, {0: 20, 1: 99, 2: 40})
    assert wires.hops(Placement.wave(2)) == (3.0, 0.0, 5.0)


def test_joint_passes_are_told_apart_only_if_that_is_asked_for() -> None:
    timelines = steps("1F1B", 2)
    with pytest.raises(RequestError, match="as one pass"):
        window_costs(timelines, {}, splits=[True, True], wires=None)
    costs = window_costs(timelines, {}, splits=[True, True], wires=WIRES, joint=True)
    assert costs.b == pytest.approx((6.0, 4.0)) and costs.w == (0.0, 0.0)


@pytest.mark.parametrize("mode", ["1F1B", "ZBH1"])
def test_a_simulated_run_is_predicted_to_the_digit(mode: str) -> None:
    schedule = plan(mode, n_stages=2, n_microbatches=4)
    timelines = steps(mode, 8)
    costs = replace(TIMES, m_b=2.0, m_w=1.0, m_fixed=10.0)
    found = predict(
        schedule, timelines[4:], costs,
        held=[5.0, 6.0], costs_given=True, side_by_side=True,
    )  # fmt: skip
    assert found.step_measured == pytest.approx(steady_step_time(schedule, TIMES))
    assert found.step_predicted == pytest.approx(found.step_measured)
    assert found.bubble_measured == pytest.approx(found.bubble_predicted)
    assert found.memory_predicted is not None and found.memory_predicted[0] > 10
    assert "(+0.0%)" in found.line.replace("-0.0", "+0.0")
    slow = predict(
        schedule, timelines[4:], replace(TIMES, f=(1.0, 1.0)),
        held=[None, 6.0], costs_given=False, side_by_side=True,
    )  # fmt: skip
    assert slow.step_measured != pytest.approx(slow.step_predicted), "the control"
    assert slow.memory_measured is None and slow.memory_predicted is None


def test_one_step_has_no_period() -> None:
    assert measured_step(steps("ZBH1", 1)) is None


def test_a_pipeline_measures_all_costs_of_its_last_steps() -> None:
    pipeline = make_pipeline("ZBH1", 2)
    for step in range(3):
        pipeline.step(*batch(step))
    costs = diagnostics.measured_costs(pipeline, 3)
    for times in (costs.f, costs.b, costs.w, costs.optimizer):
        assert isinstance(times, tuple) and min(times) > 0
    found = diagnostics.prediction(pipeline, memory=Costs(m_fixed=100.0))
    assert found.step_predicted > 0 and found.memory_predicted is not None
    assert found.step_measured is None, "two stages in one process take turns"
    assert found.line.startswith("prediction (simulated with the costs of the last")


def test_o_and_v_do_not_hold_the_wait_for_the_sum(monkeypatch: Any) -> None:
    pipeline = make_pipeline("ZBH1", 2, post_validation=False)
    pipeline.step(*batch(0))
    waited: list[str] = []
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    for executor in pipeline.stages.executors.values():
        executor.times = JobTimes(torch.device("cpu"))
        executor.times.now = clock
        read = executor.optimizer.wait

        def wait(job: object = None, read: Any = read) -> None:
            waited.append(str(job))
            now[0] += 1e6  # the other stage is late
            read(job)

        monkeypatch.setattr(executor.optimizer, "wait", wait)
    pipeline.step(*batch(1))
    assert waited == ["O", "O"]
    slots = [s for row in diagnostics.timeline(pipeline).rows for s in row]
    assert all(s.duration < 1e5 for s in slots if isinstance(s.job, Step))


def test_waits_for_messages_are_seen_where_the_stages_share_a_clock() -> None:
    """Messages that take longer in a step than they did alone."""
    timelines = steps("ZBH1", 3, gap=0.25)
    alone = Wires({(0, 1): Link(0.1, 1e9, 0.0)}, SUM, {0: 10}, one_clock=True)
    seen = latencies(timelines)
    assert seen == {(0, 1): pytest.approx(0.75e-3)}, "the host's gap, and the message"
    costs = window_costs(timelines, {}, splits=[True, True], wires=alone)
    assert costs.comm == pytest.approx((0.5,)) and costs.f == pytest.approx(TIMES.f)
    apart = replace(alone, one_clock=False)
    costs = window_costs(timelines, {}, splits=[True, True], wires=apart)
    assert costs.comm == pytest.approx((0.1,)), "the control: as measured alone"


def test_the_host_is_seen_where_b_and_w_are_one_pass() -> None:
    timelines = steps("1F1B", 3, gap=0.25)
    gaps = host_gaps(timelines, lambda *_: 0.5e-3)
    assert gaps == pytest.approx([0.25e-3] * 2)
    wires = replace(WIRES, one_clock=True)
    costs = window_costs(timelines, {}, splits=[True, True], wires=wires, joint=True)
    assert costs.b == pytest.approx((6.0, 4.0)) and costs.w == (0.0, 0.0)
    assert costs.f == pytest.approx(TIMES.f)


def test_a_step_is_away_from_what_was_predicted_and_not_the_other_way() -> None:
    found = Prediction(100.0, 125.0, 0.1, None, None, None, given=True)
    assert "100 ms predicted, 125 measured (+25.0%); bubble 10.0% p" in found.line
