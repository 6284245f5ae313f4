"""Plans and bounds against what a solver proves; it is part of the benchmarks.

Without its package the default tests still meet proved optima: `test_published`.
"""

import pytest

from zbpp.core import Costs, PassKind, lower_bounds
from zbpp.planning import plan
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
        (Costs(m_b=(1, 2), m_w=(2, 1), peak_b=(1.5, 0.5), memory_limit=(4, 4)), 2),
        (Costs(comm=0.5, memory_limit=1.5), 2),
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
    for name, bound in lower_bounds(schedule.placement, 3, costs).items():
        assert bound <= found.span * (1 + 1e-9), name
