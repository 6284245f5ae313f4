"""Passes over schedules: collectives of replicas, post-validation, and torch's CSV."""

import csv
import io

import pytest

from zbpp.core import (
    Check,
    Collective,
    CollectiveKind,
    PassKind,
    Placement,
    RequestError,
    Schedule,
    ScheduleError,
    Step,
    at_check,
    parse_job,
    parse_schedule,
    reads,
    schedule_text,
    writes,
)
from zbpp.planning import MODES, plan
from zbpp.schedules import (
    add_collectives,
    lower,
    plan_zb_h1,
    post_validated,
    to_torch_csv,
    torch_schedule_name,
)

F, B, W, BW = PassKind
UNSHARD, RESHARD, REDUCE_GRAD, REDUCE_WAIT = CollectiveKind
SHARDINGS = (
    {"shards": False},
    {"shards": True},
    {"shards": True, "reduces": "every"},
)


def schedule_of(*rows: str, stage_of: tuple[int, ...], m: int) -> Schedule:
    orders = tuple(
        tuple(parse_job(cell, stage=stage) for cell in row.split())
        for stage, row in enumerate(rows)
    )
    return Schedule("drawn", Placement(stage_of), m, orders)


def rows_of(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, order)) for order in schedule.orders]


# --- collectives ----------------------------------------------------------------------

# The last W of chunk 0 is 0W0: what counts is the order, not the micro-batch.
DRAWN = schedule_of(
    "0F0 3F0 3BW0 0F1 3F1 3BW1 0B0 0B1 0W1 0W0 O",
    "1F0 2F0 2B0 1F1 1B0 2F1 2B1 1B1 2W0 2W1 1W0 1W1 O",
    stage_of=(0, 1, 1, 0),
    m=2,
)
WITH_COLLECTIVES = [
    (
        {"shards": False},
        "0F0 3F0 3BW0 0F1 3F1 3BW1 3REDUCE_GRAD 0B0 0B1 0W1 0W0 0REDUCE_GRAD "
        "3REDUCE_WAIT 0REDUCE_WAIT O",
        "1F0 2F0 2B0 1F1 1B0 2F1 2B1 1B1 2W0 2W1 2REDUCE_GRAD 1W0 1W1 1REDUCE_GRAD "
        "2REDUCE_WAIT 1REDUCE_WAIT O",
    ),
    (
        {"shards": True},
        "0UNSHARD 3UNSHARD 0F0 3F0 3BW0 0F1 3F1 3BW1 3REDUCE_GRAD 3RESHARD 0B0 0B1 "
        "0RESHARD 0W1 0W0 0REDUCE_GRAD 3REDUCE_WAIT 0REDUCE_WAIT O",
        "1UNSHARD 2UNSHARD 1F0 2F0 2B0 1F1 1B0 2F1 2B1 2RESHARD 1B1 1RESHARD 2W0 2W1 "
        "2REDUCE_GRAD 1W0 1W1 1REDUCE_GRAD 2REDUCE_WAIT 1REDUCE_WAIT O",
    ),
    (
        {"shards": False, "reduces": "every"},
        "0F0 3F0 3BW0 3REDUCE_GRAD 0F1 3F1 3REDUCE_WAIT 3BW1 3REDUCE_GRAD 0B0 0B1 "
        "0W1 0REDUCE_GRAD 0REDUCE_WAIT 0W0 0REDUCE_GRAD 3REDUCE_WAIT 0REDUCE_WAIT O",
        "1F0 2F0 2B0 1F1 1B0 2F1 2B1 1B1 2W0 2REDUCE_GRAD 2REDUCE_WAIT 2W1 "
        "2REDUCE_GRAD 1W0 1REDUCE_GRAD 1REDUCE_WAIT 1W1 1REDUCE_GRAD "
        "2REDUCE_WAIT 1REDUCE_WAIT O",
    ),
]


@pytest.mark.parametrize(("options", "first", "second"), WITH_COLLECTIVES)
def test_collectives_are_as_drawn(options, first, second):
    assert rows_of(add_collectives(DRAWN, **options)) == [first, second]


@pytest.mark.parametrize("sharding", SHARDINGS, ids=str)
@pytest.mark.parametrize("mode", ["FThenB", "1F1B", "VPP", "ZBH2", "ZBV"])
def test_collectives_are_put_in_before_or_after_validation_and_leave_the_rest(
    mode, sharding
):
    plain = plan(mode, n_stages=3, n_microbatches=4)
    first, then = add_collectives(plain, **sharding), post_validated(plain)
    assert parse_schedule(schedule_text(first)) == first
    assert first.without(Collective).orders == plain.orders
    for schedule in (
        post_validated(first),
        add_collectives(then, **sharding),
        add_collectives(post_validated(first), **sharding),  # in place of those there
    ):
        lower(schedule, ties=[(0, plain.placement.n_chunks - 1)])
        assert schedule.without(Collective).orders == then.orders
        for order in schedule.orders:
            collectives = [x for x in at_check(order)[0] if isinstance(x, Collective)]
            assert {x.kind for x in collectives} <= {UNSHARD}


def test_unknown_reductions_are_refused():
    with pytest.raises(RequestError, match="reduces"):
        add_collectives(DRAWN, shards=True, reduces="never")


# --- post-validation ------------------------------------------------------------------


def test_v_is_as_drawn():
    assert rows_of(post_validated(plan_zb_h1(n_stages=3, n_microbatches=4))) == [
        "0F0 0F1 0F2 V 0B0 0W0 0F3 0B1 0W1 0B2 0W2 0B3 0W3 O",
        "1F0 1F1 V 1B0 1F2 1B1 1W0 1F3 1B2 1W1 1B3 1W2 1W3 O",
        "2F0 V 2B0 2F1 2B1 2F2 2B2 2W0 2F3 2B3 2W1 2W2 2W3 O",
    ]
    sharded = add_collectives(plan("ZBH1", n_stages=2, n_microbatches=2), shards=True)
    assert rows_of(post_validated(sharded)) == [  # V looks through gathers
        "0UNSHARD 0F0 0F1 V 0B0 0W0 0B1 0RESHARD 0W1 0REDUCE_GRAD 0REDUCE_WAIT O",
        "1UNSHARD 1F0 V 1B0 1F1 1B1 1RESHARD 1W0 1W1 1REDUCE_GRAD 1REDUCE_WAIT O",
    ]


VALIDATED = {
    "1F1 comes before 2B0, but its input after 3B0 of the other stage": (
        (
            "0F0 3F0 3B0 0F1 0B0 3W0 3F1 3B1 0B1 0W0 0W1 3W1 O",
            "1F0 2F0 1F1 2B0 1B0 2F1 2B1 1B1 2W0 1W0 2W1 1W1 O",
        ),
        (0, 1, 1, 0),
        ["0F0 3F0", "1F0 2F0"],
    ),
    "V of stage 2 moves before 2F1, that of stage 1 too, though its B is later": (
        (
            "0F0 3F0 3B0 0F1 3W0 3F1 0B0 3B1 0W0 0B1 3W1 0W1 O",
            "1F0 1F1 1B0 1W0 1B1 1W1 O",
            "2F0 2F1 2B0 2W0 2B1 2W1 O",
        ),
        (0, 1, 2, 0),
        ["0F0 3F0", "1F0", "2F0"],
    ),
}


@pytest.mark.parametrize("name", VALIDATED)
def test_an_earlier_v_makes_others_earlier(name):
    rows, stage_of, before = VALIDATED[name]
    schedule = post_validated(schedule_of(*rows, stage_of=stage_of, m=2))
    assert [row.split(" V ")[0] for row in rows_of(schedule)] == before
    check_as_late_as_possible(schedule)


@pytest.mark.parametrize("mode", sorted({*MODES} - {"DualPipeV", "Combined1F1B"}))
def test_v_is_placed_as_late_as_its_two_rules_allow(mode):
    for p, m in ((1, 1), (1, 4), (2, 3), (3, 8), (4, 4), (5, 13)):
        sizes = {"n_stages": p, "n_microbatches": m, "effort": "fast"}
        check_as_late_as_possible(post_validated(plan(mode, **sizes)))


def check_as_late_as_possible(schedule):
    assert post_validated(schedule) is schedule
    n, late = schedule.placement.n_chunks, set()
    halves = [at_check(order) for order in schedule.orders]
    for stage, (_, rest) in enumerate(halves):
        assert rest[-1] == Step(stage) and rest[0] == Check(stage)
        for job in rest[1:-1]:
            late.update(writes(job, n))
    for before, rest in halves:
        for job in before:
            assert job.kind is F and late.isdisjoint(reads(job, n))
        # not earlier than needed: the next pass breaks one of the rules
        assert rest[1].kind is not F or not late.isdisjoint(reads(rest[1], n))
    lower(schedule)


def test_a_v_behind_a_pass_that_reads_what_comes_later_is_refused():
    """Each V comes before the first backward, and 1F1 before that of its stage."""
    first, second = VALIDATED[next(iter(VALIDATED))][0]
    rows = first.replace("3B0", "V 3B0"), second.replace("2B0", "V 2B0")
    with pytest.raises(ScheduleError, match="1F1 comes before V, but reads the activ"):
        lower(schedule_of(*rows, stage_of=(0, 1, 1, 0), m=2))


# --- torch's CSV ----------------------------------------------------------------------


def torch_schedules():
    return pytest.importorskip("torch.distributed.pipelining.schedules")


@pytest.mark.parametrize("mode", MODES)
def test_torch_knows_every_cell_and_the_placement(mode):
    torch = torch_schedules()
    placed = pytest.importorskip("torch.distributed.pipelining._utils")
    schedule = plan(mode, n_stages=4, n_microbatches=8)
    rows = list(csv.reader(io.StringIO(to_torch_csv(schedule))))
    assert [len(row) for row in rows] == [len(o) - 1 for o in schedule.orders]
    assert all(repr(torch._Action.from_str(c)) == c for row in rows for c in row)
    theirs = torch.get_schedule_class(torch_schedule_name(schedule.placement))
    each = schedule.placement.n_chunks // 4
    assert issubclass(theirs, torch.PipelineScheduleSingle) == (each == 1)
    style = "v" if theirs is torch.ScheduleZBVZeroBubble else "loop"  # as torchtitan
    found = placed.generate_stage_to_rank_mapping(4, 4 * each, style=style)
    assert tuple(found[c] for c in range(4 * each)) == schedule.placement.stage_of


def test_a_placement_that_torch_lacks_has_no_torch_name():
    assert torch_schedule_name(Placement.interleaved(2, 3)) == "Interleaved1F1B"
    for stage_of in ((0, 1, 1, 0, 0, 1), (1, 0), (0, 1, 1), (0, 0, 1, 1)):
        assert torch_schedule_name(Placement(stage_of)) is None


@pytest.mark.parametrize("sharding", SHARDINGS, ids=str)
def test_torch_adds_the_collectives_itself(sharding):
    plain = plan("ZBV", n_stages=3, n_microbatches=4)
    summed = post_validated(add_collectives(plain, **sharding))
    assert summed.orders != plain.orders
    assert to_torch_csv(summed) == to_torch_csv(plain)
