"""Metrics of timelines drawn by hand, simulated and as if measured."""

from dataclasses import replace

import pytest

from zbpp.core import (
    Costs,
    Pass,
    PassKind,
    Placement,
    Slot,
    Step,
    Timeline,
)
from zbpp.planning import plan
from zbpp.schedules import post_validated
from zbpp.simulator import (
    bubble_rate,
    idle,
    join,
    makespan,
    memory_over_time,
    overhead,
    peak_memory,
    simulate,
    simulate_iterations,
    span,
    stage_span,
    step_time,
    work,
)
from zbpp.simulator.metrics import memory_scale, waste

#     0    2    4    6    8    10   12   14
# 0   F F  .  .  .  .  B B  W W  O O          span 10, work 6, idle 4
# 1   .  .  F F  BW BW BW BW                  span 6, work 6
DRAWN = Timeline(
    "drawn",
    Placement.single(2),
    1,
    (
        (
            Slot(Pass(PassKind.F, 0, 0), 100.0, 102.0),
            Slot(Pass(PassKind.B, 0, 0), 106.0, 108.0),
            Slot(Pass(PassKind.W, 0, 0), 108.0, 110.0),
            Slot(Step(0), 111.0, 113.0),
        ),
        (
            Slot(Pass(PassKind.F, 1, 0), 102.0, 104.0),
            Slot(Pass(PassKind.BW, 1, 0), 104.0, 108.0),
            Slot(Step(1), 111.0, 114.0),
        ),
    ),
)


def test_times_of_a_drawn_timeline_that_starts_late():
    assert [stage_span(DRAWN, stage) for stage in (0, 1)] == [10, 6]
    assert span(DRAWN) == makespan(DRAWN) == 10
    assert step_time(DRAWN) == 14
    assert work(DRAWN) == [6, 6]
    assert idle(DRAWN) == [4, 0]
    assert bubble_rate(DRAWN) == pytest.approx(4 / 10)
    assert overhead(DRAWN) == pytest.approx(4 / 6)
    free = simulate(plan("1F1B", n_stages=2, n_microbatches=2), Costs(0, 0, 0))
    assert bubble_rate(free) == overhead(free) == span(free) == 0


def test_bubble_rate_is_taken_from_the_span_not_from_the_makespan():
    """ZB-H2 fills every stage's span though the stages start at different times."""
    timeline = simulate(plan("ZBH2", n_stages=4, n_microbatches=8))
    assert (span(timeline), makespan(timeline)) == (24, 27)
    assert bubble_rate(timeline) == overhead(timeline) == 0
    assert (makespan(timeline) - 24) / makespan(timeline) > 0.1


def test_the_optimizer_is_no_part_of_the_bubble():
    schedule = plan("ZBH1", n_stages=3, n_microbatches=4)
    without, with_optimizer = (simulate(schedule, Costs(optimizer=o)) for o in (0, 7))
    assert bubble_rate(without) == bubble_rate(with_optimizer)
    assert step_time(with_optimizer) == step_time(without) + 7


def test_memory_is_taken_at_the_start_of_f_and_given_back_at_ends():
    memory = Costs(m_b=(4, 3), m_w=(1, 2))
    assert memory_over_time(DRAWN, memory) == [
        [(100, 4), (108, 1), (110, 0)],
        [(102, 3), (108, 0)],
    ]
    assert peak_memory(DRAWN, memory) == [4, 3]


def test_peaks_stand_inside_passes_and_fixed_memory_below_all():
    """Stage 0: F leaves 4 of 5, B 6 of 7 in its place, W none of 7; O takes 2.

    17 |              ____ ____
    16 |   __        |    |    |
    14 |  |  |_______|         |
    12 |  |                    |    ___
    10 |__|                    |___|   |__
           F          B    W         O
    """
    memory = Costs(
        m_b=(4, 3),
        m_w=(6, 2),
        m_fixed=(10, 0),
        peak_f=(5, 3),
        peak_b=(3, 0),
        peak_w=(1, 0),
        peak_bw=(3, 1),
        peak_o=(2, 0),
    )
    assert memory_over_time(DRAWN, memory) == [
        [
            (100, 10),
            (100, 15),
            (102, 14),
            (106, 17),
            (108, 16),
            (108, 17),
            (110, 10),
            (111, 12),
            (113, 10),
        ],
        [(102, 3), (104, 4), (108, 0)],
    ]
    assert peak_memory(DRAWN, memory) == [17, 4]


@pytest.mark.parametrize("mode", ["FThenB", "1F1B", "VPP", "ZBH1", "ZBH2", "ZBV"])
def test_memory_ends_at_zero_and_its_maximum_is_the_peak(mode):
    memory = Costs(m_b=1.0, m_w=0.25)
    timeline = simulate(plan(mode, n_stages=3, n_microbatches=7), Costs(3, 2, 1, 0.5))
    curves = memory_over_time(timeline, memory)
    assert all(curve[-1][1] == pytest.approx(0) for curve in curves)
    assert [max(held for _, held in curve) for curve in curves] == pytest.approx(
        peak_memory(timeline, memory)
    )
    for curve in curves:
        times = [time for time, _ in curve]
        assert times == sorted(times)


def test_o_and_v_are_no_waste_between_iterations():
    """Of several iterations idle time is told, of one the bubble rate."""
    schedule = plan("ZBH2", n_stages=4, n_microbatches=8)
    costs = Costs(optimizer=1, validation=1)
    for n in (1, 2):
        whole = join(simulate_iterations(post_validated(schedule), costs, n))
        assert bubble_rate(whole) > 0.03  # it counts V, and O between two steps
        assert waste(whole) == (
            ("idle", pytest.approx(0)) if n > 1 else ("bubble rate", bubble_rate(whole))
        )
    behind = join(simulate_iterations(schedule, costs, 2))
    assert waste(behind) == ("idle", 6 / 56)


def test_the_bubble_rate_is_that_of_the_bottleneck_not_of_one_stage():
    """The drawing with stage 1 busier: span of stage 0, work of stage 1."""
    rows = tuple(
        tuple(
            replace(
                slot, end=slot.end + (2 if slot.job == Pass(PassKind.BW, 1, 0) else 0)
            )
            for slot in row
        )
        for row in DRAWN.rows
    )
    unequal = replace(DRAWN, rows=rows)
    assert (work(unequal), span(unequal)) == ([6, 8], 10)
    assert bubble_rate(unequal) == (10 - 8) / 10
    assert idle(unequal)[0] / stage_span(unequal, 0) == 0.4, "the slowest idles more"


def test_memory_is_shown_in_the_largest_unit_that_it_fills():
    in_bytes = Costs(m_b=2.0**12)
    for name, size in {"MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}.items():
        assert memory_scale(size, [in_bytes]) == (name, size)
        assert memory_scale(1.5 * size, [in_bytes, in_bytes]) == (name, size)
    assert memory_scale(2.0**19, [in_bytes, Costs()]) == ("", 1.0)
    assert memory_scale(2.0**19, [Costs()]) == ("M_B", 1.0)
