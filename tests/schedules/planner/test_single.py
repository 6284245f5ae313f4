"""The planner for one chunk a stage: valid, within memory, and as short as promised."""

import math
import random
from pathlib import Path
from textwrap import dedent, indent

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zbpp.schedules.planner.single_modes
from zbpp.core import (
    Costs,
    MemoryModel,
    PassKind,
    Placement,
    RequestError,
    Schedule,
    ScheduleError,
    draw,
    lower_bound,
    peaks,
)
from zbpp.planning import plan
from zbpp.schedules import (
    plan_one_f_one_b,
    plan_zb,
    plan_zb_h1,
    plan_zb_h2,
)
from zbpp.simulator import simulate, span

DATA = Path(__file__).parents[2] / "data"
PICTURES = {
    1: """\
        0 | F0 .  .  B0 W0 F1 .  .  B1 W1 F2 .  .  B2 W2 F3 .  .  B3 W3
        1 | .  F0 B0 W0 .  .  F1 B1 W1 .  .  F2 B2 W2 .  .  F3 B3 W3""",
    2: """\
        0 | F0 F1 .  B0 W0 F2 B1 W1 F3 B2 W2 B3 W3
        1 | .  F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3""",
    3: """\
        0 | F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3
        1 | .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3""",
}


def random_case(seed: int, spread: float = 0.3) -> dict:
    """A request with unequal stages, any limits, some stages that cannot split."""
    rng = random.Random(seed)
    p, m = rng.randint(1, 12), rng.randint(1, 40)

    def around(value):
        return tuple(value * rng.uniform(1 - spread, 1 + spread) for _ in range(p))

    f = around(1.0)
    b, w = list(around(rng.uniform(0.5, 2))), list(around(rng.uniform(0.1, 1.5)))
    loss = rng.choice((0.0, 0.0, 0.4))
    b[-1] += loss
    links = tuple(rng.choice((0.0, 0.1, 1.5)) for _ in range(p - 1))
    comm = rng.choice((0.0, 0.05, rng.uniform(0, 2), links))
    m_b = around(1.0)
    share = rng.uniform(0.02, 0.98)
    most = rng.choice((1.3, p / 2, p, 2 * p))
    limit = tuple(held * max(1, rng.uniform(0.5, 1) * most) for held in m_b)
    return {
        "n_stages": p,
        "n_microbatches": m,
        "costs": Costs(
            *(f, tuple(b), tuple(w), comm),
            loss=loss,
            splits=tuple(rng.random() < 0.85 for _ in range(p)),
        ),
        "memory": MemoryModel(m_b, tuple(share * held for held in m_b), limit),
    }


def check(case: dict, effort: str) -> float:
    """Plan, and judge the plan by itself: rules, memory, bound. Return the gap."""
    schedule = plan_zb(**case, effort=effort)
    again = Schedule(
        "judge",
        Placement.single(case["n_stages"]),
        case["n_microbatches"],
        schedule.orders,
        memory=case["memory"],
    )
    longest = span(simulate(again, case["costs"]))
    bound = lower_bound(
        again.placement, case["n_microbatches"], case["costs"], case["memory"]
    )
    assert bound <= longest * (1 + 1e-9)
    for stage, splits in enumerate(case["costs"].splits):
        kinds = {job.kind for job in schedule.orders[stage][:-1]}
        whole, split = {PassKind.F, PassKind.BW}, {*"FBW"}
        assert kinds == (split if splits else whole)
    return longest / bound - 1


@pytest.mark.parametrize("limit", PICTURES)
def test_a_plan_is_what_is_drawn_on_top_of_the_file(limit):
    schedule = plan_zb(n_stages=2, n_microbatches=4, memory=MemoryModel(limit=limit))
    assert draw(simulate(schedule)) == dedent(PICTURES[limit])
    first, rest = dedent(PICTURES[limit]).split("\n")
    picture = f"limit {limit}  {first}\n         {rest}"
    assert indent(picture, "    ") in zbpp.schedules.planner.single_modes.__doc__


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_random_requests_are_planned_within_order_and_memory(first):
    for seed in range(first, first + 40):
        check(random_case(seed), "fast")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_random_requests():
    gaps = [check(random_case(seed), "fast") for seed in range(1000, 2200)]
    assert sum(gaps) / len(gaps) < 0.2


@pytest.mark.parametrize("seed", range(25))
def test_a_plan_is_never_worse_than_a_hand_made_order_that_fits(seed):
    rng = random.Random(seed)
    p, m = rng.randint(1, 8), rng.randint(1, 20)
    costs = Costs(*(tuple(rng.uniform(0.2, 2) for _ in range(p)) for _ in range(3)))
    for limit in (1, p / 2, p, 1.5 * p, 2 * p - 1):
        memory = MemoryModel(m_w=0.4, limit=max(1, limit))
        request = {"n_stages": p, "n_microbatches": m, "costs": costs}
        planned = span(
            simulate(plan_zb(**request, memory=memory, effort="fast"), costs)
        )
        for other in (plan_one_f_one_b, plan_zb_h1, plan_zb_h2):
            schedule = other(n_stages=p, n_microbatches=m)
            held = max(peaks(schedule.orders, memory.on(schedule.placement)))
            if held <= memory.limit:
                assert planned <= span(simulate(schedule, costs)) * (1 + 1e-9)


@given(
    seed=st.integers(0, 10**9),
    p=st.integers(1, 6),
    m=st.integers(1, 10),
    zero=st.sampled_from(["f", "b", "w", "none"]),
)
def test_no_time_and_no_memory_are_planned_too(seed, p, m, zero):
    rng = random.Random(seed)
    times = {
        name: 0.0
        if name == zero
        else tuple(rng.choice((0.0, 0.5, 1)) for _ in range(p))
        for name in "fbw"
    }
    costs = Costs(**times, comm=rng.choice((0.0, 0.3)))
    memory = MemoryModel(rng.choice((0.0, 1.0)), 0.0, rng.choice((1.0, 1.9)))
    schedule = plan_zb(
        n_stages=p, n_microbatches=m, costs=costs, memory=memory, effort="fast"
    )
    bound = lower_bound(schedule.placement, m, costs, memory)
    assert bound <= span(simulate(schedule, costs)) * (1 + 1e-9)


@pytest.mark.parametrize("model", ["unit", "1.5B"])
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 6])
@pytest.mark.timeout(900)
def test_more_memory_never_makes_a_plan_worse(model, step):
    costs = {"unit": Costs(), "1.5B": Costs(18.522, 18.086, 9.337, 0.601)}[model]
    before = math.inf
    for quarters in range(4, 81, step):
        memory = MemoryModel(1.0, 0.366, quarters / 4)
        schedule = plan_zb(n_stages=8, n_microbatches=24, costs=costs, memory=memory)
        longest = span(simulate(schedule, costs))
        assert longest <= before * (1 + 1e-9), quarters
        before = longest


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_stages_that_differ_a_little_cost_little():
    gaps = []
    for seed in range(12):
        rng = random.Random(seed)
        times = [tuple(rng.uniform(0.9, 1.1) for _ in range(8)) for _ in range(3)]
        costs, memory = Costs(*times), MemoryModel(limit=8)
        schedule = plan_zb(n_stages=8, n_microbatches=24, costs=costs, memory=memory)
        bound = lower_bound(schedule.placement, 24, costs, memory)
        gaps.append(span(simulate(schedule, costs)) / bound - 1)
    assert sum(gaps) / len(gaps) <= 0.02


def test_modes_promise_a_memory_and_plan_for_the_times():
    times = Costs(1.0, 1.2, 0.4, 0.1)
    for mode, promise, pattern in (
        ("ZBH1", 4, plan_zb_h1),
        ("ZBH2", 7, plan_zb_h2),
    ):
        schedule = plan(mode, n_stages=4, n_microbatches=12, costs=times)
        held = peaks(schedule.orders, MemoryModel().on(schedule.placement))
        assert max(held) <= promise and schedule.memory is None
        by_hand = pattern(n_stages=4, n_microbatches=12)
        assert span(simulate(schedule, times)) <= span(simulate(by_hand, times))
        low = plan(mode, n_stages=4, n_microbatches=12, memory=MemoryModel(limit=2))
        assert max(peaks(low.orders, MemoryModel().on(low.placement))) <= 2
        high = plan(mode, n_stages=4, n_microbatches=12, memory=MemoryModel(limit=99))
        assert max(peaks(high.orders, MemoryModel().on(high.placement))) <= promise
    free = plan_zb(n_stages=4, n_microbatches=12, costs=times)
    assert max(peaks(free.orders, MemoryModel().on(free.placement))) <= 8


def test_a_limit_below_one_microbatch_names_the_smallest_that_works():
    memory = MemoryModel(m_b=(1.0, 2.0), m_w=0.5, limit=1.5)
    with pytest.raises(
        RequestError, match=r"stage 1, over the limit 1\.5; .* 2 or more"
    ):
        plan_zb(n_stages=2, n_microbatches=3, memory=memory)
    memory = MemoryModel(m_b=(1.0, 2.0), m_w=0.5, limit=2)
    assert plan_zb(n_stages=2, n_microbatches=3, memory=memory).memory == memory


def test_a_limit_that_the_plan_breaks_would_be_noticed():
    schedule = plan_zb(n_stages=3, n_microbatches=6, memory=MemoryModel(limit=2))
    with pytest.raises(ScheduleError, match="over the limit"):
        Schedule("x", schedule.placement, 6, schedule.orders, MemoryModel(limit=1.9))


def test_planning_is_deterministic():
    case = random_case(7)
    assert plan_zb(**case).orders == plan_zb(**case).orders


@pytest.mark.parametrize(
    "effort", ["", "worst", "fast:3", "best:", "best:-1", "best:nan"]
)
def test_an_unknown_effort_is_refused(effort):
    with pytest.raises(RequestError, match="choose fast, default, best"):
        plan_zb(n_stages=2, n_microbatches=4, effort=effort, costs=Costs(w=0.3))


def test_the_best_effort_takes_what_it_is_given():
    case = random_case(3)
    spans = [
        span(simulate(plan_zb(**case, effort=effort), case["costs"]))
        for effort in ("best:0.2", "fast")
    ]
    assert spans[0] <= spans[1] < math.inf


def test_wrong_splits_are_refused():
    with pytest.raises(RequestError, match="splits has 1 entries for 2 stages"):
        plan_zb(n_stages=2, n_microbatches=4, costs=Costs(splits=(True,)))
