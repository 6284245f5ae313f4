"""Plans whose passes have parts: no crash, and no span that leaves out jobs."""

from itertools import product

import pytest

import zbpp
from zbpp.core import Parts, parse_schedule, peaks, replay, schedule_text
from zbpp.planning import PlanRequest
from zbpp.schedules import post_validated
from zbpp.simulator import makespan, simulate, steady_step_time

ONE = [("compute", 1.0)]
EXCHANGE = [("compute", 1.0), ("network", 1.0), ("compute", 1.0)]
NO_TIME_AT_THE_END = [("compute", 1.0), ("network", 1.0), ("compute", 0.0)]
NO_TIME_BETWEEN = [("compute", 1.0), ("network", 0.0), ("compute", 1.0)]
SIZES = {"n_stages": 2, "n_microbatches": 2, "effort": "fast"}


def planned(mode, f, b, w, *, recompute=None, layers=2, m_r=None, **more):
    costs = zbpp.Costs(parts=Parts(f, b, w, layers), m_r=m_r, **more)
    request = PlanRequest(schedule=mode, costs=costs, recompute=recompute, **SIZES)
    return zbpp.make_plan(request)


def check(plan, path):
    """All jobs run, no bound is above the span, and the file gives the same plan."""
    schedule, bound = plan.schedule, plan.lower_bound
    timeline = simulate(plan)
    times = plan.costs.on(schedule.placement)
    jobs = [slot.job for row in timeline.lines for slot in row]
    assert len(jobs) == sum(map(len, schedule.rows_for(times)))
    assert bound * (1 - 1e-9) <= plan.span <= makespan(timeline) * (1 + 1e-9)
    assert steady_step_time(post_validated(schedule), plan.costs) > 0
    plan.save(path)
    again = zbpp.read_plan(path)
    assert again == plan and again.span == plan.span
    again = parse_schedule(schedule_text(schedule))
    assert (again.orders, again.parts) == (schedule.orders, schedule.parts)


MODES = ("ZBH1", "ZBV", "DualPipeV", "Combined1F1B")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("w", [(), ONE], ids=["no parts of W", "W"])
@pytest.mark.parametrize("splits", [None, (True, False), (False, False)])
def test_backwards_in_one_piece_are_planned(mode, w, splits, tmp_path):
    plan = planned(mode, EXCHANGE, EXCHANGE, w, splits=splits)
    check(plan, tmp_path / "plan.json")
    joint = [not w or (splits is not None and not can) for can in splits or (True,) * 2]
    for order, is_joint in zip(plan.schedule.orders, joint, strict=True):
        kinds = {str(job.kind) for job in order}
        assert not (is_joint and kinds & {"B", "W"})


CASES = {
    "two layers": (EXCHANGE, EXCHANGE, ONE),
    "no time at the end": (NO_TIME_AT_THE_END, NO_TIME_AT_THE_END, ONE),
    "no time between": (EXCHANGE, NO_TIME_BETWEEN, ONE),
    "as many W's as B's": (EXCHANGE, EXCHANGE, [*ONE, *ONE]),
    "no time at all in W": (NO_TIME_AT_THE_END, EXCHANGE, [("compute", 0.0)]),
}


@pytest.mark.parametrize("mode", ["ZBH1", "ZBV", "auto"])
@pytest.mark.parametrize("case", CASES)
def test_to_recompute_nothing_is_to_plan_for_the_same_parts(mode, case, tmp_path):
    plain = planned(mode, *CASES[case])
    check(plain, tmp_path / "plain.json")
    for recompute in ("none", ()):
        plan = planned(mode, *CASES[case], recompute=recompute)
        check(plan, tmp_path / "plan.json")
        assert plan.costs == plain.costs
    if mode != "auto":
        assert plan.span == plain.span


def test_nothing_is_recomputed_where_all_fits(tmp_path):
    limit = {"memory_limit": 100.0, "m_r": 0.1}
    plan = planned("ZBH1", *CASES["two layers"], recompute="auto", **limit)
    assert not plan.recompute and not plan.schedule.recomputing
    check(plan, tmp_path / "plan.json")
    tight = planned(
        "ZBH1", *CASES["two layers"], recompute="auto", m_r=0.1, memory_limit=1.2
    )
    assert tight.schedule.recomputing  # the control
    check(tight, tmp_path / "tight.json")
    assert max(peaks(tight.schedule.orders, tight.chunk_costs)) <= 1.2


@pytest.mark.parametrize(
    ("f", "w"),
    [
        (NO_TIME_AT_THE_END[:2], ONE),
        ([*EXCHANGE, ("network", 0.0)], ONE),
        (EXCHANGE, [*ONE, *ONE]),
        (EXCHANGE, ()),
    ],
)
def test_costs_with_other_parts_are_refused_not_cut_short(f, w):
    schedule = planned("ZB", EXCHANGE, EXCHANGE, ONE, layers=1).schedule
    assert schedule.parts is not None
    other = zbpp.Costs(parts=Parts(f, EXCHANGE, w, 1))
    for call in (simulate, steady_step_time):
        with pytest.raises(
            zbpp.RequestError, match=r"but the costs have .*; plan again"
        ):
            call(schedule, other)


@pytest.mark.parametrize("n_jobs", list(product((0, 1, 2), repeat=2)))
def test_a_replay_that_comes_to_no_end_is_refused(n_jobs):
    schedule = zbpp.plan("1F1B", n_stages=2, n_microbatches=2)
    orders = [order[:n] for order, n in zip(schedule.orders, n_jobs, strict=True)]
    times = zbpp.Costs().on(schedule.placement)
    if n_jobs[0] or not n_jobs[1]:
        assert [len(row) for row in replay(orders, times, n_microbatches=2)] == list(
            n_jobs
        )
    else:
        with pytest.raises(zbpp.RequestError, match=r"1F0 never starts: what it waits"):
            replay(orders, times, n_microbatches=2)
