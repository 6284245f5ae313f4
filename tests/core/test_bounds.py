"""Lower bounds: by hand, and tight where that is proved.

That no plan is below one, whatever the costs, is in the law: tests/plans/test_law.py.
"""

from dataclasses import replace

import pytest

from zbpp.core import Costs, Placement, lower_bound, lower_bounds
from zbpp.planning import plan
from zbpp.simulator import peak_memory, simulate, span


def test_most_bounds_of_equal_times_are_met():
    """So that a bound a little too high is noticed."""
    met = 0
    for p, m in ((2, 5), (3, 7)):
        for limit in (1, 1.5, 2, p):
            for mode in ("ZB", "ZBV"):
                costs = Costs(memory_limit=limit)
                schedule = plan(
                    mode, n_stages=p, n_microbatches=m, costs=costs, effort="fast"
                )
                longest = span(simulate(schedule, costs))
                bound = lower_bound(schedule.placement, m, costs)
                assert bound <= longest * (1 + 1e-9)
                met += bound >= longest * (1 - 1e-9)
    assert met >= 11  # of 16


@pytest.mark.parametrize(
    ("p", "limit", "idle"),
    [(4, 2.0, 5.5), (4, 2.6667, 4.0), (8, 4.0, 11.5), (8, 5.3333, 8.0)],
)
@pytest.mark.parametrize("m", [8, 24, 64])
def test_v_schedules_below_p_have_a_constant_idle_time(p, limit, idle, m):
    """The published V-Min and V-Half meet it in part, so they are optimal there."""
    bound = lower_bound(Placement.wave(p), m, Costs(memory_limit=limit))
    assert bound == pytest.approx(3 * m + idle)


@pytest.mark.parametrize(
    ("mode", "p", "m", "costs"),
    [
        ("ZBH1", 4, 8, Costs()),
        ("ZBH1", 8, 24, Costs(18.522, 18.086, 9.337, 0.601)),
        ("ZBH2", 4, 8, Costs()),
        ("ZBV", 4, 8, Costs()),
    ],
)
def test_some_hand_made_schedules_are_proved_optimal(mode, p, m, costs):
    schedule = plan(mode, n_stages=p, n_microbatches=m)
    timeline = simulate(schedule, costs)
    limit = max(peak_memory(timeline, Costs()))
    bound = lower_bound(schedule.placement, m, replace(costs, memory_limit=limit))
    assert bound == pytest.approx(span(timeline))


@pytest.mark.parametrize(
    ("proof", "placement", "m", "costs", "by_hand"),
    [
        # m (F + B + W) of the slower stage.
        ("work", (0, 1), 5, Costs(w=(1, 2)), 5 * 4),
        # Down to stage 1 (1 + 1), there 5 (3 + 3), back up (1 + 1), then a W.
        ("rounds", (0, 1), 5, Costs((1, 3), (1, 3), 1, 1), 35),
        # From F's start to B's start 1 + c + 2 + c; one F fills it: idle 4.
        ("ramp", (0, 1), 1, Costs(comm=1), 3 + 4),
        # Two F's fit: front idle 5 - 2. Tail: 4 until the last B, filled by one B
        # and W, or by two W's: idle 4 - 2.
        ("ramp", (0, 1), 4, Costs(comm=1, memory_limit=2), 12 + 3 + 2),
        # Two W's of 2 each fill all of the 4, so the tail is not idle.
        ("ramp", (0, 1), 4, Costs(w=2, comm=1, memory_limit=2), 16 + 3),
        # Two at a time, loop 6: F0 0, F2 6; 2 and 3 through stage 1 (2 + 4 + 2), a W.
        ("rounds", (0, 1), 4, Costs(comm=1, memory_limit=2.5), 6 + 8 + 1),
        # Two leave no room for a pending W: W0, or else F1 and B1, before F2.
        ("rounds", (0, 1), 4, Costs(comm=1, memory_limit=2), 6 + 1 + 8 + 1),
        # With one at a time it must be: every loop ends with its W.
        ("rounds", (0, 1), 3, Costs(memory_limit=1), 2 * (4 + 1) + 4 + 1),
        # V, inner stage: B at 4, three F's fit, idle 1. After the last F: own 4 and 2
        # that fit beside it are left, but 4 to go: 24 + 1 - 6 + 4. Down, up, W: 3.
        ("ramp", (0, 1, 1, 0), 4, Costs(2, 2, 2, m_b=2, m_w=1, memory_limit=3), 23 + 3),
        # Stage 0: only 4 F's until 7, when its second chunk can start: idle 3.
        ("ramp", (0, 1, 2, 3, 3, 2, 1, 0), 4, Costs(2, 2, 2), 24 + 3),
        # Inner stage, one at a time: loop 4 and then W, B, W, F. Then 6 and 3.
        (
            "rounds",
            (0, 1, 1, 0),
            4,
            Costs(2, 2, 2, m_b=2, m_w=1, memory_limit=2),
            3 * 8 + 9,
        ),
        # The same where there is memory for a third chunk: after the loop W or B.
        (
            "rounds",
            (0, 1, 1, 0),
            4,
            Costs(2, 2, 2, m_b=2, m_w=1, memory_limit=3),
            3 * 5 + 9,
        ),
        # Inner stage, 4 chunks at a time, no W beside them: loops 8 and 6, W's 2; of
        # these 5 run after the length. Way to and from stage 0: 5.
        (
            "slots",
            (0, 1, 1, 0),
            6,
            Costs(2, 2, 2, 1, m_b=2, m_w=1, memory_limit=4),
            (6 * (8 + 6 + 2) - 5) / 4 + 5,
        ),
        # One chunk, a W fits beside two: loop 6, and a W.
        ("slots", (0, 1), 4, Costs(comm=1, memory_limit=2.5), 24 / 2 + 1),
        # One at a time, by BW's, as what B keeps for W does not fit: 6 times 3.
        ("slots", (0,), 6, Costs(m_w=2, memory_limit=1), 6 * 3),
        # The loss is work of the last stage, and on the way of every loop.
        ("work", (0, 1), 5, Costs(loss=1), 5 * 4),
        ("rounds", (0, 1), 1, Costs(loss=1), 2 + 1 + 1 + 1 + 1),
        # Stage 0 sends 2, stage 1 sends 3: 1 + 2 + 1 + 3 + 1 + 1 + 3 + 1 + 2 + 1 + W.
        ("rounds", (0, 1, 2), 1, Costs(comm=(2, 3)), 17),
        # B of stage 1 brings its W along: 1 + 1 + 2 on the way, 3 B's and W's after F0.
        ("rounds", (0, 1), 1, Costs(splits=(True, False)), 1 + 1 + 2 + 1 + 1),
        ("rounds", (0, 1), 1, Costs(splits=(False, False)), 1 + 1 + 2 + 2),
        # Two in flight leave room for the next F, as nothing waits for W.
        (
            "rounds",
            (0, 1),
            4,
            Costs(comm=1, splits=(False, True), memory_limit=2),
            7 + 9,
        ),
    ],
)
def test_bounds_by_hand(proof, placement, m, costs, by_hand):
    bounds = lower_bounds(Placement(placement), m, costs)
    assert bounds[proof] == pytest.approx(by_hand)
