"""Costs on a placement: columns over chunks, links, layers, recompute, memory."""

import math
from dataclasses import replace

import pytest

from zbpp.core import (
    Costs,
    LayerCosts,
    LimitError,
    PassKind,
    Placement,
    RequestError,
    Schedule,
    memory_during,
    parse_job,
    peaks,
    recomputed,
)
from zbpp.planning import Plan, PlanRequest, make_plan
from zbpp.schedules import plan_zb_v

F, B, W, BW = PassKind
V = Placement.wave(2)  # 0 1 1 0
ONE, TWO = Placement.single(1), Placement.single(2)


# --- columns, spread over the chunks --------------------------------------------------


@pytest.mark.parametrize(
    ("given", "placement", "column", "spread"),
    [
        # A number is a whole stage's, and split over its chunks.
        ({"f": 4.0}, V, "f", (2.0,) * 4),
        ({"f": 6.0}, Placement((0, 0, 0, 1)), "f", (2.0, 2.0, 2.0, 6.0)),
        ({"optimizer": 8.0}, V, "optimizer", (8.0, 8.0)),
        # One entry a chunk; O is summed over the chunks 0 and 3, and 1 and 2.
        ({"f": (1.0, 2.0, 3.0, 4.0)}, V, "f", (1.0, 2.0, 3.0, 4.0)),
        ({"optimizer": (1.0, 2.0, 4.0, 8.0)}, V, "optimizer", (9.0, 6.0)),
        # A stage of twice the speed takes half the time, in its optimizer step too.
        ({"f": 4.0, "speed": (1, 2)}, V, "f", (2.0, 1.0, 1.0, 2.0)),
        ({"f": 4.0, "speed": 0.5}, V, "f", (4.0,) * 4),
        ({"optimizer": 8.0, "speed": (1, 2)}, V, "optimizer", (8.0, 4.0)),
        ({"m_b": 4.0, "speed": (1, 2)}, V, "m_b", (2.0,) * 4),
        ({"comm": 4.0, "speed": (1, 2)}, TWO, "hops", (4.0,)),
        ({"memory_limit": (3.0, 5.0)}, V, "limit", (3.0, 5.0)),
        # The loss is a part of the last chunk's F.
        ({"f": 2.0, "loss": 0.5}, V, "f", (1.0, 1.0, 1.0, 1.5)),
        ({"f": (1.0, 2.0), "loss": 0.5}, TWO, "f", (1.0, 2.5)),
        # A peak is at least what the pass adds.
        (
            {"m_b": 6.0, "peak_f": (4.0, 1.0, 4.0, 4.0)},
            V,
            "peak_f",
            (4.0, 3.0, 4.0, 4.0),
        ),
        # B may leave more than F, as checkpoints do.
        ({"m_b": (3.0, 2.0), "m_w": 3.0}, TWO, "peak_b", (0.0, 1.0)),
        ({"m_b": (3.0, 2.0), "m_w": 3.0}, TWO, "peak_bw", (0.0, 1.0)),
    ],
)
def test_a_column_is_spread_over_the_chunks(given, placement, column, spread):
    assert getattr(Costs(**given).on(placement), column) == spread


def test_a_backward_that_cannot_be_split_is_one_b_of_both_times():
    times = Costs(b=4.0, w=2.0, m_b=2.0, m_w=1.0, splits=(True, False)).on(V)
    assert times.b == (2.0, 3.0, 3.0, 2.0) and times.w == (1.0, 0.0, 0.0, 1.0)
    assert [times.of_kind(BW, chunk) for chunk in range(4)] == [3.0] * 4
    assert times.m_w == (0.5, 0.0, 0.0, 0.5)  # a BW leaves nothing
    assert times.peak_b[1] == times.peak_bw[1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"b": (1.0, 1.0, 1.0)}, "b has 3 entries for 4 chunks"),
        ({"m_b": (1.0,)}, "m_b has 1 entries for 4 chunks"),
        ({"memory_limit": (1.0,) * 4}, "memory_limit has 4 entries for 2 stages"),
        ({"f": (1.0, 3.0)}, "f has 2 entries for 4 chunks; give one number, or one"),
        ({"comm": (1.0,)}, "comm has 1 entries for 3 edges between chunks"),
        ({"speed": (1.0,)}, "speed has 1 entries for 2 stages"),
        ({"speed": (1.0, 0.0)}, r"speed\[1\] is 0.0; it must be above 0"),
        ({"splits": (True, True, False)}, "splits has 3 entries for 2 stages"),
        ({"splits": (True, 0)}, r"splits\[1\] is 0, not true or false"),
        ({"m_b": -1.0}, "^m_b is -1"),
        ({"memory_limit": -1.0}, "^memory_limit is -1"),
        *(
            ({name: value}, rf"^{name}(\[1\])? is {number}; it must be finite")
            for name in ("f", "comm", "loss", "reduction", "validation")
            for number in (-1.0, math.inf, math.nan)
            for value in (number, (1.0, number))[: 1 + (name in ("f", "comm"))]
        ),
    ],
)
def test_wrong_columns_are_refused_by_name(given, message):
    with pytest.raises(RequestError, match=message):
        Costs(**given).on(V)


# --- links ----------------------------------------------------------------------------

SINGLE, WAVE, ROUND = (
    Placement.single(4),
    Placement.wave(4),
    Placement.interleaved(4, 2),
)
EDGES = tuple(range(1, 8))


@pytest.mark.parametrize(
    ("comm", "placement", "edges"),
    [
        (0.5, SINGLE, (0.5,) * 3),
        (0.5, WAVE, (0.5, 0.5, 0.5, 0.0, 0.5, 0.5, 0.5)),
        (0.5, ONE, ()),
        # One entry an edge is taken as it is, but within a stage.
        (EDGES, ROUND, EDGES),
        (EDGES, WAVE, (1, 2, 3, 0, 5, 6, 7)),
    ],
)
def test_delays_of_the_edges(comm, placement, edges):
    times = Costs(comm=comm).on(placement)
    there = [times.delay(c, c + 1) for c in range(len(edges))]
    back = [times.delay(c + 1, c) for c in range(len(edges))]
    assert there == back == list(edges) and times.delay(0, 0) == 0.0


def test_a_sum_over_the_stages_goes_up_a_tree_and_down_again():
    sizes = (1, 2, 3, 4, 5, 8, 9)
    messages = [Costs(comm=1.0).on(Placement.single(p)).reduction for p in sizes]
    assert messages == [0, 2, 4, 4, 6, 6, 8]
    assert Costs(comm=EDGES).on(WAVE).reduction == 4 * 7  # the slowest edge
    assert Costs(comm=EDGES, reduction=9).on(WAVE).reduction == 9


# --- layers ---------------------------------------------------------------------------

LAYERS = LayerCosts(
    n_layers=4,
    f=(1.0, 2.0, 3.0, 4.0),
    m_b=(10.0, 20.0, 30.0, 40.0),
    m_w=5.0,
    m_r=1.0,
    peak_f=(15.0, 22.0, 90.0, 40.0),
    comm=(0.1, 0.2, 0.3),
    all_gather=(1.0, 2.0, 3.0, 4.0),
    reduce_scatter=0.5,
)


def test_times_and_memories_of_layers_add_up_to_those_of_a_split():
    costs = LAYERS.on(TWO, [1, 3], n_microbatches=4)
    assert (costs.f, costs.b, costs.comm) == ((1.0, 9.0), (1.0, 3.0), (0.1,))
    assert (costs.m_b, costs.m_w) == ((10.0, 90.0), (5.0, 15.0))
    assert (costs.all_gather, costs.reduce_scatter) == ((1.0, 9.0), (0.5, 1.5))
    # A peak is above the memory that the layers before have left.
    assert costs.peak_f == (15.0, 20.0 + 90.0)


def test_every_pass_of_a_chunk_has_an_overhead():
    layers = replace(LAYERS, pass_f=0.5, pass_b=0.25, pass_w=0.125)
    one = layers.on(TWO, [1, 3], n_microbatches=4)
    assert (one.f, one.b, one.w) == ((1.5, 9.5), (1.25, 3.25), (1.125, 3.125))
    four = layers.on(V, [1, 1, 1, 1], n_microbatches=4)
    assert sum(four.f) == sum(one.f) + 2 * 0.5, "two more passes"
    again = layers.on(TWO, [2, 2], n_microbatches=4, recompute=[1])
    assert again.b == (2.0 + 2.0 + 0.25, 2.25), "one pass, its layer's f once more"


def test_a_recomputed_layer_leaves_little_and_its_b_runs_f_again():
    costs = LAYERS.on(TWO, [2, 2], n_microbatches=4, recompute=[1])
    assert (costs.f, costs.b) == ((3.0, 7.0), (2.0 + 2.0, 2.0))
    assert costs.m_b == (10.0 + 1.0, 70.0)
    assert costs.peak_b == (21.0, 0.0)  # 22 - 1 of the forward that runs again


def test_messages_take_a_delay_and_their_bytes():
    layers = LayerCosts(3, message=(100.0, 300.0), bandwidth=(50.0, 200.0), delay=0.5)
    single = Placement.single(3)
    assert layers.on(single, [1, 1, 1], n_microbatches=4).comm == (2.5, 2.0)
    assert layers.on(ONE, [3], n_microbatches=4).comm == 0.0


def test_memory_of_stages_includes_messages_and_batch():
    """Of a V on two stages, both cuts join the stages; the turn is on one."""
    layers = LayerCosts(
        4, m_b=0.0, message=(10.0, 20.0, 30.0), messages_at_once=3,
        batch=(1.0, 0.0, 0.0, 2.0),
    )  # fmt: skip
    split = [1, 1, 1, 1]
    assert layers.on(V, split, n_microbatches=4).on(V).fixed == (90.0 + 12.0, 90.0)
    sent = replace(layers, keeps_sent=True).on(V, split, n_microbatches=4)
    assert sent.on(V).fixed == (90.0 + 4 * 40.0 + 12.0, 90.0 + 4 * 40.0)
    assert layers.on(ONE, [4], n_microbatches=4).on(ONE).fixed == (12.0,)
    assert LayerCosts(4, message=9.0).on(V, split, n_microbatches=4).m_fixed == (0,) * 4


def test_gathered_memory_of_replicas_is_that_of_the_largest_layer():
    layers = LayerCosts(4, whole_gradients=(1, 2, 4, 8), whole_parameters=(5, 1, 1, 3))
    assert layers.on(TWO, [2, 2], n_microbatches=4).m_fixed == (3.0 + 5.0, 12.0 + 3.0)
    on_v = layers.on(V, [1, 1, 1, 1], n_microbatches=4).on(V)
    assert on_v.fixed == (8.0 + 5.0, 4.0 + 1.0), "a chunk, a layer at a time"


@pytest.mark.parametrize(
    ("delay", "placement", "edges"),
    [
        # A link joins two neighbours wherever they meet.
        ((1, 2, 3), SINGLE, (1, 2, 3)),
        ((1, 2, 3), WAVE, (1, 2, 3, 0, 3, 2, 1)),
        ((1, 2, 3, 9), WAVE, (1, 2, 3, 0, 3, 2, 1)),
        ((1, 2, 3, 9), ROUND, (1, 2, 3, 9, 1, 2, 3)),
        ((5, 5), ROUND, (5,) * 7),
        ((1, 2), TWO, (1,)),
    ],
)
def test_delays_of_links(delay, placement, edges):
    n = placement.n_chunks
    costs = LayerCosts(n, delay=delay).on(placement, [1] * n, n_microbatches=4)
    assert costs.on(placement).hops == edges


def test_a_link_that_is_missing_is_named():
    with pytest.raises(RequestError, match="none for the link of stages 3 and 0"):
        LayerCosts(8, delay=(1, 2, 3)).on(ROUND, [1] * 8, n_microbatches=8)


@pytest.mark.parametrize("split", ([4], [2, 1], [0, 4]))
def test_a_split_that_does_not_fit_is_refused(split):
    with pytest.raises(RequestError, match="must have 2 entries"):
        LAYERS.on(TWO, split, n_microbatches=4)


COSTS = Costs(
    f=(1, 2, 3, 4), b=2.0, w=1.5, comm=0.3, optimizer=0.5, loss=0.25,
    reduction=0.1, validation=0.2,
    m_b=(1, 2, 3, 4), m_w=0.4, memory_limit=50.0, m_fixed=1.0, peak_f=(2, 3, 4, 5),
    peak_b=0.5, peak_w=0.25, m_r=0.1,
)  # fmt: skip


# --- recompute ------------------------------------------------------------------------


def schedule(**more: object) -> Schedule:
    return replace(plan_zb_v(n_stages=2, n_microbatches=4), **more)


ALL_AGAIN = schedule(recompute=(True,) * 4)
PARTS_AGAIN = schedule(split=(2, 1, 1, 4), recompute=((0,), False, False, (0, 1, 2)))


def test_a_recomputed_chunk_takes_f_longer_in_b_and_leaves_m_r() -> None:
    costs = recomputed(COSTS, schedule(recompute=(True, False, False, True)))
    assert costs.b == (2, 1, 1, 5)  # without the loss
    assert costs.m_b == (0.05, 2, 3, 0.05)
    assert costs.on(V).peak_b[0] == pytest.approx(2 - 0.05)  # F's, on m_r
    for nothing in (schedule(), schedule(recompute=(False,) * 4)):
        assert recomputed(COSTS, nothing) == COSTS
    free = replace(COSTS, m_r=None, memory_limit=None)
    assert recomputed(free, ALL_AGAIN).m_b == (0, 0, 0, 0)


def test_a_part_of_a_chunk_is_a_share_of_its_layers() -> None:
    costs = recomputed(COSTS, PARTS_AGAIN)
    assert costs.b == (1.5, 1, 1, 4)
    assert costs.m_b == pytest.approx((0.525, 2, 3, 1.0375))


@pytest.mark.parametrize(
    ("costs", "again", "message"),
    [
        (COSTS, replace(PARTS_AGAIN, split=None), "does not name how many"),
        (replace(COSTS, m_r=None), ALL_AGAIN, "no m_r"),
        (replace(COSTS, splits=(True, False)), ALL_AGAIN, "stage 1 cannot split"),
    ],
)
def test_impossible_recompute_is_refused(costs, again, message) -> None:
    with pytest.raises(RequestError, match=message):
        recomputed(costs, again)


# --- memory along an order ------------------------------------------------------------


def order(text: str):
    return tuple(parse_job(cell, stage=0) for cell in text.split())


@pytest.mark.parametrize(
    ("memory", "jobs", "used"),
    [
        # F takes at its start, B and W give back at their end.
        ({"m_w": 0.4}, "0F0 0F1 0B0 0W0 0BW1 O", [1, 2, 2, 1.4, 1, 0]),
        # F leaves 1; B computes 3 again, has 4 inside, and leaves 3 until W.
        (
            {"m_w": 3, "peak_b": 4},
            "0F0 0F1 0B0 0W0 0F2 0B1 0W1 0B2 0W2",
            [1, 2, 6, 4, 2, 6, 4, 5, 3],
        ),
        # Two delayed W's keep 6, two F's in flight keep 2.
        ({"m_w": 3}, "0F0 0F1 0B0 0B1 0W0 0W1", [1, 2, 4, 6, 6, 3]),
        ({"m_w": 3}, "0F0 0F1 0BW0 0BW1", [1, 2, 4, 3]),
        # Fixed memory and the peak of an optimizer step count.
        (
            {"m_fixed": 10, "peak_w": 0.25, "peak_o": 4},
            "0F0 0B0 0W0 O",
            [11, 11, 10.75, 14],
        ),
    ],
)
def test_memory_of_a_stage_during_its_jobs(memory, jobs, used):
    costs = Costs(**memory).on(ONE)
    assert memory_during(order(jobs), costs, stage=0) == pytest.approx(used)
    assert peaks([order(jobs)], costs) == [pytest.approx(max(used))]
    assert peaks([()], costs) == [costs.fixed[0]]


def planned(row: str, costs: Costs) -> Plan:
    """The plan of one stage's order, under the memory limit of the costs."""
    orders = (order(row),)
    schedule = Schedule("given", ONE, row.count("F"), orders)
    return make_plan(PlanRequest(schedule=schedule, costs=costs))


def test_a_limit_counts_all_memory_and_is_shown_in_bytes():
    gib = 2.0**30
    model = Costs(
        m_b=gib,
        m_w=2 * gib,
        m_fixed=9 * gib,
        memory_limit=11 * gib,
    )
    assert planned("0F0 0B0 0W0 O", model).peak == 11 * gib
    for worse in ({"m_fixed": 10 * gib}, {"peak_b": 2 * gib}, {"peak_o": 3 * gib}):
        with pytest.raises(
            LimitError, match=r"needs memory 12\.0 GiB .*over the limit"
        ):
            planned("0F0 0B0 0W0 O", replace(model, **worse))


def test_a_limit_is_exact_to_rounding():
    row = "0F0 0B0 0F1 0B1 0W0 0W1"
    found = planned(row, Costs(m_w=0.4, memory_limit=1.4))
    assert found.schedule.orders == (order(row),)
    with pytest.raises(LimitError, match=r"needs memory 1\.4 on stage 0, .* 1\.39"):
        planned(row, Costs(m_w=0.4, memory_limit=1.39))
