"""Plans and bounds against what a solver proves; it is part of the benchmarks."""

import random
from dataclasses import replace

import pytest

from tests.support.true_memory import random_case, random_limit
from zbpp.core import (
    Costs,
    Pass,
    PassKind,
    Placement,
    Schedule,
    Step,
    lower_bounds,
)
from zbpp.schedules import plan_one_f_one_b, plan_placement, plan_zb_h1
from zbpp.simulator import lower_bound, simulate, span

pytest.importorskip("ortools")

from solver import certify  # of benchmarks/planner

F, B, W, _ = PassKind


def test_a_plan_at_the_bound_is_proved_optimal() -> None:
    plan = plan_zb_h1(n_stages=2, n_microbatches=4)
    found = certify(plan, Costs(memory_limit=2), seconds=100)
    assert found.is_optimal and (found.span, found.bound) == (13, 13)
    assert found.schedule.orders == plan.orders


def test_a_better_schedule_is_found_and_keeps_the_limit() -> None:
    costs = Costs(comm=0.25, memory_limit=3)
    plan = plan_zb_h1(n_stages=2, n_microbatches=5)  # it uses memory 2 only
    before = span(simulate(plan, costs))
    found = certify(plan, costs, seconds=100)
    assert found.is_optimal and found.span < before
    assert span(simulate(found.schedule, costs)) == pytest.approx(found.span)
    assert found.schedule.costs == costs
    assert found.schedule.orders[0][-1] == plan.orders[0][-1]


def test_joint_backwards_stay_joint() -> None:
    plan = plan_one_f_one_b(n_stages=2, n_microbatches=3)
    found = certify(plan, Costs(memory_limit=2), seconds=100)
    assert found.is_optimal and found.span == 12
    jobs = {str(job) for order in found.schedule.orders for job in order}
    assert "0BW0" in jobs and "0B0" not in jobs


def test_our_own_bound_is_not_above_the_solvers() -> None:
    costs, memory = Costs(f=2, b=3, w=1.5, comm=0.5), Costs(memory_limit=2)
    plan = plan_zb_h1(n_stages=2, n_microbatches=4)
    found = certify(plan, costs.with_memory(memory), seconds=100)
    ours = lower_bound(plan.placement, plan.n_microbatches, costs.with_memory(memory))
    assert ours <= found.bound + 1e-9 <= found.span + 2e-9


def test_peaks_and_what_b_adds_are_kept_and_cost_what_they_must() -> None:
    """4 above what is fixed hold nothing beside a B.

    0 | F0 .  .  B0 F1 W0 .  B1 F2 W1 .  B2 W2
    1 | .  F0 B0 W0 .  F1 B1 W1 .  F2 B2 W2
    """
    memory = Costs(m_b=1, m_w=2, m_fixed=10, peak_b=3, memory_limit=14)
    plan = plan_zb_h1(n_stages=2, n_microbatches=3)
    start = one_by_one(plan.placement, 3, memory)
    found = certify(start, Costs().with_memory(memory), seconds=100)
    assert found.is_optimal and found.span == 13
    free = certify(start, Costs().with_memory(replace(memory, peak_b=1)), seconds=100)
    assert free.is_optimal and free.span < found.span


@pytest.mark.slow
def test_bounds_are_below_optima_of_the_true_memory_and_small_plans_meet_them() -> None:
    """Random peaks, fixed memory and B's that add some; solved to the end."""
    n_solved = n_met = 0
    for seed in range(9):
        rng = random.Random(seed)
        (p, v), m = rng.choice(((1, 1), (2, 1), (3, 1), (2, 2))), rng.randint(1, 4)
        placement = Placement.wave(p, v) if v > 1 else Placement.single(p)
        costs, memory = random_case(rng, p, v)
        memory = replace(
            memory, memory_limit=random_limit(rng, placement, costs, memory)
        )
        plan = plan_placement(
            placement=placement, n_microbatches=m, costs=costs.with_memory(memory)
        )
        found = certify(plan, costs.with_memory(memory), seconds=1, workers=1)
        if not found.is_optimal:
            continue
        n_solved += 1
        n_met += found.schedule.orders == plan.orders
        for name, bound in lower_bounds(
            placement, m, costs.with_memory(memory)
        ).items():
            assert bound <= found.span * (1 + 1e-6), name
    assert n_solved >= 6 and n_met >= 0.9 * n_solved


def one_by_one(placement: Placement, m: int, memory: Costs) -> Schedule:
    """Each stage does all of a micro-batch before it begins the next."""
    return Schedule(
        "one by one",
        placement,
        m,
        tuple(
            (
                *(
                    job
                    for i in range(m)
                    for job in (
                        *(Pass(F, c, i) for c in own),
                        *(Pass(kind, c, i) for c in reversed(own) for kind in (B, W)),
                    )
                ),
                Step(stage),
            )
            for stage, own in enumerate(placement.chunks_of)
        ),
        memory,
    )
