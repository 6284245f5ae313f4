"""Each rule of the collectives: its message, its place, and a valid twin."""

import pytest

from zbpp.core import (
    Collective,
    CollectiveKind,
    Costs,
    Placement,
    RequestError,
    Schedule,
    ScheduleError,
    Slot,
    Timeline,
    draw,
    parse_job,
    replay,
)

GOOD = (
    "0UNSHARD 0F0 V 0B0 0RESHARD 0W0 0REDUCE_GRAD 0REDUCE_WAIT O",
    "1UNSHARD 1F0 V 1BW0 1REDUCE_GRAD 1RESHARD 1REDUCE_WAIT O",
)


def orders_of(*rows: str) -> tuple:
    return tuple(
        tuple(parse_job(cell, stage=stage) for cell in row.split())
        for stage, row in enumerate(rows)
    )


def build(*rows: str) -> Schedule:
    return Schedule("built", Placement.single(len(rows)), 1, orders_of(*rows))


# the second row, the column, the reason
WRONG = {
    "F": (
        "1F0 1UNSHARD V 1BW0 1REDUCE_GRAD 1REDUCE_WAIT O",
        0,
        "1F0 needs the parameters of chunk 1, which are sharded here; put 1UNSHARD",
    ),
    "BW": (
        "1UNSHARD 1F0 1RESHARD V 1BW0 1REDUCE_GRAD 1REDUCE_WAIT O",
        4,
        "1BW0 needs the parameters",
    ),
    "gathered twice": ("1UNSHARD 1F0 1UNSHARD V 1BW0 O", 2, "1UNSHARD: chunk 1 is gat"),
    "freed twice": (
        "1UNSHARD 1F0 V 1BW0 1RESHARD 1RESHARD O",
        5,
        "1RESHARD: chunk 1 is sharded here",
    ),
    "nothing to add up": (
        "1UNSHARD 1F0 1REDUCE_GRAD V 1BW0 O",
        2,
        "1REDUCE_GRAD: no W or BW of chunk 1 comes before it",
    ),
    "added up twice": (
        "1UNSHARD 1F0 V 1BW0 1REDUCE_GRAD 1REDUCE_WAIT 1REDUCE_GRAD 1REDUCE_WAIT O",
        6,
        "1REDUCE_GRAD: no W or BW",
    ),
    "two at once": (
        "1UNSHARD 1F0 V 1B0 1W0 1REDUCE_GRAD 1REDUCE_GRAD 1REDUCE_WAIT O",
        6,
        "1REDUCE_GRAD comes before the REDUCE_WAIT of the one before",
    ),
    "a wait for nothing": (
        "1UNSHARD 1F0 V 1BW0 1REDUCE_WAIT 1REDUCE_GRAD O",
        4,
        "1REDUCE_WAIT: no 1REDUCE_GRAD runs",
    ),
    "a wait too few": (
        "1UNSHARD 1F0 V 1BW0 1REDUCE_GRAD O",
        5,
        "1REDUCE_WAIT is missing",
    ),
    "not on all chunks": (
        "1UNSHARD 1F0 V 1BW0 O",
        5,
        "1REDUCE_GRAD is missing, though chunk 0 has one",
    ),
    "not gathered": (
        "1F0 V 1BW0 1REDUCE_GRAD 1REDUCE_WAIT O",
        6,
        "1UNSHARD is missing, though chunk 0 has one",
    ),
    "after O": (
        "1UNSHARD 1F0 V 1BW0 1REDUCE_GRAD 1REDUCE_WAIT O 1RESHARD",
        7,
        "1RESHARD comes after O",
    ),
    "another stage's": (
        "1UNSHARD 1F0 V 0UNSHARD 1BW0 1REDUCE_GRAD 1REDUCE_WAIT O",
        3,
        "0UNSHARD stands on stage 1, but chunk 0 is on stage 0; move it there",
    ),
    "no such chunk": ("2UNSHARD 1F0 V 1BW0 O", 0, "2UNSHARD: the chunks are 0 to 1"),
}


def test_the_twin_is_right() -> None:
    assert build(*GOOD).orders == orders_of(*GOOD)


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_named_and_marked(name: str) -> None:
    row, column, reason = WRONG[name]
    with pytest.raises(ScheduleError) as error:
        build(GOOD[0], row)
    message = str(error.value)
    assert message.startswith(f"row 1, column {column} (counted from 0): {reason}")
    assert "here" in message.splitlines()[-1]


def test_the_last_w_of_the_order_is_what_counts() -> None:
    row = "0F0 0F1 0B0 0B1 0W1 {} 0W0 {} O"
    first, then = "0REDUCE_GRAD 0REDUCE_WAIT", ""

    def sums(*places: str) -> Schedule:
        orders = orders_of(row.format(*places))
        return Schedule("built", Placement.single(1), 2, orders)

    sums(then, first)
    sums(first, first)
    with pytest.raises(ScheduleError, match=r"0REDUCE_GRAD is missing after 0W0"):
        sums(first, then)


def test_text_that_is_none_is_refused() -> None:
    assert parse_job("12REDUCE_WAIT", stage=0) == Collective(
        CollectiveKind.REDUCE_WAIT, 12
    )
    for text in ("UNSHARD", "0UNSHARD0", "0 UNSHARD", "0unshard", "0REDUCE"):
        with pytest.raises(RequestError, match=r"UNSHARD\|RESHARD"):
            parse_job(text, stage=0)


def test_the_clock_runs_them_on_a_lane() -> None:
    """F waits for its gather, a sum for the one before, O for the sums of all."""
    rows = (
        "0UNSHARD 1UNSHARD 0F0 1F0 1BW0 1REDUCE_GRAD 0BW0 0REDUCE_GRAD "
        "1REDUCE_WAIT 0REDUCE_WAIT O",
    )
    costs = Costs(
        f=(1.0, 1.0),
        b=(1.0, 1.0),
        w=(1.0, 1.0),
        optimizer=(0.5, 0.5),
        all_gather=(1.0, 2.5),
        reduce_scatter=(2.0, 3.0),
    )
    placement = Placement((0, 0))
    (slots,) = replay(orders_of(*rows), costs.on(placement), n_microbatches=1)
    assert {str(slot.job): (slot.start, slot.end) for slot in slots} == {
        "0UNSHARD": (0.0, 1.0),
        "1UNSHARD": (1.0, 3.5),
        "0F0": (1.0, 2.0),
        "1F0": (3.5, 4.5),
        "1BW0": (4.5, 6.5),
        "1REDUCE_GRAD": (6.5, 9.5),
        "0BW0": (6.5, 8.5),
        "0REDUCE_GRAD": (9.5, 11.5),
        "1REDUCE_WAIT": (9.5, 9.5),
        "0REDUCE_WAIT": (11.5, 11.5),
        "O": (11.5, 12.5),
    }


def test_w_needs_no_parameters() -> None:
    row = "0UNSHARD 0F0 0B0 0RESHARD 0UNSHARD 0W0"
    costs = Costs(all_gather=5).on(Placement.single(1))
    (slots,) = replay(orders_of(row), costs, n_microbatches=1)
    assert (slots[4].start, slots[4].end) == (7.0, 12.0)
    assert (slots[5].start, slots[5].end) == (7.0, 8.0)


def test_a_drawing_has_a_line_below_the_stage() -> None:
    costs = Costs(all_gather=1, reduce_scatter=2).on(Placement.single(1))
    row = "0UNSHARD 0F0 0BW0 0REDUCE_GRAD 0REDUCE_WAIT"
    (slots,) = replay(orders_of(row), costs, n_microbatches=1)
    placement = Placement.single(1)
    lane = (slots[0], slots[3])
    drawn = Timeline("x", placement, 1, ((slots[1], slots[2]),), collectives=(lane,))
    assert draw(drawn) == "0 | .   F0  BW0 -\n  + U0  .   .   .   R0  -"
    assert draw(Timeline("x", placement, 1, ((Slot(slots[1].job, 5, 6),),))) == "0 | F0"
