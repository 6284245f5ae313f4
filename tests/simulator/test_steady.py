"""The time of a step among many: closed forms, laws, and an oracle.

p equal stages, no communication; R is the time of the sum over all stages. On the grids
below:

    barrier           makespan + R + O
    post-validation   span + max(O, R - x)
        1F1B, ZB-H1   x = pF           (m >= p)
        ZB-H2         x = F            (m >= 2p - 1)
        ZB-V          x = (p+1)F / 2   (m >= 2p - 1, F = B = W, the hand-made order)

So the bubble rate, taken from the span, is what a post-validated run has. ZB-H2 and
ZB-V have no bubble: the period is m(F+B+W) + O as long as R <= O + x.
"""

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timed_schedules import timed_schedules

from zbpp.core import Costs, RequestError, step_behind_barrier
from zbpp.planning import plan
from zbpp.schedules import (
    plan_one_f_one_b,
    plan_zb_h1,
    plan_zb_h2,
    plan_zb_v,
    post_validated,
)
from zbpp.simulator import (
    engine,
    expected_step_time,
    makespan,
    rollback_time,
    simulate,
    simulate_iterations,
    span,
    steady_step_time,
    work,
)
from zbpp.simulator.engine import IteratedSchedule, IterationState

SIZES = [(p, m) for p in (1, 2, 4) for m in (1, 5, 8)]
TIMES = [(1, 1, 1), (5, 1, 3), (1, 2, 3)]
MADE = ("FThenB", "1F1B", "VPP", "ZBH1", "ZBH2", "ZBV")
HIDDEN = {
    "1F1B": lambda p, f: p * f,
    "ZBH1": lambda p, f: p * f,
    "ZBH2": lambda p, f: f,
    "ZBV": lambda p, f: (p + 1) * f / 2,
}
HAND_MADE = {
    "1F1B": plan_one_f_one_b,
    "ZBH1": plan_zb_h1,
    "ZBH2": plan_zb_h2,
    "ZBV": plan_zb_v,
}


def near(value):
    return pytest.approx(value, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("mode", MADE)
def test_the_barrier_costs_the_makespan_and_v_the_longest_span(mode):
    for (p, m), times, o, r in product(SIZES, TIMES, (0, 2), (0, 3)):
        schedule = plan(mode, n_stages=p, n_microbatches=m)
        costs = Costs(*times, optimizer=o, reduction=r)
        timeline = simulate(schedule, costs)
        found = steady_step_time(schedule, costs)
        assert found == near(makespan(timeline) + r + o), (p, m, times)
        one = {"n_microbatches": m}  # one iteration tells the same
        of_chunks = costs.on(schedule.placement)
        assert found == near(step_behind_barrier(schedule.orders, of_chunks, **one))
        if r == 0:
            found = steady_step_time(post_validated(schedule), costs)
            assert found == near(span(timeline) + o), (p, m, times)


@pytest.mark.parametrize("mode", HIDDEN)
def test_the_sum_is_hidden_behind_o_and_the_passes_before_v(mode):
    for p, scale, o, r in product((2, 3, 6), (1, 2), (0, 2), range(0, 20, 4)):
        f = b = w = scale
        m = 2 * p
        schedule = HAND_MADE[mode](n_stages=p, n_microbatches=m)
        longest = span(simulate(schedule, Costs(f, b, w)))
        costs = Costs(f, b, w, optimizer=o, reduction=r)
        found = steady_step_time(post_validated(schedule), costs)
        assert found == near(longest + max(o, r - HIDDEN[mode](p, f))), (p, o, r)


CASES = timed_schedules(validation=st.just(0.0))
CHECKED = ("ZBH1", "ZBH2", "ZBV")
near_equal = st.sampled_from([1.0, 1.001, 1.0001, 0.9999, 1.1])


@given(CASES | timed_schedules(CHECKED, near_equal, st.just(0.0)), st.booleans())
def test_the_period_is_the_largest_mean_of_a_cycle(case, with_v):
    """Of stages that are almost as fast too, which fall behind slowly."""
    schedule, costs = case
    if with_v:
        schedule = post_validated(schedule)
    expected = largest_cycle_mean(schedule, costs)
    assert steady_step_time(schedule, costs) == near(expected)


@given(CASES)
def test_post_validation_is_never_slower_and_never_faster_than_the_work(case):
    schedule, costs = case
    with_v = steady_step_time(post_validated(schedule), costs)
    assert with_v <= steady_step_time(schedule, costs) + 1e-9
    busy = work(simulate(schedule, costs))
    steps = costs.on(schedule.placement).optimizer
    most = max(passes + step for passes, step in zip(busy, steps, strict=True))
    assert with_v >= most - 1e-9


def test_a_slow_drift_is_not_taken_for_the_end():
    """Stage 1 sets the pace; stage 0 leads by a little more with every iteration."""
    schedule = post_validated(plan("ZBH2", n_stages=2, n_microbatches=3))
    costs = Costs(f=1, b=0, w=1, optimizer=(1, 1.01))
    leads = [
        timeline.rows[1][-1].end - timeline.rows[0][-1].end
        for timeline in simulate_iterations(schedule, costs, 40)
    ]
    assert leads[20] < leads[30] < leads[39]  # nothing is repeated yet
    assert steady_step_time(schedule, costs) == near(7.01)


def largest_cycle_mean(schedule, costs):
    """Karp's theorem (1978) on the matrix of the max-plus map of one iteration.

    Entry (i, j): how much later than j alone was ready is i, an iteration later.
    """
    run, p, much = IteratedSchedule(schedule, costs), schedule.n_stages, 1e6
    n = p + 1
    columns = []
    for j in range(n):
        begin = [much if i == j else 0.0 for i in range(n)]
        _, left = run.iterate(IterationState(tuple(begin[:p]), begin[p]))
        after = (*left.free, left.verdict)
        columns.append([end - much if end >= much else -math.inf for end in after])
    walks = [[0.0] + [-math.inf] * (n - 1)]
    for _ in range(n):
        walks.append(
            [max(walks[-1][j] + columns[j][i] for j in range(n)) for i in range(n)]
        )
    return max(
        min((walks[n][i] - walks[k][i]) / (n - k) for k in range(n))
        for i in range(n)
        if walks[n][i] > -math.inf
    )


def test_a_rollback_repeats_the_step_and_the_warm_up():
    """Where all passes take as long: O and the F's before V of stage 0."""
    for p, o in product((2, 3, 4), (0, 1, 3)):
        zb_h1 = post_validated(plan("ZBH1", n_stages=p, n_microbatches=2 * p))
        zb_h2 = post_validated(plan("ZBH2", n_stages=p, n_microbatches=2 * p))
        assert rollback_time(zb_h1, Costs(optimizer=o)) == near(o + p)
        assert rollback_time(zb_h2, Costs(optimizer=o)) == near(o + 2 * p - 1)


@given(CASES)
def test_a_rollback_costs_at_most_what_is_done_twice(case):
    """All stages' second attempts one after the other are an upper bound."""
    schedule, costs = case
    schedule = post_validated(schedule)
    times = costs.on(schedule.placement)
    lost = rollback_time(schedule, costs)
    once = sum(
        times.of(job)
        for order in schedule.orders
        for job in (*order[: order.index(_check(order))], order[-1])
    )
    messages = len(schedule.orders) * schedule.n_microbatches * sum(times.hops) * 2
    assert -1e-9 <= lost <= once + messages + 1e-9
    expected = steady_step_time(schedule, costs) + 0.25 * lost
    assert expected_step_time(schedule, costs, failure_rate=0.25) == near(expected)


def _check(order):
    return next(job for job in order if str(job) == "V")


def test_what_has_no_answer_is_refused(monkeypatch):
    plain = plan("ZBH1", n_stages=2, n_microbatches=2)
    with pytest.raises(RequestError, match="ZBH1 has no V that could fail"):
        rollback_time(plain)
    for rate in (-0.1, 1.5, math.nan):
        with pytest.raises(
            RequestError, match=r"failure_rate is .*; it must be from 0"
        ):
            expected_step_time(post_validated(plain), failure_rate=rate)
    monkeypatch.setattr(engine, "_LEAPS", 0)
    with pytest.raises(RequestError, match="no period is found within 0 iterations"):
        steady_step_time(plain)


def test_a_v_takes_time_where_the_step_has_no_slack_and_may_cost_more_than_a_barrier():
    full = post_validated(plan("ZBH2", n_stages=4, n_microbatches=8))
    assert steady_step_time(full, Costs(validation=0.5)) == near(24.5)
    plain, slow_v = plan("1F1B", n_stages=4, n_microbatches=8), Costs(validation=1)
    checked = steady_step_time(post_validated(plain), slow_v)
    assert checked > steady_step_time(plain, slow_v)
