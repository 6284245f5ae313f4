"""The best plan of all modes for the layers of a model, and a line that says why."""

from dataclasses import replace
from itertools import pairwise

import pytest
from layer_plan import plan_layers

import zbpp.planning.layers as room
from zbpp.core import LayerCosts, LimitError
from zbpp.planning import MODES, USUAL_MODES, Plan
from zbpp.schedules import balance

GIB = 2.0**30
COMPARED = ("1F1B", *(name for name in USUAL_MODES if MODES[name].splits))


def layers(n_blocks: int = 10, head: float = 3.0, **more: object) -> LayerCosts:
    """An embedding worth half a block, blocks, and a head; ms and bytes."""
    work = (0.5, *(1.0,) * n_blocks, head)
    settings: dict[str, object] = {
        "w": tuple(one / 2 for one in work),
        "m_b": tuple(one * GIB for one in work),
        "m_w": tuple(one * GIB / 2 for one in work),
        "m_fixed": GIB,
        "comm": 0.05,
    }
    return LayerCosts(n_blocks + 2, f=work, b=work, **(settings | more))


def pick(costs: LayerCosts, p: int = 4, m: int = 8) -> Plan:
    sizes = {"n_stages": p, "n_microbatches": m}
    return plan_layers("auto", costs, by_mode=True, effort="fast", **sizes)


def test_no_mode_is_better_than_what_is_chosen() -> None:
    costs = layers(memory_limit=30 * GIB)
    found = pick(costs)
    assert found.peak <= 30 * GIB
    for mode in COMPARED:
        other = plan_layers(mode, costs, n_stages=4, n_microbatches=8, effort="fast")
        assert other.step >= found.step * 0.99 or mode in found.mode


def messages(plan: Plan) -> int:
    stages = plan.schedule.placement.stage_of
    return sum(a != b for a, b in pairwise(stages))


def test_among_plans_that_are_as_good_as_equal_few_messages_win(monkeypatch) -> None:
    costs = layers(w=0.0)  # nothing to fill a bubble with, and next to none
    chosen = pick(costs, 2, 100)
    assert messages(chosen) == 1 and "with more messages" in chosen.line
    monkeypatch.setattr(room, "_TRUST", 0.0)
    trusting = pick(costs, 2, 100)
    assert messages(trusting) > 1
    assert trusting.step <= chosen.step <= trusting.step * 1.01


def test_the_line_says_what_was_chosen_and_why_the_others_lost() -> None:
    line = pick(layers(memory_limit=30 * GIB)).line
    assert line.startswith("auto: ZB") and "\n" not in line
    assert "; predicted step " in line and " GiB" in line
    assert "1F1B +" in line and "zero bubble will not help" not in line


@pytest.mark.parametrize(
    ("costs", "p", "m", "why"),
    [
        (layers(), 1, 8, "one stage has no bubble"),
        (
            layers(head=1.0),
            2,
            200,
            "200 micro-batches on 2 stages leave 1F1B a bubble of 0.",
        ),
        (layers(2, head=40.0), 2, 64, "stage 1 works 1.9 times as long as the mean"),
        (layers(w=0.0), 2, 100, "W has next to nothing to do"),
    ],
)
def test_it_says_where_zero_bubble_will_not_help(costs, p, m, why) -> None:
    assert f"zero bubble will not help here: {why}" in pick(costs, p, m).line


def test_a_mode_that_cannot_be_had_is_named_with_its_reason() -> None:
    line = pick(layers(3), p=4).line
    assert "ZBV: 5 layers cannot fill 8 chunks" in line


def test_what_fits_no_mode_is_refused() -> None:
    with pytest.raises(LimitError, match="smallest limit"):
        pick(layers(memory_limit=2 * GIB))


def test_a_mode_whose_busiest_stage_takes_too_long_is_not_planned(monkeypatch) -> None:
    costs = layers(head=7.0)  # a stage of its own with one chunk, half with two
    monkeypatch.setattr(
        room, "balance", lambda *sizes: replace(balance(*sizes), is_proved=False)
    )
    whole = pick(costs, 3, 8)
    assert "at least" not in whole.line
    monkeypatch.undo()
    bounded = pick(costs, 3, 8)
    assert "ZBV: +" in bounded.line and "at least" in bounded.line
    assert {lost.mode for lost in bounded.rejected if lost.is_planned} >= {"1F1B"}
    assert bounded.schedule == whole.schedule and bounded.mode == whole.mode
