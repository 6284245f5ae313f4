"""Plans and bounds against what a solver proves; it is part of the benchmarks.

Without its package the default tests still meet proved optima: `test_published`.
"""

import random

import pytest

from zbpp.core import Costs, Pass, PassKind, Placement, Schedule, Step, lower_bounds
from zbpp.planning import plan
from zbpp.schedules import plan_one_f_one_b, plan_placement
from zbpp.simulator import simulate, span

F, B, W, _ = PassKind
pytestmark = pytest.mark.needs("ortools")


def certify(*arguments, seconds=100, **more):
    from solver import certify  # of benchmarks/planner

    return certify(*arguments, seconds=seconds, workers=1, **more)


def test_joint_backwards_stay_joint():
    schedule = plan_one_f_one_b(n_stages=2, n_microbatches=3)
    found = certify(schedule, Costs(memory_limit=2))
    assert found.is_optimal and found.span == 12
    jobs = {str(job) for order in found.schedule.orders for job in order}
    assert "0BW0" in jobs and "0B0" not in jobs


@pytest.mark.parametrize(
    ("costs", "p"),
    [
        (Costs(memory_limit=2), 2),
        (Costs(2, 3, 1.5, 0.5, memory_limit=2), 2),
        (Costs(comm=0.5, send_occupies=(0.25,), memory_limit=1.5), 2),
        (
            Costs(
                1,
                1,
                0.5,
                (0.2, 0.7),
                loss=0.1,
                splits=(True, False, True),
                memory_limit=2,
            ),
            3,
        ),
    ],
)
def test_no_bound_is_above_an_optimum_and_no_plan_below(costs, p):
    schedule = plan("ZB", n_stages=p, n_microbatches=3, costs=costs)
    found = certify(schedule, costs)
    assert found.is_optimal
    assert found.span == pytest.approx(span(simulate(found.schedule, costs)))
    assert found.span <= span(simulate(schedule, costs)) * (1 + 1e-9)
    assert found.schedule.costs == costs
    for name, bound in lower_bounds(schedule.placement, 3, costs).items():
        assert bound <= found.span * (1 + 1e-9), name


def one_by_one(p: int, m: int, costs: Costs) -> Schedule:
    """Each stage does all of a micro-batch before it begins the next."""
    orders = tuple(
        (*(Pass(kind, s, i) for i in range(m) for kind in (F, B, W)), Step(s))
        for s in range(p)
    )
    return Schedule("one by one", Placement.single(p), m, orders, costs)


def test_peaks_and_what_b_adds_are_kept_and_cost_what_they_must():
    """4 above what is fixed hold nothing beside a B.

    0 | F0 .  .  B0 F1 W0 .  B1 F2 W1 .  B2 W2
    1 | .  F0 B0 W0 .  F1 B1 W1 .  F2 B2 W2
    """
    for peak_b, is_tight in ((3, True), (1, False)):
        costs = Costs(m_b=1, m_w=2, m_fixed=10, peak_b=peak_b, memory_limit=14)
        found = certify(one_by_one(2, 3, costs), costs)
        assert found.is_optimal and (found.span == 13) == is_tight


@pytest.mark.slow
def test_small_plans_of_random_costs_meet_the_optimum():
    n_solved = n_met = 0
    for seed in range(9):
        rng = random.Random(seed)
        p, m = rng.choice((1, 2, 3)), rng.randint(1, 4)
        halves = [tuple(rng.choice((0.5, 1, 1.5, 2)) for _ in range(p)) for _ in "fbwm"]
        f, b, w, m_b = halves
        m_w = tuple(held * rng.choice((0, 0.5, 1, 2)) for held in m_b)
        peak_b = tuple(max(0.0, y - x) + 0.25 for x, y in zip(m_b, m_w, strict=True))
        limit = tuple(
            rng.choice((1, 1.25, 1.5)) * (x + y + z)
            for x, y, z in zip(m_b, m_w, peak_b, strict=True)
        )
        costs = Costs(f, b, w, 0.1, m_b=m_b, m_w=m_w, peak_b=peak_b, memory_limit=limit)
        placement = Placement.single(p)
        schedule = plan_placement(placement=placement, n_microbatches=m, costs=costs)
        found = certify(schedule, costs, seconds=1)
        if found.is_optimal:
            n_solved += 1
            n_met += found.schedule.orders == schedule.orders
            for name, bound in lower_bounds(placement, m, costs).items():
                assert bound <= found.span * (1 + 1e-6), name
    assert n_solved >= 6 and n_met >= 0.9 * n_solved
