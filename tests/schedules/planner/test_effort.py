"""Seconds of best are those of the whole request, however many plans it takes."""

import pytest

from zbpp.core import Costs, LayerCosts, MemoryModel, Schedule
from zbpp.modes import plan
from zbpp.planning import layer_plans
from zbpp.planning.layer_plans import plan_layers
from zbpp.schedules.planner.budget import parse_effort, shares


def test_plans_share_the_seconds_of_best() -> None:
    found = list(shares("best:12", 3))
    seconds = [parse_effort(one)[1] for one in found]
    assert seconds == pytest.approx([4.0, 6.0, 12.0], rel=0.01), "nothing was spent"
    assert list(shares("default", 3)) == ["default"] * 3


def test_auto_spends_them_once_for_all_placements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[float] = []

    def planner(
        placement: object, m: int, costs: Costs, memory: MemoryModel, effort: str
    ) -> Schedule:
        kind, seconds = parse_effort(effort)
        if kind == "best":
            asked.append(seconds)
        return plan("1F1B", n_stages=2, n_microbatches=m)

    def options(*_: object) -> list[object]:
        placed = plan("1F1B", n_stages=2, n_microbatches=2).placement
        one = lambda costs, memory, effort: planner(placed, 2, costs, memory, effort)  # noqa: E731
        return [(placed, one)] * 3

    monkeypatch.setattr(layer_plans, "planners", options)
    size = {"n_stages": 2, "n_microbatches": 2}
    plan_layers("auto", LayerCosts(2), split=[1, 1], effort="best:0.9", **size)
    assert asked and max(asked[:1]) <= 0.3, "the first of three has a third at most"
