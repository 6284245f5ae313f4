"""Measured times become costs."""

from dataclasses import replace

import pytest

from zbpp import Costs, RequestError
from zbpp.core import Pass, PassKind, Timeline
from zbpp.core.measured import measured_costs
from zbpp.planning import plan
from zbpp.simulator import simulate


def timeline(mode: str, costs: Costs) -> Timeline:
    return simulate(plan(mode, n_stages=2, n_microbatches=5), costs)


@pytest.mark.parametrize("mode", ["ZBH1", "ZBV"])
def test_the_costs_of_a_simulated_run_are_found_again(mode: str) -> None:
    n_chunks = plan(mode, n_stages=2, n_microbatches=5).placement.n_chunks
    costs = Costs(*(tuple(k + i / 8 for i in range(n_chunks)) for k in (3, 4, 2)))
    found = measured_costs([timeline(mode, costs)])
    for name in ("f", "b", "w"):
        assert getattr(found, name) == tuple(1e3 * x for x in getattr(costs, name))


def test_one_very_slow_pass_does_not_move_the_mean() -> None:
    costs = Costs(1, 1, 1)
    measured = timeline("ZBH1", costs)
    slow = Pass(PassKind.F, 0, 0)
    rows = tuple(
        tuple(replace(s, end=s.end + 99) if s.job == slow else s for s in row)
        for row in measured.rows
    )
    assert measured_costs([replace(measured, rows=rows)]).f == (1e3, 1e3)


def test_joint_passes_are_refused() -> None:
    with pytest.raises(RequestError, match="1F1B runs B and W as one pass"):
        measured_costs([timeline("1F1B", Costs())])
