"""Seconds of best are those of the whole request, however many plans it takes."""

from typing import Any

import pytest
from layer_plan import plan_layers

import zbpp.planning.layers as room
from zbpp.core import LayerCosts
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
    real = room.plan_recompute

    def noted(*args: Any, effort: str, **more: Any) -> Any:
        asked.append(parse_effort(effort)[1])
        return real(*args, effort="fast", **more)

    monkeypatch.setattr(room, "plan_recompute", noted)
    sizes = {"n_stages": 2, "n_microbatches": 2}
    plan_layers("auto", LayerCosts(4), effort="best:0.9", **sizes)
    assert len(asked) == 3
    assert asked[0] <= 0.3, "the first of three has a third at most"
