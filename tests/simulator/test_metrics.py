"""Figures of timelines: by hand, of a measured run, and laws that hold for all."""

from dataclasses import replace

import pytest

from zbpp.core import (
    Costs,
    Lane,
    Parts,
    Pass,
    PassKind,
    Placement,
    Slot,
    Step,
    Timeline,
    peaks,
)
from zbpp.planning import plan
from zbpp.simulator import (
    bubble_rate,
    idle,
    makespan,
    memory_over_time,
    peak_memory,
    simulate,
    span,
    stage_span,
    step_time,
    work,
)

F, B, W, BW = PassKind

#     0    2    4    6    8    10   12   14
# 0   F F  .  .  .  .  B B  W W  O O          span 10, work 6, idle 4
# 1   .  .  F F  BW BW BW BW                  span 6, work 6
ROWS = (
    (
        Slot(Pass(F, 0, 0), 100.0, 102.0),
        Slot(Pass(B, 0, 0), 106.0, 108.0),
        Slot(Pass(W, 0, 0), 108.0, 110.0),
        Slot(Step(0), 111.0, 113.0),
    ),
    (
        Slot(Pass(F, 1, 0), 102.0, 104.0),
        Slot(Pass(BW, 1, 0), 104.0, 108.0),
        Slot(Step(1), 111.0, 114.0),
    ),
)
DRAWN = Timeline("drawn", Placement.single(2), 1, ROWS)


def test_times_of_a_timeline_that_starts_late():
    assert [stage_span(DRAWN, stage) for stage in (0, 1)] == [10, 6]
    assert span(DRAWN) == makespan(DRAWN) == 10
    assert step_time(DRAWN) == 14
    assert work(DRAWN) == [6, 6]
    assert idle(DRAWN) == [4, 0]
    assert bubble_rate(DRAWN) == pytest.approx(4 / 10)
    free = simulate(plan("1F1B", n_stages=2, n_microbatches=2), Costs(0, 0, 0))
    assert bubble_rate(free) == span(free) == 0


def test_the_bubble_rate_is_of_the_longest_span_and_the_busiest_stage():
    """In the drawing with a longer BW these are stages 0 and 1."""
    first, (f, bw, o) = DRAWN.slots
    busier = replace(DRAWN, slots=(first, (f, replace(bw, end=110.0), o)))
    assert (work(busier), span(busier)) == ([6, 8], 10)
    assert bubble_rate(busier) == (10 - 8) / 10
    assert idle(busier)[0] / stage_span(busier, 0) == 0.4
    full = simulate(plan("ZBH2", n_stages=4, n_microbatches=8), Costs(optimizer=7))
    assert (span(full), makespan(full), step_time(full)) == (24, 27, 34)
    assert bubble_rate(full) == 0


MEMORY = Costs(
    m_b=(4, 3),
    m_w=(6, 2),
    m_fixed=(10, 0),
    peak_f=(5, 3),
    peak_b=(3, 1),
    peak_w=(1, 0),
    peak_o=(2, 0),
)


def test_memory_is_taken_at_starts_and_freed_at_ends_with_peaks_in_between():
    """Stage 0: F leaves 4 of 5, B 6 of 7 in its place, W none of 7; O takes 2.

    17 |              ____ ____
    16 |   __        |    |    |
    14 |  |  |_______|         |
    12 |  |                    |    ___
    10 |__|                    |___|   |__
           F          B    W         O
    """
    assert memory_over_time(DRAWN, MEMORY) == [
        [
            (100, 15),
            (102, 14),
            (106, 17),
            (108, 17),
            (110, 10),
            (111, 12),
            (113, 10),
        ],
        [(102, 3), (104, 4), (108, 0)],
    ]
    assert peak_memory(DRAWN, MEMORY) == [17, 4]


def test_memory_of_parts_that_start_at_once_follows_from_their_order():
    compute, network = ((lane, 1.0) for lane in (Lane.COMPUTE, Lane.NETWORK))
    costs = Costs(parts=Parts((network,), (compute,), (compute,), layers=2))
    schedule = plan("ZB", n_stages=1, n_microbatches=3, costs=costs)
    timeline, times = simulate(schedule, costs), costs.on(schedule.placement)
    expected = peaks(schedule.rows_for(times), times)
    assert peak_memory(timeline, costs) == expected
    ((*row,),) = timeline.slots
    row.sort(key=lambda slot: (slot.start, slot.end))  # control: times do not tell
    assert peak_memory(replace(timeline, slots=(tuple(row),)), costs) != expected
