"""V stands as late as its two rules allow."""

from dataclasses import replace

import pytest

from zbpp.core import (
    Check,
    Pass,
    PassKind,
    Placement,
    Schedule,
    ScheduleError,
    Step,
    parse_job,
    reads,
    writes,
)
from zbpp.planning import plan
from zbpp.schedules import lower, plan_zb_h1, post_validated
from zbpp.schedules.passes import post_validation as module

MODES = ("FThenB", "1F1B", "VPP", "ZBH1", "ZBH2", "ZB", "ZBV", "VHalf", "VMin")
SIZES = ((1, 1), (1, 4), (2, 1), (2, 3), (3, 8), (4, 4), (4, 8), (5, 13), (8, 16))


def _cut(schedule: Schedule, stage: int) -> int:
    return schedule.orders[stage].index(Check(stage))


def test_picture() -> None:
    schedule = post_validated(plan_zb_h1(n_stages=3, n_microbatches=4))
    rows = [" ".join(map(str, order)) for order in schedule.orders]
    assert rows == [
        "0F0 0F1 0F2 V 0B0 0W0 0F3 0B1 0W1 0B2 0W2 0B3 0W3 O",
        "1F0 1F1 V 1B0 1F2 1B1 1W0 1F3 1B2 1W1 1B3 1W2 1W3 O",
        "2F0 V 2B0 2F1 2B1 2F2 2B2 2W0 2F3 2B3 2W1 2W2 2W3 O",
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", SIZES)
def test_rules(mode: str, size: tuple[int, int]) -> None:
    n_stages, n_microbatches = size
    schedule = post_validated(
        plan(mode, n_stages=n_stages, n_microbatches=n_microbatches)
    )
    n_chunks = schedule.placement.n_chunks
    late = set()
    for stage, order in enumerate(schedule.orders):
        assert order[-1] == Step(stage)
        for job in order[_cut(schedule, stage) + 1 : -1]:
            assert isinstance(job, Pass)
            late.update(writes(job, n_chunks))
    for stage, order in enumerate(schedule.orders):
        cut = _cut(schedule, stage)
        for job in order[:cut]:
            assert isinstance(job, Pass) and job.kind is PassKind.F
            assert late.isdisjoint(reads(job, n_chunks))
        after = order[cut + 1]
        assert isinstance(after, Pass)
        # not earlier than needed: the next pass breaks one of the rules
        assert after.kind is not PassKind.F or not late.isdisjoint(
            reads(after, n_chunks)
        )


def test_twice_is_once() -> None:
    once = post_validated(plan_zb_h1(n_stages=2, n_microbatches=2))
    assert post_validated(once) is once


def a_v(*rows: str) -> Schedule:
    """Two stages with two chunks each, in a V; one line of jobs a stage."""
    orders = [
        tuple(parse_job(cell, stage=stage) for cell in row.split())
        for stage, row in enumerate(rows)
    ]
    return Schedule("drawn", Placement.wave(2), 2, tuple(orders))


LATE_INPUT = (  # 1F1 comes before 2B0, but its input after 3B0 of the other stage
    "0F0 3F0 3B0 0F1 0B0 3W0 3F1 3B1 0B1 0W0 0W1 3W1",
    "1F0 2F0 1F1 2B0 1B0 2F1 2B1 1B1 2W0 1W0 2W1 1W1",
)


def test_v_stands_before_a_pass_that_reads_what_another_stage_computes_after_its_v():
    schedule = post_validated(a_v(*LATE_INPUT))
    assert [" ".join(map(str, order)) for order in schedule.orders] == [
        "0F0 3F0 V 3B0 0F1 0B0 3W0 3F1 3B1 0B1 0W0 0W1 3W1 O",
        "1F0 2F0 V 1F1 2B0 1B0 2F1 2B1 1B1 2W0 1W0 2W1 1W1 O",
    ]
    lower(schedule)


def test_v_before_the_first_backward_alone_is_refused_there():
    schedule = a_v(*LATE_INPUT)
    late = tuple(
        (*order[:cut], Check(stage), *order[cut:])
        for stage, order in enumerate(schedule.orders)
        for cut in (module._first_backward(order),)
    )
    assert late[1][3] == Check(1)  # one pass later than it may stand
    with pytest.raises(ScheduleError, match="1F1 comes before V, but reads the activ"):
        lower(replace(schedule, orders=late))


def test_an_earlier_v_makes_others_earlier():
    """V of stage 2 moves before 2F1, that of stage 1 too, though its B is later."""
    schedule = Schedule(
        "drawn",
        Placement((0, 1, 2, 0)),
        2,
        tuple(
            tuple(parse_job(cell, stage=stage) for cell in row.split())
            for stage, row in enumerate(
                (
                    "0F0 3F0 3B0 0F1 3W0 3F1 0B0 3B1 0W0 0B1 3W1 0W1",
                    "1F0 1F1 1B0 1W0 1B1 1W1",
                    "2F0 2F1 2B0 2W0 2B1 2W1",
                )
            )
        ),
    )
    rows = [" ".join(map(str, row)) for row in post_validated(schedule).orders]
    assert rows[1].startswith("1F0 V 1F1") and rows[2].startswith("2F0 V 2F1")
    lower(post_validated(schedule))
