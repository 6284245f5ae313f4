"""Promises of every hand-made schedule, for any number of stages and micro-batches.

That each pass stands once, on its stage and after its input, and that no stages wait
for one another, is checked by `Schedule` itself (tests/core proves that it is).
"""

from functools import cache
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbpp.core import (
    Costs,
    PassKind,
    Schedule,
    Step,
    passes_in,
    peaks,
)
from zbpp.planning import MODES, plan
from zbpp.schedules import (
    plan_fthenb,
    plan_one_f_one_b,
    plan_vpp,
    plan_zb_h1,
    plan_zb_h2,
    plan_zb_v,
)
from zbpp.simulator import idle, simulate, span

F, B, W, BW = PassKind
GRID = list(product(range(1, 9), range(1, 21)))
TIMES = (1.0, 0.6, 1.7)
WAVES = [  # planned in tenths of a second
    name for name, mode in MODES.items() if mode.chunks != 1 and mode.order is None
]
KINDS = {name: {F, B, W} if mode.splits else {F, BW} for name, mode in MODES.items()}
HAND_MADE = {
    "FThenB": plan_fthenb,
    "1F1B": plan_one_f_one_b,
    "VPP": plan_vpp,
    "ZBH1": plan_zb_h1,
    "ZBH2": plan_zb_h2,
    "ZBV": plan_zb_v,
}
PEAK = {  # of the stage that holds most, in M_B, for any M_W from 0 to M_B
    "FThenB": lambda p, m: m,
    "1F1B": lambda p, m: min(p, m),
    "ZBH1": lambda p, m: min(p, m),
    "ZBH2": lambda p, m: min(2 * p - 1, m),
    "ZBV": lambda p, m: min(p, m),
}
IDLE = {  # of the slowest stage, and the domain of the form: m >= this, W <= F or not
    "FThenB": (lambda p, f, b, w: (p - 1) * (f + b + w), lambda p: 1, False),
    "1F1B": (lambda p, f, b, w: (p - 1) * (f + b + w), lambda p: 1, False),
    "VPP": (lambda p, f, b, w: (p - 1) * (f + b + w) / 2, lambda p: p, False),
    "ZBH1": (lambda p, f, b, w: (p - 1) * (f + b - w), lambda p: p, True),
    "ZBH2": (
        lambda p, f, b, w: max(0, (p - 1) * (f + b - 2 * w)),
        lambda p: 2 * p - 1,
        True,
    ),
}


@cache
def planned(mode: str, p: int, m: int) -> Schedule:
    return plan(mode, n_stages=p, n_microbatches=m, effort="fast")


@cache
def hand_made(mode: str, p: int, m: int) -> Schedule:
    return HAND_MADE[mode](n_stages=p, n_microbatches=m)


def check(schedule: Schedule, mode: str, n_stages: int, n_microbatches: int) -> None:
    assert schedule.name.partition(": ")[0] == mode and schedule.n_stages == n_stages
    assert schedule.n_microbatches == n_microbatches
    for stage, order in enumerate(schedule.orders):
        assert order[-1] == Step(stage)
        kinds = {part.kind for job in order[:-1] for part in passes_in(job)}
        assert kinds == KINDS[mode] or (MODES[mode].pairs and kinds - {BW} == {F, B, W})


def largest_idle(mode: str, p: int, m: int, costs: Costs) -> float:
    return max(idle(simulate(hand_made(mode, p, m), costs)))


def peak(schedule: Schedule, m_w: float) -> float:
    return max(peaks(schedule.orders, Costs(m_w=m_w).on(schedule.placement)))


@pytest.mark.parametrize("mode", MODES)
def test_every_size_is_planned(mode):
    for p, m in GRID[:: 5 if mode in WAVES else 1]:
        check(planned(mode, p, m), mode, p, m)


@pytest.mark.slow
@given(
    mode=st.sampled_from(sorted({*MODES} - {*WAVES})),
    p=st.integers(1, 24),
    m=st.integers(1, 60),
)
def test_larger_sizes_are_planned(mode, p, m):
    check(planned(mode, p, m), mode, p, m)


@pytest.mark.parametrize("v", [1, 2, 3])
def test_vpp_takes_any_number_of_chunks_and_of_microbatches(v):
    for p, m in GRID:
        schedule = plan_vpp(n_stages=p, n_microbatches=m, chunks_per_stage=v)
        check(schedule, "VPP", p, m)
        assert schedule.placement.n_chunks == p * v
        # at least the closed form of its largest group, and exact when p divides m
        group = -(-m // max(1, m // p))
        bound = ((v - 1) * group + 2 * p - 1) / v
        held = peak(schedule, 0.5)
        assert held <= min(m, bound) + 1e-9
        if m % p == 0 and m > p:
            assert held == pytest.approx((1 + (p - 1) / (p * v)) * p)
        if m >= p:
            waited = max(idle(simulate(schedule)))
            assert waited == pytest.approx(3 * (p - 1) / v)


@given(
    p=st.integers(1, 12), m=st.integers(1, 50), v=st.integers(1, 6), comm=st.booleans()
)
def test_vpp_runs_to_its_end_for_any_times(p, m, v, comm):
    schedule = plan_vpp(n_stages=p, n_microbatches=m, chunks_per_stage=v)
    timeline = simulate(schedule, Costs(f=1.3, b=1.7, w=0.6, comm=0.2 * comm))
    assert [len(row) for row in timeline.rows] == [2 * v * m + 1] * p


@pytest.mark.parametrize("mode", PEAK)
@pytest.mark.parametrize("m_w", [0.0, 0.366, 1.0])
def test_memory_is_as_promised(mode, m_w):
    for p, m in GRID:
        held = peak(hand_made(mode, p, m), m_w)
        assert held == pytest.approx(PEAK[mode](p, m)), (p, m)


@pytest.mark.parametrize("mode", IDLE)
def test_idle_time_is_the_closed_form_in_its_domain(mode):
    form, least, w_at_most_f = IDLE[mode]
    for p in (1, 2, 3, 6):
        for m in {p, 2 * p - 1, 2 * p, 3 * p + 1} - set(range(least(p))):
            schedule = hand_made(mode, p, m)
            for f, b, w in product(TIMES, repeat=3):
                if w <= f or not w_at_most_f:
                    waited = max(idle(simulate(schedule, Costs(f, b, w))))
                    assert waited == pytest.approx(form(p, f, b, w)), (p, m, f, b, w)


@pytest.mark.parametrize(
    ("mode", "p", "m", "times"),
    [
        ("ZBH1", 3, 6, (1.0, 1.0, 2.0)),  # W > F
        ("ZBH1", 4, 3, (1.0, 1.0, 1.0)),  # m < p
        ("ZBH2", 3, 4, (1.0, 1.0, 1.0)),  # m < 2p-1
        ("ZBH2", 3, 6, (1.0, 2.0, 1.5)),  # W > F
        ("VPP", 4, 3, (1.0, 1.0, 1.0)),  # m < p
    ],
)
def test_outside_its_domain_the_closed_form_fails(mode, p, m, times):
    assert largest_idle(mode, p, m, Costs(*times)) > IDLE[mode][0](p, *times) + 0.1


@pytest.mark.parametrize("mode", ["ZBH1", "ZBH2"])
def test_few_microbatches_take_the_time_of_the_longest_chain(mode):
    """m <= p: the largest span is (m+p-1)(F+B)+W when W <= F and W <= B."""
    for p, m in [(p, m) for p, m in GRID if m <= p]:
        schedule = hand_made(mode, p, m)
        for f, b, w in [(1.0, 1.0, 1.0), (1.0, 1.5, 0.75), (2.0, 1.0, 0.5)]:
            whole = span(simulate(schedule, Costs(f, b, w)))
            assert whole == pytest.approx((m + p - 1) * (f + b) + w), (p, m, f, b, w)


def test_zb_v_never_waits_with_equal_times_and_enough_microbatches():
    for p, m in GRID:
        waited = largest_idle("ZBV", p, m, Costs())
        assert (waited == pytest.approx(0)) == (m >= 2 * p - 1), (p, m, waited)


def test_zb_v_is_not_free_of_bubbles_when_times_differ():
    assert largest_idle("ZBV", 4, 12, Costs(f=1, b=1.5, w=0.5)) > 1


@pytest.mark.parametrize("mode", MODES)
def test_planning_is_pure(mode):
    one, two = (plan(mode, n_stages=3, n_microbatches=4) for _ in range(2))
    assert one == two and hash(one) == hash(two)
