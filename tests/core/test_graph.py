"""The graph of jobs: start times by a referee, what decided them, and deadlocks.

The referee (tests/support/judge.py) replays files, and shares no code with zbpp.
"""

import json
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judge import judge
from moe import moe_costs

from zbpp.core import (
    Costs,
    JobGraph,
    Pass,
    PassKind,
    Placement,
    RequestError,
    Schedule,
    ScheduleError,
    parse_job,
    schedule_text,
    write_costs,
)
from zbpp.planning import MODES, plan
from zbpp.schedules import (
    lay_out,
    plan_combined_1f1b,
    plan_dual_pipe_v,
    plan_zb_v,
)

TIME = st.sampled_from([0.0, 1.0]) | st.floats(1e-9, 10.0)
SIZES = [(1, 1), (1, 5), (2, 1), (2, 4), (3, 2), (3, 7), (4, 6)]


@cache
def planned(mode, p, m, costs=None):
    return plan(mode, n_stages=p, n_microbatches=m, costs=costs, effort="fast")


@st.composite
def whole_passes(draw):
    p, m = draw(st.sampled_from(SIZES))
    mode = draw(st.sampled_from(sorted(MODES)))
    schedule = planned(mode, p, m)
    times = st.tuples(*[TIME] * schedule.placement.n_chunks)
    columns = draw(times), draw(times), draw(times), draw(TIME)
    return schedule, Costs(*columns, loss=draw(TIME))


@st.composite
def passes_in_parts(draw):
    pattern = draw(st.sampled_from([plan_combined_1f1b, plan_dual_pipe_v, plan_zb_v]))
    p, m = draw(st.sampled_from([(1, 2), (2, 4), (3, 6)]))
    share, comm = draw(st.floats(0.05, 0.9)), draw(TIME)
    costs = moe_costs(share, comm=comm, loss=draw(TIME))
    if draw(st.booleans()):
        mode = draw(st.sampled_from(["ZB", "ZBV", "DualPipeV"]))
        costs = moe_costs(draw(st.sampled_from([0.2, 0.5])), comm=0.1)
        return planned(mode, p, m, costs), costs
    schedule = pattern(n_stages=p, n_microbatches=m)
    return lay_out(schedule, costs.on(schedule.placement)), costs


def spans(schedule, costs):
    times = costs.on(schedule.placement)
    return JobGraph(schedule.rows_for(times), times).run().spans


@given(whole_passes() | passes_in_parts())
def test_start_times_equal_those_of_the_referee(case):
    schedule, costs = case
    text, data = json.loads(schedule_text(schedule)), data_of(costs)
    found = spans(schedule, costs)
    assert found == pytest.approx(judge(text, data).spans, rel=1e-9, abs=1e-9)
    if schedule.n_stages > 1 and min(costs.on(schedule.placement).f) > 0:  # the control
        slower = judge(text, data | {"comm": 1000.0})
        assert max(slower.spans) > max(found) + 900


def data_of(costs):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "costs.json"
        write_costs(costs, path)
        return json.loads(path.read_text(encoding="utf-8"))


@given(whole_passes() | passes_in_parts())
def test_each_start_is_the_end_of_the_job_that_decided_it(case):
    schedule, costs = case
    times = costs.on(schedule.placement)
    graph = JobGraph(schedule.rows_for(times), times)
    run = graph.run()
    path = run.path(max(range(len(run.starts)), key=run.ends.__getitem__))
    for node in path:
        waits = graph.waits(node)
        moments = [
            (run.starts if wait.from_start else run.ends)[wait.source] + wait.delay
            for wait in waits
        ]
        assert run.starts[node] == max(moments, default=0.0)
    assert run.starts[path[0]] == 0.0


def built(*rows, stage_of=None, m=2):
    orders = tuple(
        tuple(parse_job(cell, stage=stage) for cell in row.split())
        for stage, row in enumerate(rows)
    )
    return Schedule("built", Placement(stage_of or (*range(len(rows)),)), m, orders)


def test_a_deadlock_names_its_circle_and_no_other_stage():
    circle = "deadlock: stage 0 waits at 0BW0 for 1BW0, stage 1 waits at 1F1 for 0F1; "
    stages = "0F0 0BW0 0F1 0BW1", "1F0 1F1 1BW0 1BW1", "2F0 2BW0 2F1 2BW1"
    with pytest.raises(ScheduleError, match=circle) as refused:
        built(*stages)
    assert "stage 2 waits" not in str(refused.value)  # it waits for the circle
    assert built(stages[0].replace("0BW0 0F1", "0F1 0BW0"), *stages[1:])


def test_a_stage_of_two_chunks_may_deadlock_with_itself():
    built("0F0 1F0 1BW0 0BW0", stage_of=(0, 0), m=1)
    with pytest.raises(ScheduleError, match="deadlock: stage 0 waits at 1F0 for 0F0"):
        built("1F0 0F0 1BW0 0BW0", stage_of=(0, 0), m=1)
    with pytest.raises(ScheduleError, match="stage 0 waits at 0BW0 for 1BW0"):
        built("0F0 1F0 0BW0 1BW0", stage_of=(0, 0), m=1)


@pytest.mark.parametrize("n_jobs", list(product((0, 1, 2), repeat=2)))
def test_jobs_that_wait_for_a_missing_job_are_refused(n_jobs):
    schedule = plan("1F1B", n_stages=2, n_microbatches=2)
    orders = [order[:n] for order, n in zip(schedule.orders, n_jobs, strict=True)]
    graph = JobGraph(orders, Costs().on(schedule.placement))
    if n_jobs[0] or not n_jobs[1]:
        assert tuple(map(len, graph.run().slots())) == n_jobs
    else:
        with pytest.raises(RequestError, match=r"1F0 never starts: its predecessor"):
            graph.run()


def test_jobs_of_no_time_still_wait_for_one_another():
    schedule = plan("ZBH1", n_stages=3, n_microbatches=4)
    none = Costs(0, 0, 0)
    assert spans(schedule, none) == [0, 0, 0]
    late = JobGraph(schedule.orders, none.on(schedule.placement)).run(free=[0, 5, 0])
    first = {
        job: slot.start for row in late.slots() for slot in row for job in [slot.job]
    }
    f, b = Pass(PassKind.F, 0, 0), Pass(PassKind.B, 0, 0)
    assert (first[f], first[b]) == (0, 5)
