"""Formulas of collectives: steps and bytes counted one by one, published figures."""

import math
import random

import pytest

from zbpp.core import (
    CollectiveOperation,
    Link,
    RequestError,
    collective_time,
    fit_link,
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


@pytest.mark.parametrize("n", [2, 3, 8, 13])
def test_long_messages_go_around_rings(n: int) -> None:
    n_bytes = 1e9
    time, held = ring_by_messages(n, n_bytes)
    assert held == [set(range(n))] * n
    for operation in (ALL_GATHER, REDUCE_SCATTER):
        assert collective_time(operation, n_bytes, n, LINK) == pytest.approx(time)
    assert collective_time(ALL_REDUCE, n_bytes, n, LINK) == pytest.approx(2 * time)


@pytest.mark.parametrize("n", [4, 16])
def test_short_messages_go_along_trees(n: int) -> None:
    expected = doubling_by_messages(n, 1.0)
    assert collective_time(ALL_GATHER, 1.0, n, LINK) == pytest.approx(expected)
    steps = int(math.log2(n))
    time = collective_time(ALL_REDUCE, 1.0, n, LINK)
    assert time == pytest.approx(2 * steps * LINK.time(1.0))
    assert time < 2 * ring_by_messages(n, 1.0)[0]
    for operation in CollectiveOperation:  # one process waits for nobody
        assert collective_time(operation, 1e9, 1, LINK) == 0


def test_two_levels_by_hand() -> None:
    """Nodes of 4 among 16: between 4 nodes a quarter of the bytes, then all inside."""
    levels = {"node": 4, "node_link": Link(alpha=1.0, bandwidth=20.0)}
    inside = 3 * (1 + 6e5 / 4 / 20)
    by_hand = 3 * (10 + 6e5 / 4 / 4 / 2) + inside
    for operation, n, expected in (
        (ALL_GATHER, 16, by_hand),
        (ALL_REDUCE, 16, 2 * by_hand),
        (ALL_GATHER, 4, inside),
    ):
        time = collective_time(operation, 6e5, n, LINK, **levels)
        assert time == pytest.approx(expected, rel=1e-3)
    assert by_hand < collective_time(ALL_GATHER, 6e5, 16, LINK)
    with pytest.raises(RequestError, match="do not fill nodes of 4"):
        collective_time(ALL_GATHER, 1.0, 6, LINK, **levels)


def test_a_fit_recovers_the_delay_and_bandwidth() -> None:
    """A V100's published 30 GB/s at 1 MB and 130 at 128 MB; and noisy messages."""
    points = [(1e6, 1e6 / 30e9), (128e6, 128e6 / 130e9)]
    link = fit_link(points)
    assert link.alpha == pytest.approx(25.8e-6, rel=2e-3)
    assert link.bandwidth == pytest.approx(133.5e9, rel=1e-3)
    rng, true = random.Random(3), Link(20e-6, 50e9)
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
def test_times_that_fit_no_link_are_refused(messages, message) -> None:
    with pytest.raises(RequestError, match=message):
        fit_link(messages)
