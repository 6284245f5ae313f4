"""Formulas of collectives: steps and bytes counted one by one, published figures."""

import math
import random

import pytest

from zbpp.core import RequestError
from zbpp.core.costs.collectives import (
    CollectiveOperation,
    Link,
    collective_time,
    fit_link,
    ring_time,
    tree_time,
    two_level_time,
    zero_bytes,
    zero_volume,
)

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = CollectiveOperation
LINK = Link(alpha=10.0, bandwidth=2.0)


def ring_by_messages(n: int, n_bytes: float) -> tuple[float, list[set[int]]]:
    """Pass parts around a ring, one message a step; the time, and who has what."""
    held = [{rank} for rank in range(n)]
    time, sent = 0.0, list(range(n))
    while any(len(one) < n for one in held):
        time += LINK.time(n_bytes / n)
        sent = [sent[rank - 1] for rank in range(n)]
        for rank, part in enumerate(sent):
            held[rank].add(part)
    return time, held


def doubling_by_messages(n: int, n_bytes: float) -> float:
    """Exchange all that is held with a partner ever farther away."""
    time, held = 0.0, 1
    while held < n:
        time += LINK.time(held * n_bytes / n)
        held *= 2
    return time


@pytest.mark.parametrize("n", [2, 3, 4, 8, 13])
def test_a_ring_takes_the_time_of_its_messages(n: int) -> None:
    time, held = ring_by_messages(n, 240.0)
    assert held == [set(range(n))] * n
    for operation in (ALL_GATHER, REDUCE_SCATTER):
        assert ring_time(operation, 240.0, n, LINK) == pytest.approx(time)
    assert ring_time(ALL_REDUCE, 240.0, n, LINK) == pytest.approx(2 * time)


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_a_tree_takes_the_time_of_its_messages(n: int) -> None:
    expected = doubling_by_messages(n, 240.0)
    assert tree_time(ALL_GATHER, 240.0, n, LINK) == pytest.approx(expected)
    steps = int(math.log2(n))
    assert tree_time(ALL_REDUCE, 240.0, n, LINK) == 2 * steps * LINK.time(240.0)


def test_short_messages_go_along_trees_and_long_ones_around_rings() -> None:
    for n in (4, 8, 64):
        for n_bytes, way in ((1.0, tree_time), (1e9, ring_time)):
            time = collective_time(ALL_REDUCE, n_bytes, n, LINK)
            assert time == way(ALL_REDUCE, n_bytes, n, LINK)
    assert tree_time(ALL_REDUCE, 1e9, 8, LINK) > ring_time(ALL_REDUCE, 1e9, 8, LINK)


def test_one_process_waits_for_nobody() -> None:
    for operation in CollectiveOperation:
        assert collective_time(operation, 1e9, 1, LINK) == 0


def test_two_levels_by_hand() -> None:
    """Nodes of 4 among 16: between 4 nodes a quarter of the bytes, then all inside."""
    near = Link(alpha=1.0, bandwidth=20.0)
    by_hand = 3 * (10 + 6e5 / 4 / 4 / 2) + 3 * (1 + 6e5 / 4 / 20)
    both = dict(node=4, node_link=near)
    time = two_level_time(ALL_GATHER, 6e5, 16, LINK, **both)
    assert time == pytest.approx(by_hand, rel=1e-3)
    assert two_level_time(ALL_REDUCE, 6e5, 16, LINK, **both) == pytest.approx(
        2 * by_hand, rel=1e-3
    )
    assert time < collective_time(ALL_GATHER, 6e5, 16, LINK)
    assert two_level_time(ALL_GATHER, 6e5, 4, LINK, **both) == pytest.approx(
        3 * (1 + 6e5 / 4 / 20), rel=1e-3
    )
    with pytest.raises(RequestError, match="do not fill nodes of 4"):
        two_level_time(ALL_GATHER, 1.0, 6, LINK, **both)


def test_the_published_bandwidths_of_a_v100_fit() -> None:
    """30 GB/s at 1 MB and 130 at 128 MB: 25.8 us and 133.5 GB/s."""
    points = [(1e6, 1e6 / 30e9), (128e6, 128e6 / 130e9)]
    link = fit_link(points)
    assert link.alpha == pytest.approx(25.8e-6, rel=2e-3)
    assert link.bandwidth == pytest.approx(133.5e9, rel=1e-3)
    for size, time in points:
        assert link.time(size) == pytest.approx(time)


def test_a_fit_finds_what_noisy_messages_were_made_of() -> None:
    rng = random.Random(3)
    true = Link(20e-6, 50e9)
    sizes = [2.0**k for k in range(10, 30, 2)] * 5
    link = fit_link([(s, true.time(s) * rng.uniform(0.98, 1.02)) for s in sizes])
    assert link.alpha == pytest.approx(true.alpha, rel=0.02)
    assert link.bandwidth == pytest.approx(true.bandwidth, rel=0.02)
    assert fit_link([(1e6, 1.0), (2e6, 2.1)]).alpha == 0  # never below


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([(1.0, 1.0), (1.0, 2.0)], "two sizes"),
        ([(1.0, 1.0), (2.0, 0.0)], "takes no time"),
        ([(1.0, 2.0), (1e6, 1.0)], "take no longer than small ones"),
    ],
)
def test_what_no_link_explains_is_refused(messages, message) -> None:
    with pytest.raises(RequestError, match=message):
        fit_link(messages)


def test_bytes_a_process_keeps_are_those_of_the_paper() -> None:
    """8.3 B parameters, 64 processes, K = 12, in GB."""
    found = [zero_bytes(level, 8.3e9, 64) / 1e9 for level in range(4)]
    assert found == pytest.approx([132.8, 34.756, 18.416, 2.075], abs=1e-3)
    assert zero_bytes(3, 1.0, 64) * 64 == 16.0
    with pytest.raises(RequestError, match="levels 0 to 3"):
        zero_bytes(4, 1.0, 1)


def test_volumes_of_a_step_are_those_of_the_paper() -> None:
    """70 B in 16 bits on 8 stages, 8 replicas, 32 micro-batches, at 50 GB/s."""
    share = 140e9 / 8
    seconds = [zero_volume(level, share, 8, 32) / 50e9 for level in range(4)]
    assert seconds == pytest.approx([0.6125, 0.6125, 10.106, 29.4], rel=1e-3)
    one = [zero_volume(level, 1.0, 8, 1) for level in range(4)]
    assert one[3] / one[0] == 1.5  # the articles' figure: one micro-batch


def test_a_sum_sends_what_a_scatter_and_a_gather_send() -> None:
    for n in (2, 4, 8):
        apart = sum(
            ring_time(one, 1e6, n, LINK) for one in (ALL_GATHER, REDUCE_SCATTER)
        )
        assert ring_time(ALL_REDUCE, 1e6, n, LINK) == pytest.approx(apart)
        assert zero_volume(0, 1e6, n, 1) == 2e6 * (n - 1) / n
