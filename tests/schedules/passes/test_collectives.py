"""Collectives of replicas, placed among the passes of a stage."""

from dataclasses import replace

import pytest

from zbpp.core import (
    Check,
    Collective,
    CollectiveKind,
    Pass,
    PassKind,
    Placement,
    RequestError,
    Schedule,
    ScheduleError,
    Send,
    Step,
    TiedGradient,
    at_check,
    parse_job,
    parse_schedule,
    schedule_text,
)
from zbpp.planning import plan
from zbpp.schedules import (
    add_collectives,
    lower,
    post_validated,
    to_torch_csv,
    without_collectives,
)

MODES = ("FThenB", "1F1B", "VPP", "ZBH1", "ZBH2", "ZBV", "VHalf")
SHARDINGS = (
    {"shards": False},
    {"shards": True, "ahead": 2},
    {"shards": True, "reduces": "every", "ahead": 0},
)
UNSHARD, RESHARD, REDUCE_GRAD, REDUCE_WAIT = CollectiveKind


def schedule_of(*rows: str, stage_of: tuple[int, ...], m: int) -> Schedule:
    orders = [
        tuple(parse_job(cell, stage=stage) for cell in row.split())
        for stage, row in enumerate(rows)
    ]
    return Schedule("drawn", Placement(stage_of), m, tuple(orders))


def rows_of(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, order)) for order in schedule.orders]


# The last W of chunk 0 is 0W0: what counts is the order, not the micro-batch.
DRAWN = schedule_of(
    "0F0 3F0 3BW0 0F1 3F1 3BW1 0B0 0B1 0W1 0W0 O",
    "1F0 2F0 2B0 1F1 1B0 2F1 2B1 1B1 2W0 2W1 1W0 1W1 O",
    stage_of=(0, 1, 1, 0),
    m=2,
)


def test_picture_of_replicated_stages() -> None:
    assert rows_of(add_collectives(DRAWN, shards=False)) == [
        "0F0 3F0 3BW0 0F1 3F1 3BW1 3REDUCE_GRAD 0B0 0B1 0W1 0W0 0REDUCE_GRAD "
        "3REDUCE_WAIT 0REDUCE_WAIT O",
        "1F0 2F0 2B0 1F1 1B0 2F1 2B1 1B1 2W0 2W1 2REDUCE_GRAD 1W0 1W1 1REDUCE_GRAD "
        "2REDUCE_WAIT 1REDUCE_WAIT O",
    ]


def test_picture_of_sharded_stages() -> None:
    assert rows_of(add_collectives(DRAWN, shards=True)) == [
        "0UNSHARD 3UNSHARD 0F0 3F0 3BW0 0F1 3F1 3BW1 3REDUCE_GRAD 3RESHARD 0B0 0B1 "
        "0RESHARD 0W1 0W0 0REDUCE_GRAD 3REDUCE_WAIT 0REDUCE_WAIT O",
        "1UNSHARD 2UNSHARD 1F0 2F0 2B0 1F1 1B0 2F1 2B1 2RESHARD 1B1 1RESHARD 2W0 2W1 "
        "2REDUCE_GRAD 1W0 1W1 1REDUCE_GRAD 2REDUCE_WAIT 1REDUCE_WAIT O",
    ]
    late = add_collectives(DRAWN, shards=True, ahead=0)
    assert rows_of(late)[0].startswith("0UNSHARD 0F0 3UNSHARD 3F0 3BW0")


def test_picture_of_gradients_that_are_sharded_at_once() -> None:
    assert rows_of(add_collectives(DRAWN, shards=False, reduces="every")) == [
        "0F0 3F0 3BW0 3REDUCE_GRAD 0F1 3F1 3REDUCE_WAIT 3BW1 3REDUCE_GRAD 0B0 0B1 "
        "0W1 0REDUCE_GRAD 0REDUCE_WAIT 0W0 0REDUCE_GRAD 3REDUCE_WAIT 0REDUCE_WAIT O",
        "1F0 2F0 2B0 1F1 1B0 2F1 2B1 1B1 2W0 2REDUCE_GRAD 2REDUCE_WAIT 2W1 "
        "2REDUCE_GRAD 1W0 1REDUCE_GRAD 1REDUCE_WAIT 1W1 1REDUCE_GRAD "
        "2REDUCE_WAIT 1REDUCE_WAIT O",
    ]


@pytest.mark.parametrize("sharding", SHARDINGS, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_validated_or_not_they_stand_where_they_may(mode: str, sharding: dict) -> None:
    """Building a `Schedule` checks the rules; here is what is promised besides."""
    plain = plan(mode, n_stages=3, n_microbatches=4)
    first, then = add_collectives(plain, **sharding), post_validated(plain)
    for schedule in (
        first,
        post_validated(first),
        add_collectives(then, **sharding),
        add_collectives(post_validated(first), **sharding),  # in place of those there
    ):
        lower(schedule, ties=[(0, plain.placement.n_chunks - 1)])
        bare = without_collectives(schedule).orders
        assert bare == (then if schedule.is_post_validated else plain).orders
        for order in schedule.orders:
            _check_order(order, **sharding)
    again = parse_schedule(schedule_text(first))
    assert again == first


def _check_order(order, *, shards, reduces="last", ahead=1) -> None:
    passes = [job for job in order if isinstance(job, Pass)]
    places = {job: column for column, job in enumerate(order)}
    gathers = [j for j in order if isinstance(j, Collective) and j.kind is UNSHARD]
    assert len(gathers) == shards * len({p.chunk for p in passes})
    for job in gathers:
        first = next(p for p in passes if p.chunk == job.chunk)
        between = [p for p in passes if places[job] < places[p] < places[first]]
        assert len(between) == min(ahead, passes.index(first))
    sums = [j for j in order if isinstance(j, Collective) and j.kind is REDUCE_GRAD]
    n_weights = sum(job.kind in (PassKind.W, PassKind.BW) for job in passes)
    n_chunks = len({job.chunk for job in passes})
    assert len(sums) == (n_chunks if reduces == "last" else n_weights)
    before = at_check(order)[0]
    assert not any(isinstance(j, Collective) and j.kind is not UNSHARD for j in before)
    assert isinstance(order[-1], Step)


def test_a_wait_is_the_last_thing_of_a_schedule_without_steps() -> None:
    bare = replace(DRAWN, orders=tuple(order[:-1] for order in DRAWN.orders))
    order = add_collectives(bare, shards=True).orders[0]
    assert [str(job) for job in order[-3:]] == [
        "0REDUCE_GRAD",
        "3REDUCE_WAIT",
        "0REDUCE_WAIT",
    ]
    assert [str(i) for i in lower(add_collectives(bare, shards=True))[0][-2:]] == [
        "reduce the gradient norm over all stages",
        "O",
    ]


def test_v_looks_through_gathers() -> None:
    schedule = add_collectives(plan("ZBH1", n_stages=2, n_microbatches=2), shards=True)
    assert rows_of(post_validated(schedule)) == [
        "0UNSHARD 0F0 0F1 V 0B0 0W0 0B1 0RESHARD 0W1 0REDUCE_GRAD 0REDUCE_WAIT O",
        "1UNSHARD 1F0 V 1B0 1F1 1B1 1RESHARD 1W0 1W1 1REDUCE_GRAD 1REDUCE_WAIT O",
    ]


def test_a_tied_gradient_is_sent_when_it_is_added_up() -> None:
    schedule = plan("ZBH1", n_stages=2, n_microbatches=2)
    ties = [(0, 1)]
    for one, before in (
        (schedule, "0W1"),
        (add_collectives(schedule, shards=False), "0REDUCE_WAIT"),
    ):
        program = lower(one, ties=ties)[0]
        (at,) = (
            column
            for column, i in enumerate(program)
            if isinstance(i, Send) and isinstance(i.value, TiedGradient)
        )
        assert str(program[at - 1]) == before


@pytest.mark.parametrize(
    "wrong", [{"reduces": "never"}, {"ahead": -1}], ids=["reduces", "ahead"]
)
def test_what_is_no_way_is_refused(wrong: dict) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))):
        add_collectives(DRAWN, shards=True, **wrong)


# torch's CSV


@pytest.mark.parametrize("sharding", SHARDINGS, ids=str)
@pytest.mark.parametrize("mode", ["1F1B", "VPP", "ZBV"])
def test_torch_reads_them_with_the_transfers(mode: str, sharding: dict) -> None:
    torch = pytest.importorskip("torch.distributed.pipelining.schedules")
    plain = plan(mode, n_stages=3, n_microbatches=4)
    schedule = add_collectives(plain, **sharding)
    stage_of = plain.placement.stage_of
    rows = {
        rank: [torch._Action.from_str(cell) for cell in line.split(",")]
        for rank, line in enumerate(to_torch_csv(schedule).splitlines())
    }
    names = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
    beside = {k for k in torch._ComputationType if k.value in names}
    for row in rows.values():
        found = [action for action in row if action.computation_type in beside]
        assert bool(found) and sharding["shards"] == (
            torch._Action(row[0].stage_index, torch.UNSHARD) in row
        )
        for action in found:  # torch's W wants its parameters gathered
            if action.computation_type is torch.RESHARD:
                later = row[row.index(action) :]
                assert sum(a.stage_index == action.stage_index for a in later) == 1
    transfers = {
        rank: [a for a in row if a.computation_type not in beside]
        for rank, row in rows.items()
    }
    torch._simulate_comms_compute(transfers, stage_of.__getitem__, len(stage_of))
    del transfers[1][transfers[1].index(next(
        a for a in transfers[1] if a.computation_type is torch.SEND_F
    ))]  # fmt: skip
    with pytest.raises(ValueError, match="not progressing"):
        torch._simulate_comms_compute(transfers, stage_of.__getitem__, len(stage_of))


def test_torch_frees_parameters_behind_the_last_pass() -> None:
    row = to_torch_csv(add_collectives(DRAWN, shards=True)).splitlines()[0]
    assert "0W0,0REDUCE_GRAD,0RESHARD" in row and row.count("0RESHARD") == 1


def test_a_wrong_place_is_refused_when_a_file_is_read() -> None:
    text = schedule_text(add_collectives(DRAWN, shards=True))
    wrong = text.replace('"0RESHARD", ', "").replace('"0B1"', '"0RESHARD", "0B1"')
    assert parse_schedule(text) and wrong != text
    with pytest.raises(ScheduleError, match="0B1 needs the parameters of chunk 0"):
        parse_schedule(wrong)
    assert Check(0) not in parse_schedule(text).orders[0]
