"""Plans and bounds against what a solver proves; it is part of the benchmarks.

Without its package the default tests still meet proved optima: `test_published`.
"""

import random

import pytest

from zbpp.core import Costs, PassKind, Placement, lower_bounds
from zbpp.planning import plan
from zbpp.schedules import plan_placement
from zbpp.simulator import simulate, span

F, B, W, _ = PassKind
pytestmark = pytest.mark.needs("ortools")


def certify(*arguments, seconds=100, **more):
    from solver import certify  # of benchmarks/planner

    return certify(*arguments, seconds=seconds, workers=1, **more)


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
