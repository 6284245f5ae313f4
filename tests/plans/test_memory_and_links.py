"""Plans within memory limits, for the links and losses of the costs."""

from dataclasses import replace

import pytest

from zbpp.core import (
    Costs,
    LimitError,
    Placement,
    peaks,
)
from zbpp.planning import plan
from zbpp.schedules import plan_placement
from zbpp.simulator import simulate, span


def test_a_plan_for_the_links_is_shorter_than_one_without():
    """Control: unequal links, a loss: plans heed them."""
    sizes = {"n_stages": 4, "n_microbatches": 12, "memory_limit": 4}
    for costs in (
        Costs(1.0, 1.0, 0.7, comm=(0.1, 1.5, 0.1), loss=0.3),
        Costs((0.7, 1.2, 1.0, 0.7), 1.0, 0.7, comm=0.6),
    ):
        plain = replace(costs, comm=0.0, loss=0.0)
        blind, aware = (plan("ZB", **sizes, costs=x) for x in (plain, costs))
        assert span(simulate(aware, costs)) < span(simulate(blind, costs))


def test_one_micro_batch_needs_the_largest_memory_of_its_passes():
    """F leaves 1, B adds 3 to it and has 4 inside, W has .5 more."""
    costs = Costs(m_b=1, m_w=4, m_fixed=10, peak_f=2, peak_b=4, peak_w=0.5)
    for placement, more, need in (
        (Placement.single(1), {}, 10 + 1 + 4),
        # B of chunk 1: .5 of chunk 0, .5, and 2
        (Placement.wave(1), {}, 10 + 0.5 + 0.5 + 2),
        (Placement.single(1), {"peak_o": 9.0}, 10 + 9),
    ):
        costs_of = replace(costs, **more, memory_limit=need * 0.999)
        with pytest.raises(LimitError) as error:
            plan_placement(costs_of.on(placement), 2)
        assert error.value.smallest == pytest.approx(need)
        plan_placement(replace(costs_of, memory_limit=need).on(placement), 2)


def test_a_promise_in_m_b_is_one_of_micro_batches_in_flight():
    """ZBH1 promises p of them: the first stage holds 4, and the inside of a B."""
    memory = Costs(m_b=1, m_w=0.5, m_fixed=100, peak_b=3)
    schedule = plan("ZBH1", n_stages=4, n_microbatches=8, costs=memory)
    assert max(peaks(schedule.orders, memory.on(schedule.placement))) == 100 + 4 + 3
    assert schedule.orders == plan("ZBH1", n_stages=4, n_microbatches=8).orders


PROMISES = {
    "ZBH1": 6,
    "ZBH2": 11,
    "ZB": 12,
    "ZBV": 6,
    "ZBVPP": 6,
    "VHalf": 4,
    "VMin": 3,
}


@pytest.mark.parametrize("mode", PROMISES)
def test_modes_keep_the_memory_of_their_names(mode):
    most, size = PROMISES[mode], {"n_stages": 6, "n_microbatches": 14, "effort": "fast"}

    def held(**more: object) -> float:
        schedule = plan(mode, **size, **more)
        return max(peaks(schedule.orders, Costs().on(schedule.placement)))

    assert held() <= most
    if mode in ("ZBH1", "ZBH2"):  # for times that could do with more
        small = {"n_stages": 4, "n_microbatches": 12}
        schedule = plan(mode, **small, costs=Costs(1.0, 1.2, 0.4, 0.1), memory_limit=99)
        on_chunks = Costs().on(schedule.placement)
        assert max(peaks(schedule.orders, on_chunks)) <= {"ZBH1": 4, "ZBH2": 7}[mode]
    assert held(memory_limit=2) <= 2
    if mode != "ZB":  # it needs no more than 11
        assert (held(memory_limit=13) > most) == (mode in ("ZBV", "ZBVPP"))
