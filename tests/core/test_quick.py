"""The quick checks say yes only where the careful ones do."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbpp.core import Check, Costs, Job, Pass, PassKind, Placement, Step, replay
from zbpp.core.clock import Clock, by_clock
from zbpp.core.quick import can_finish, is_plain, quick_rows

F, B, W, BW = PassKind


def shuffled(placement: Placement, m: int, rng: random.Random) -> list[list[Job]]:
    """Orders with each pass once, F before B before W, else at random."""
    orders = []
    for chunks in placement.chunks_of:
        chains: list[list[Job]] = []
        for chunk in chunks:
            for i in range(m):
                kinds = rng.choice(((F, B, W), (F, BW)))
                chains.append([Pass(kind, chunk, i) for kind in kinds])
        # few swaps from a good order on the first stages, many on the others
        order: list[Job] = []
        while chains:
            chain = chains[min(int(rng.expovariate(1.0)), len(chains) - 1)]
            order.append(chain.pop(0))
            chains = [rest for rest in chains if rest]
        orders.append(order)
    return orders


SEEN = set()


@given(
    seed=st.integers(0, 10**9),
    placement=st.sampled_from(
        [
            Placement.single(1),
            Placement.single(3),
            Placement.wave(2),
            Placement.wave(2, 3),
            Placement.interleaved(2, 2),
        ]
    ),
    m=st.integers(1, 4),
)
def test_it_agrees_with_the_replay(seed, placement, m):
    orders = shuffled(placement, m, random.Random(seed))
    rows = replay(orders, Costs().on(placement), n_microbatches=m)
    ends = [len(row) for row in rows] == [len(order) for order in orders]
    assert can_finish(orders, placement, n_microbatches=m) == ends
    SEEN.add(ends)


@given(
    seed=st.integers(0, 10**9),
    placement=st.sampled_from(
        [Placement.single(3), Placement.wave(2), Placement.interleaved(2, 2)]
    ),
    has_steps=st.booleans(),
)
def test_its_times_are_those_of_the_clock(seed, placement, has_steps):
    """Of orders that come to their end, and of some that do not."""
    rng, m = random.Random(seed), 3
    orders = shuffled(placement, m, rng)
    if has_steps:
        orders = [[*order, Step(stage)] for stage, order in enumerate(orders)]
    n = placement.n_chunks
    f, b, w = (tuple(rng.choice((0.0, 0.7, 1.3)) for _ in range(n)) for _ in "fbw")
    times = Costs(f, b, w, comm=0.3, optimizer=0.4).on(placement)
    free = [rng.choice((0.0, 2.1)) for _ in range(placement.n_stages)]
    clock = Clock(times, n_microbatches=m, free=free)
    rows = quick_rows(orders, times, n_microbatches=m, free=free)
    assert rows == by_clock(orders, clock)


def test_other_times_give_other_rows():
    """The control of the comparison above."""
    orders = shuffled(Placement.single(2), 1, random.Random(0))
    found = [
        quick_rows(orders, Costs(comm=comm).on(Placement.single(2)), n_microbatches=1)
        for comm in (0.3, 0.6)
    ]
    assert found[0] != found[1]


@pytest.mark.parametrize("job", [Check(0), Step(1), Pass(F, 1, 0), Pass(F, 0, 2)])
def test_it_leaves_other_jobs_to_the_clock(job):
    orders = [[*GOOD[:2], job], []]
    times = Costs().on(Placement.single(2))
    assert quick_rows(orders, times, n_microbatches=2) is None


def test_both_answers_were_seen():
    assert len(SEEN) == 2


GOOD = [Pass(F, 0, 0), Pass(F, 0, 1), Pass(B, 0, 0), Pass(BW, 0, 1), Pass(W, 0, 0)]


def plain(order: list[Job]) -> bool:
    return is_plain(order, Placement.single(2), 0, n_microbatches=2)


@pytest.mark.parametrize(
    "wrong",
    [
        GOOD[:-1],  # a W is missing
        GOOD[1:],  # an F is missing
        [*GOOD, Pass(W, 0, 0)],  # a W too many
        [*GOOD, Pass(W, 0, 1)],  # a W after a BW
        [*GOOD[:2], GOOD[4], GOOD[2], GOOD[3]],  # W before B
        [*GOOD, Pass(F, 0, 2)],  # no such micro-batch
        [*GOOD, Pass(F, 0, -1)],
        [*GOOD, Pass(F, 1, 0)],  # the chunk of another stage
        [*GOOD, Step(1)],  # the step of another stage
        [Step(0), *GOOD],
        [*GOOD, Step(0), Step(0)],
        [Check(0), *GOOD],  # right, but not plain: looked at with care
        [],
    ],
)
def test_an_order_that_is_not_plain(wrong):
    assert plain(GOOD) and plain([*GOOD, Step(0)])
    assert not plain(wrong)
