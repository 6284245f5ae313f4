"""The one rule "when can a job start", and the replay of whole orders with it."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbpp.core import (
    Check,
    Clock,
    Costs,
    Job,
    Pass,
    PassKind,
    Placement,
    Slot,
    Step,
    parse_job,
    replay,
)
from zbpp.core.clock import by_clock

F, B, W, BW = PassKind
TWO = Placement.single(2)


def clock(costs: Costs, placement: Placement = TWO, n_microbatches: int = 1) -> Clock:
    return Clock(costs.on(placement), n_microbatches=n_microbatches)


def test_a_pass_waits_for_its_input_and_for_its_stage():
    time = clock(Costs(f=2.0, b=3.0, w=4.0, comm=0.5), n_microbatches=2)
    assert time.start(Pass(F, 1, 0)) is None  # its input is not yet computed
    assert time.run(Pass(F, 1, 0)) is None and time.free == [0.0, 0.0]
    assert time.run(Pass(F, 0, 0)) == Slot(Pass(F, 0, 0), 0.0, 2.0)
    assert time.arrival(Pass(F, 1, 0)) == 2.5
    time.run(Pass(F, 0, 1))
    time.run(Pass(F, 1, 0))  # 2.5 to 4.5
    assert time.arrival(Pass(F, 1, 1)) == 4.5 == time.start(Pass(F, 1, 1))
    time.run(Pass(B, 1, 0))  # 4.5 to 7.5: the stage is busy when 1F1 arrives
    assert time.start(Pass(F, 1, 1)) == 7.5
    assert time.start(Pass(B, 0, 0)) == 8.0  # the gradient travels too
    assert time.start(Pass(W, 1, 0)) == 7.5  # W needs nothing from elsewhere
    assert time.start(Pass(W, 0, 0)) is None


def test_the_gradient_of_a_joint_backward_leaves_after_w():
    for kind, start in ((B, 5.0), (BW, 9.0)):
        time = clock(Costs(f=1.0, b=3.0, w=4.0))
        for job in (Pass(F, 0, 0), Pass(F, 1, 0), Pass(kind, 1, 0)):
            time.run(job)
        assert time.start(Pass(BW, 0, 0)) == start


def test_the_step_stands_behind_a_barrier():
    time = clock(Costs(optimizer=5.0))
    for job in (Pass(F, 0, 0), Pass(F, 1, 0), Pass(B, 1, 0), Pass(W, 1, 0)):
        time.run(job)
    assert time.start(Step(1)) is None  # stage 0 has no gradients yet
    time.run(Pass(BW, 0, 0))  # 3 to 5
    assert time.free[1] == 4.0
    assert time.run(Step(1)) == Slot(Step(1), 5.0, 10.0)
    assert time.run(Check(0)) == Slot(Check(0), 5.0, 5.0)


def test_an_iteration_begins_where_the_last_one_has_ended():
    orders = rows("0F0 V 0BW0 O", "1F0 V 1BW0 O")
    times = Costs(validation=0.5).on(TWO)
    slots = replay(orders, times, n_microbatches=1, free=[10, 7], known=[10, 14])
    assert [[slot.start for slot in row] for row in slots] == [
        [10, 11, 16.5, 18.5],
        [11, 14, 14.5, 18.5],
    ]


def rows(*texts: str):
    return [
        [parse_job(cell, stage=stage) for cell in text.split()]
        for stage, text in enumerate(texts)
    ]


def test_replay_gives_every_job_its_earliest_time():
    orders = rows("0F0 0BW0 O", "1F0 1BW0 O")
    slots = replay(orders, Costs(comm=0.25).on(TWO), n_microbatches=1)
    assert [[slot.start for slot in row] for row in slots] == [
        [0.0, 4.5, 6.5],
        [1.25, 2.25, 6.5],
    ]
    assert [slot.job for slot in slots[1]] == orders[1]


def test_replay_leaves_a_row_short_where_it_is_stuck():
    orders = rows("0BW0 0F0", "1F0 1BW0")
    assert replay(orders, Costs().on(TWO), n_microbatches=1) == [[], []]


@pytest.mark.parametrize("shift", [1, 2])
def test_replay_does_not_depend_on_the_order_of_visits(shift):
    """Rename the stages: the same jobs get the same times."""
    texts = ["0F0 0F1 0BW0 0BW1", "1F0 1F1 1BW0 1BW1", "2F0 2BW0 2F1 2BW1"]
    costs = Costs(f=1.5, b=2.5, w=0.5, comm=0.25)
    slots = replay(rows(*texts), costs.on(Placement.single(3)), n_microbatches=2)
    moved = Placement(tuple((chunk + shift) % 3 for chunk in range(3)))
    again = replay(
        rows(*(texts[(stage - shift) % 3] for stage in range(3))),
        costs.on(moved),
        n_microbatches=2,
    )
    assert again == [slots[(stage - shift) % 3] for stage in range(3)]


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


ENDED = set()


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
    has_steps=st.booleans(),
)
def test_orders_of_passes_are_timed_as_job_by_job(seed, placement, m, has_steps):
    """Of orders that come to their end, and of some that do not."""
    rng = random.Random(seed)
    orders = shuffled(placement, m, rng)
    if has_steps:
        orders = [[*order, Step(stage)] for stage, order in enumerate(orders)]
    n = placement.n_chunks
    f, b, w = (tuple(rng.choice((0.0, 0.7, 1.3)) for _ in range(n)) for _ in "fbw")
    times = Costs(f, b, w, comm=0.3, optimizer=0.4).on(placement)
    free = [rng.choice((0.0, 2.1)) for _ in range(placement.n_stages)]
    rows = replay(orders, times, n_microbatches=m, free=free)
    assert rows == by_clock(orders, Clock(times, n_microbatches=m, free=free))
    ENDED.add([len(row) for row in rows] == [len(order) for order in orders])


def test_orders_that_end_and_that_do_not_were_timed():
    assert len(ENDED) == 2


@pytest.mark.parametrize("job", [Check(0), Step(1), Pass(F, 0, 2)])
def test_other_jobs_are_timed_too(job):
    orders = [[Pass(F, 0, 0), job, Pass(F, 0, 1)], []]
    times = Costs(f=2.0).on(TWO)
    rows = replay(orders, times, n_microbatches=2)
    assert rows == by_clock(orders, Clock(times, n_microbatches=2))
