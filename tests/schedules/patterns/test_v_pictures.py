"""The pictures in the text of `zbpp.schedules.planner.multi.plan`."""

import pytest

import zbpp
from zbpp.core import Costs, MemoryModel, draw
from zbpp.schedules.planner.multi import plan
from zbpp.simulator import simulate


@pytest.mark.parametrize("limit", [1.0, 1.5, 2.0])
def test_what_is_drawn_is_what_is_planned(limit):
    costs = Costs(f=2.0, b=2.0, w=2.0)
    memory = MemoryModel(limit=limit)
    schedule = zbpp.plan(
        "ZBV", n_stages=2, n_microbatches=3, costs=costs, memory=memory
    )
    assert plan.__doc__ is not None
    lines = [line.strip() for line in plan.__doc__.splitlines()]
    at = lines.index(f"limit {limit:g}")
    pictured = lines[at + 1 : at + 3]
    drawn = draw(simulate(schedule, costs)).splitlines()
    for row, line in zip(drawn, pictured, strict=True):
        assert row.startswith(line.removesuffix("...").rstrip())
