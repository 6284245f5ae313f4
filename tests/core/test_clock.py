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
    RequestError,
    Slot,
    Step,
    Timeline,
    draw,
    parse_job,
    replay,
)
from zbpp.core.clock import by_clock, replay_until_stuck

F, B, W, BW = PassKind
TWO = Placement.single(2)


def rows(*texts: str):
    return [
        [parse_job(cell, stage=stage) for cell in text.split()]
        for stage, text in enumerate(texts)
    ]


def starts(*texts: str, costs: Costs, **more):
    times = costs.on(Placement.single(len(texts)))
    slots = replay(rows(*texts), times, n_microbatches=1, **more)
    return [[slot.start for slot in row] for row in slots]


def test_a_pass_waits_for_its_input_and_for_its_stage():
    costs = Costs(f=2.0, b=3.0, w=4.0, comm=0.5)
    time = Clock(costs.on(TWO), n_microbatches=2)
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


def test_gradients_steps_and_iterations_wait_for_what_they_need():
    costs = Costs(f=1.0, b=3.0, w=4.0)
    assert starts("0F0 0BW0", "1F0 1B0", costs=costs) == [[0, 5], [1, 2]]
    assert starts("0F0 0BW0", "1F0 1BW0", costs=costs) == [[0, 9], [1, 2]]
    # O stands behind a barrier.
    both = starts("0F0 0BW0 O", "1F0 1BW0 O", costs=Costs(comm=0.25))
    assert both == [[0.0, 4.5, 6.5], [1.25, 2.25, 6.5]]
    # An iteration begins where the last one has ended; V waits for the sum.
    late = {"costs": Costs(validation=0.5), "free": [10, 7], "known": [10, 14]}
    again = starts("0F0 V 0BW0 O", "1F0 V 1BW0 O", **late)
    assert again == [[10, 11, 16.5, 18.5], [11, 14, 14.5, 18.5]]
    with pytest.raises(RequestError, match="0BW0 never starts"):
        starts("0BW0 0F0", "1F0 1BW0", costs=Costs())


def test_collectives_run_on_a_lane():
    """F waits for its gather, a sum for the one before, O for the sums of all."""
    order = rows(
        "0UNSHARD 1UNSHARD 0F0 1F0 1BW0 1REDUCE_GRAD 0BW0 0REDUCE_GRAD "
        "1REDUCE_WAIT 0REDUCE_WAIT O"
    )
    one = (1.0, 1.0)
    costs = Costs(one, one, one, 0.0, (0.5, 0.5))
    lanes = {"all_gather": (1.0, 2.5), "reduce_scatter": (2.0, 3.0)}
    times = Costs(**{**vars(costs), **lanes}).on(Placement((0, 0)))
    (slots,) = replay(order, times, n_microbatches=1)
    assert [(str(slot.job), slot.start, slot.end) for slot in slots] == [
        ("0UNSHARD", 0.0, 1.0),
        ("1UNSHARD", 1.0, 3.5),
        ("0F0", 1.0, 2.0),
        ("1F0", 3.5, 4.5),
        ("1BW0", 4.5, 6.5),
        ("1REDUCE_GRAD", 6.5, 9.5),
        ("0BW0", 6.5, 8.5),
        ("0REDUCE_GRAD", 9.5, 11.5),
        ("1REDUCE_WAIT", 9.5, 9.5),
        ("0REDUCE_WAIT", 11.5, 11.5),
        ("O", 11.5, 12.5),
    ]
    needs_none = starts(
        "0UNSHARD 0F0 0B0 0RESHARD 0UNSHARD 0W0", costs=Costs(all_gather=5)
    )
    assert needs_none[0][4:] == [7.0, 7.0], "W needs no parameters"


def test_a_drawing_has_a_line_for_the_lane():
    costs = Costs(all_gather=1, reduce_scatter=2).on(Placement.single(1))
    order = rows("0UNSHARD 0F0 0BW0 0REDUCE_GRAD 0REDUCE_WAIT")
    ((gather, f, bw, total, _),) = replay(order, costs, n_microbatches=1)
    drawn = Timeline(
        "x", Placement.single(1), 1, ((f, bw),), collectives=((gather, total),)
    )
    assert draw(drawn) == "0 | .   F0  BW0 -\n  + U0  .   .   .   R0  -"


@pytest.mark.parametrize("shift", [1, 2])
def test_replay_does_not_depend_on_the_order_of_visits(shift):
    """Rename the stages: the same jobs get the same times."""
    texts = ["0F0 0F1 0BW0 0BW1", "1F0 1F1 1BW0 1BW1", "2F0 2BW0 2F1 2BW1"]
    costs = Costs(f=1.5, b=2.5, w=0.5, comm=0.25)
    slots = replay(rows(*texts), costs.on(Placement.single(3)), n_microbatches=2)
    moved = Placement(tuple((chunk + shift) % 3 for chunk in range(3)))
    renamed = rows(*(texts[(stage - shift) % 3] for stage in range(3)))
    again = replay(renamed, costs.on(moved), n_microbatches=2)
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


PLACEMENTS = (
    Placement.single(1),
    Placement.single(3),
    Placement.wave(2),
    Placement.wave(2, 3),
    Placement.interleaved(2, 2),
)
ENDED = set()


@given(
    seed=st.integers(0, 10**9),
    placement=st.sampled_from(PLACEMENTS),
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
    timed = replay_until_stuck(orders, times, n_microbatches=m, free=free)
    assert timed == by_clock(orders, Clock(times, n_microbatches=m, free=free))
    ENDED.add([len(row) for row in timed] == [len(order) for order in orders])


def test_orders_that_end_and_that_do_not_were_timed():
    assert len(ENDED) == 2


@pytest.mark.parametrize("job", [Check(0), Step(1), Pass(F, 0, 2)])
def test_other_jobs_are_timed_too(job):
    orders = [[Pass(F, 0, 0), job, Pass(F, 0, 1)], []]
    times = Costs(f=2.0).on(TWO)
    timed = replay_until_stuck(orders, times, n_microbatches=2)
    assert timed == by_clock(orders, Clock(times, n_microbatches=2))
