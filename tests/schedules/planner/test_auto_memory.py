"""auto and the true memory: ties by what is really held, lists per stage dealt."""

from dataclasses import replace

from zbpp.core import (
    Costs,
    MemoryModel,
    Placement,
    Schedule,
    Step,
    parse_job,
    peaks,
)
from zbpp.modes import plan
from zbpp.schedules.planner.auto import Candidate

GIB = 2.0**30


def by_hand(text: str) -> Schedule:
    row = tuple(parse_job(cell, stage=0) for cell in text.split())
    return Schedule("by hand", Placement.single(1), 2, ((*row, Step(0)),))


def test_a_tie_in_time_goes_to_less_memory_as_it_really_is():
    """Peaks of B decide: one by one holds 1 and more inside, both at once hold 2."""
    one_by_one = by_hand("0F0 0B0 0W0 0F1 0B1 0W1")
    at_once = by_hand("0F0 0F1 0BW0 0BW1")
    for memory, best in (
        (MemoryModel(), one_by_one),
        (MemoryModel(peak_b=5, peak_bw=0), at_once),
        (MemoryModel(m_w=4), one_by_one),
    ):
        both = [Candidate(one, Costs(), memory) for one in (one_by_one, at_once)]
        assert (
            both[0].span == both[1].span
            and both[0].barrier_step == both[1].barrier_step
        )
        first, second = both if best is one_by_one else both[::-1]
        assert first.is_better_than(second)
        assert not second.is_better_than(first)


def test_lists_per_stage_of_any_memory_let_all_placements_compete():
    """In 4 stages of p M_B the V has no bubble; lists of 4 do not rule it out."""
    memory = MemoryModel(
        m_b=(GIB,) * 4,
        m_w=(GIB / 2,) * 4,
        m_fixed=(9 * GIB, 8 * GIB, 8 * GIB, 9 * GIB),
        peak_b=(GIB / 4,) * 4,
        limit=14 * GIB,
    )
    best = plan("auto", n_stages=4, n_microbatches=8, memory=memory, effort="fast")
    assert best.placement == Placement.wave(4)
    chunks = replace(memory, m_fixed=(5 * GIB, *(4 * GIB,) * 6, 5 * GIB), m_b=GIB)
    best = plan("auto", n_stages=4, n_microbatches=8, memory=chunks, effort="fast")
    assert best.placement.n_chunks == 8  # a list of 8 is for two chunks a stage


def test_auto_holds_no_more_than_any_mode_of_the_same_times():
    """F, B, W of 1: the V without a bubble holds p M_B and the inside of one pass."""
    memory = MemoryModel(m_b=1, m_w=1.5, m_fixed=20, peak_b=1, peak_w=0.25)
    best = plan("auto", n_stages=4, n_microbatches=8, memory=memory, effort="fast")
    held = max(peaks(best.orders, memory.on(best.placement)))
    found = Candidate(best, Costs(), memory)
    for mode in ("1F1B", "ZBH1", "ZBH2", "ZBV", "VHalf", "VMin", "VPP"):
        other = plan(mode, n_stages=4, n_microbatches=8, memory=memory, effort="fast")
        rival = Candidate(other, Costs(), memory)
        assert not rival.is_better_than(found), mode
    assert held <= 20 + 2 * 4 + 1
