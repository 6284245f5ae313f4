"""V stands as late as its two rules allow."""

import pytest

from zbpp.core import Check, Pass, PassKind, Schedule, Step, reads, writes
from zbpp.modes import plan
from zbpp.schedules import plan_zb_h1, post_validated

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
