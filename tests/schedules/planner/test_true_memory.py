"""Plans under peaks, fixed memory and B's that add some: valid, and never too short."""

import random
from dataclasses import replace

import pytest

from tests.support.true_memory import random_case, random_limit
from zbpp.core import (
    Costs,
    LimitError,
    Placement,
    RequestError,
    Schedule,
    longest_span,
    lower_bounds,
    peaks,
    replay,
)
from zbpp.planning import MODES, plan
from zbpp.schedules import plan_placement
from zbpp.schedules.planner.limits import needs

FIXED = ("FThenB", "1F1B", "VPP")
PLANNED = {1: ("ZB", "ZBH1", "ZBH2"), 2: ("ZBV", "VHalf", "VMin"), 3: ("ZBVPP",)}


def check(schedule: Schedule, costs: Costs, memory: Costs) -> None:
    """Valid, within the limit, and not below a bound for the memory that it takes."""
    placement, m = schedule.placement, schedule.n_microbatches
    most = peaks(schedule.orders, memory.on(placement))
    for held, limit in zip(most, memory.on(placement).limit, strict=True):
        assert held <= limit * (1 + 1e-9)
    taken = replace(memory, memory_limit=tuple(most))
    replace(schedule, costs=taken)  # validated
    span = longest_span(replay(schedule.orders, costs.on(placement), n_microbatches=m))
    for name, bound in lower_bounds(placement, m, costs.with_memory(taken)).items():
        assert bound <= span * (1 + 1e-9), name


def plan_all(seed: int, effort: str) -> int:
    """Plan a random case in every mode and on random placements; count the plans."""
    rng = random.Random(seed)
    p, m, v = rng.randint(1, 5), rng.randint(1, 9), rng.choice((1, 2, 2, 3))
    costs, memory = random_case(rng, p, v)
    n_plans = 0
    for mode in (*PLANNED[v], "auto", *FIXED, "any"):
        stages = list(range(p)) * v
        if mode == "any":
            rng.shuffle(stages)
        placement = (
            Placement(tuple(stages))
            if mode == "any" or v == 1
            else Placement.wave(p, v)
        )
        limited = replace(
            memory, memory_limit=random_limit(rng, placement, costs, memory)
        )
        try:
            if mode == "any":
                schedule = plan_placement(
                    placement=placement,
                    n_microbatches=m,
                    costs=costs.with_memory(limited),
                    effort=effort,
                )
            else:
                schedule = plan(
                    mode,
                    n_stages=p,
                    n_microbatches=m,
                    costs=costs.with_memory(limited),
                    effort=effort,
                    chunks_per_stage=v if MODES[mode].chunks is None else None,
                )
        except RequestError as error:  # an order of its own, too large; or a 1F1B of V
            assert mode in (*FIXED, "auto"), error
            continue
        check(schedule, costs, limited)
        n_plans += 1
    return n_plans


@pytest.mark.parametrize("seed", range(20))
def test_plans_keep_the_true_memory_and_no_bound_is_above_them(seed):
    assert plan_all(seed, "fast") >= 3


@pytest.mark.slow
def test_plans_keep_it_at_every_effort():
    efforts = {0: "default", 5: "best:0.02"}
    plans = [plan_all(seed, efforts.get(seed % 10, "fast")) for seed in range(100, 120)]
    assert sum(plans) >= 60


@pytest.mark.parametrize("v", [1, 2, 3])
def test_the_smallest_limit_is_planned_and_one_below_it_is_refused(v):
    rng = random.Random(v)
    for _ in range(12):
        p, m = rng.randint(1, 4), rng.randint(1, 6)
        costs, memory = random_case(rng, p, v)
        placement = Placement.wave(p, v) if v > 1 else Placement.single(p)
        request = {"placement": placement, "n_microbatches": m}
        held = costs.with_memory(memory).on(placement).joined()
        each = tuple(needs(held))
        for limit in (max(each), each):
            limited = replace(memory, memory_limit=limit)
            table = costs.with_memory(limited)
            schedule = plan_placement(**request, costs=table, effort="fast")
            check(schedule, costs, limited)
        least = max(each)
        with pytest.raises(LimitError) as error:
            plan_placement(**request, costs=replace(table, memory_limit=least * 0.999))
        assert error.value.smallest == pytest.approx(least)


def test_one_micro_batch_needs_what_its_passes_need_one_after_the_other():
    """F leaves 1, B adds 3 to it and has 4 inside, W has .5 more."""
    memory = Costs(m_b=1, m_w=4, m_fixed=10, peak_f=2, peak_b=4, peak_w=0.5)
    held = memory.on(Placement.single(1))
    assert needs(held) == [10 + 1 + 4]
    split = memory.on(Placement.wave(1))  # B of chunk 1: .5 of chunk 0, .5, and 2
    assert needs(split) == [10 + 0.5 + 0.5 + 2]
    assert needs(replace(held, peak_o=(9.0,))) == [10 + 9]


def test_a_promise_in_m_b_is_one_of_micro_batches_in_flight():
    """ZBH1 promises p of them: the first stage holds 4, and the inside of a B."""
    memory = Costs(m_b=1, m_w=0.5, m_fixed=100, peak_b=3)
    schedule = plan("ZBH1", n_stages=4, n_microbatches=8, costs=memory)
    most = peaks(schedule.orders, memory.on(schedule.placement))
    assert max(most) == 100 + 4 + 3
    plain = plan("ZBH1", n_stages=4, n_microbatches=8)
    assert schedule.orders == plain.orders
