"""Delays of messages: one number, one per link, one per edge."""

import pytest

from zbpp.core import Costs, Placement, RequestError
from zbpp.core.costs.columns import edge_delays, reduction_delay

SINGLE = Placement.single(4)
V = Placement.wave(4)  # 0 1 2 3 3 2 1 0
ROUND = Placement.interleaved(4, 2)  # 0 1 2 3 0 1 2 3
LINKS = (1.0, 2.0, 3.0)


def test_one_number_serves_all_links():
    assert edge_delays(0.5, SINGLE) == (0.5,) * 3
    assert edge_delays(0.5, V) == (0.5, 0.5, 0.5, 0.0, 0.5, 0.5, 0.5)
    assert edge_delays(0.5, ROUND) == (0.5,) * 7
    assert edge_delays(0.5, Placement.single(1)) == ()


def test_a_link_joins_two_neighbours_wherever_they_meet():
    assert edge_delays(LINKS, SINGLE) == LINKS
    assert edge_delays(LINKS, V) == (1, 2, 3, 0, 3, 2, 1)
    assert edge_delays((*LINKS, 9.0), V) == (1, 2, 3, 0, 3, 2, 1)
    assert edge_delays((*LINKS, 9.0), ROUND) == (1, 2, 3, 9, 1, 2, 3)
    assert edge_delays((*LINKS, 9.0), SINGLE) == LINKS


def test_one_entry_per_edge_is_taken_as_it_is_but_within_a_stage():
    edges = tuple(range(1, 8))
    assert edge_delays(edges, ROUND) == edges
    assert edge_delays(edges, V) == (1, 2, 3, 0, 5, 6, 7)


def test_two_stages_are_neighbours_in_every_placement():
    there_and_back = Placement.interleaved(2, 2)
    assert edge_delays((5.0,), there_and_back) == (5, 5, 5)
    assert edge_delays((5.0, 7.0), there_and_back) == (5, 5, 5)
    assert edge_delays((5.0, 6.0, 7.0), there_and_back) == (5, 6, 7)


def test_where_a_length_fits_twice_it_means_edges():
    assert edge_delays((5.0, 7.0), Placement((0, 1, 0))) == (5, 7)
    assert edge_delays((5.0, 7.0), Placement((1, 0, 2))) == (5, 7)


def test_one_stage_needs_no_link():
    for comm in ((), (3.0,)):
        assert edge_delays(comm, Placement.wave(1)) == (0.0,)
    assert edge_delays((), Placement.single(1)) == ()


@pytest.mark.parametrize("n", [0, 1, 2, 5, 6, 8])
def test_another_length_is_refused_with_the_lengths_that_are_right(n):
    right = r"for 4 stages and 8 chunks; give one number, 3 \(links"
    with pytest.raises(RequestError, match=f"comm has {n} entries {right}"):
        edge_delays((1.0,) * n, V)


def test_a_link_that_is_missing_is_named():
    with pytest.raises(RequestError) as error:
        Costs(comm=LINKS).on(ROUND)
    assert (
        "none joins stage 3 (chunk 3) and stage 0 (chunk 4); add the link from stage 3 "
        "to 0 as entry 4, or give one entry per edge between chunks, 7 in all"
    ) in str(error.value)
    with pytest.raises(RequestError) as error:
        Costs(comm=LINKS).on(Placement((0, 2, 1, 3, 3, 0)))
    assert (
        "none joins stage 0 (chunk 0) and stage 2 (chunk 1); give one entry per edge "
        "between chunks, 5 in all"
    ) in str(error.value)


def test_a_delay_is_the_same_both_ways_and_none_on_the_same_chunk():
    times = Costs(comm=LINKS).on(V)
    assert [times.delay(c, c + 1) for c in range(7)] == list(times.hops)
    assert [times.delay(c + 1, c) for c in range(7)] == list(times.hops)
    assert times.delay(2, 2) == 0.0


def test_a_sum_over_the_stages_goes_up_a_tree_and_down_again():
    messages = [reduction_delay((1.0,) * (p - 1), p) for p in (1, 2, 3, 4, 5, 8, 9)]
    assert messages == [0, 2, 4, 4, 6, 6, 8]
    assert reduction_delay((0.5, 2.0, 0.0), 4) == 2 * 2 * 2.0  # the slowest link


def test_the_sum_takes_what_the_costs_say_or_what_the_links_take():
    assert Costs().on(SINGLE).reduction == 0
    assert Costs(comm=LINKS).on(V).reduction == 4 * 3.0
    assert Costs(comm=LINKS, reduction=0).on(V).reduction == 0
    assert Costs(reduction=7).on(SINGLE).reduction == 7
