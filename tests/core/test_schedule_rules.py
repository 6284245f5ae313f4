"""Each rule of a schedule: its message, its place, and a valid twin that passes."""

from textwrap import dedent

import pytest

from zbpp.core import Placement, RequestError, Schedule, ScheduleError, parse_job


def orders_of(*rows: str) -> tuple:
    return tuple(
        tuple(parse_job(cell, stage=stage) for cell in row.split())
        for stage, row in enumerate(rows)
    )


def build(*rows: str, stage_of=None, m: int = 1) -> Schedule:
    placement = Placement(stage_of or tuple(range(len(rows))))
    return Schedule("built", placement, m, orders_of(*rows))


GOOD = ("0F0 0F1 0BW0 0BW1 O", "1F0 1B0 1F1 1W0 1BW1 O")
SHARDED = (
    "0UNSHARD 0F0 V 0B0 0RESHARD 0W0 0REDUCE_GRAD 0REDUCE_WAIT O",
    "1UNSHARD 1F0 V 1BW0 1REDUCE_GRAD 1RESHARD 1REDUCE_WAIT O",
)

# Two lines a case: the rows ("." is the good one), then row, column and reason.
OF_PASSES = """
0F0 0F1 2F0 | .
0 2 2F0: the chunks are 0 to 1
0F0 0F1 0F2 0BW0 | .
0 2 0F2: the micro-batches are 0 to 1
. | 1F0 1B0 0F1
1 2 0F1 stands on stage 1, but chunk 0 is on stage 0; move it there
0F0 0F1 0F0 0BW0 0BW1 O | .
0 2 0F0 repeats 0F0 of column 0; remove one
. | 1F0 1B0 1F1 1BW0 1BW1
1 3 1BW0 repeats 1B0 of column 1
. | 1F0 1BW0 1F1 1B0 1BW1
1 3 1B0 repeats 1BW0 of column 1
. | 1F0 1BW0 1F1 1W0 1BW1
1 3 1W0 repeats 1BW0 of column 1
0BW0 0F0 0F1 0BW1 O | .
0 0 0BW0 comes before 0F0; swap them
. | 1F0 1W0 1B0 1F1 1BW1 O
1 1 1W0 comes before 1B0; swap them
0F0 0BW0 O | .
0 3 0F1 is missing
0F0 0F1 0BW0 O | .
0 4 0B1 (with 0W1, or 0BW1) is missing
. | 1F0 1B0 1F1 1BW1 O
1 5 1W0 is missing
0F0 0F1 0BW0 O 0BW1 | .
0 4 0BW1 comes after O; the optimizer step must be the last job
0F0 0F1 0BW0 0BW1 O O | .
0 5 O repeats O of column 4
. | 1F0 1B0 1F1 1W0 1BW1
1 5 O is missing, though stage 0 has one
0F0 0F1 0BW0 V 0BW1 | V 1F0 1BW0 1F1 1BW1
0 3 V must come before the first backward pass
V 0F0 0F1 0BW0 0BW1 | 1F0 1BW0 1F1 1BW1
1 4 V is missing, though stage 0 has one
0F0 0BW0 0F1 0BW1 | 1F0 1F1 1BW0 1BW1
0 1 deadlock: stage 0 waits at 0BW0, stage 1 waits at 1F1; no stage can go on
"""
OF_COLLECTIVES = """
. | 1F0 1UNSHARD V 1BW0 1REDUCE_GRAD 1REDUCE_WAIT O
1 0 1F0 needs the parameters of chunk 1, which are sharded here; put 1UNSHARD
. | 1UNSHARD 1F0 1RESHARD V 1BW0 1REDUCE_GRAD 1REDUCE_WAIT O
1 4 1BW0 needs the parameters
. | 1UNSHARD 1F0 1UNSHARD V 1BW0 O
1 2 1UNSHARD: chunk 1 is gathered here
. | 1UNSHARD 1F0 V 1BW0 1RESHARD 1RESHARD O
1 5 1RESHARD: chunk 1 is sharded here
. | 1UNSHARD 1F0 1REDUCE_GRAD V 1BW0 O
1 2 1REDUCE_GRAD: no W or BW of chunk 1 comes before it
. | 1UNSHARD 1F0 V 1BW0 1REDUCE_GRAD 1REDUCE_WAIT 1REDUCE_GRAD 1REDUCE_WAIT O
1 6 1REDUCE_GRAD: no W or BW
. | 1UNSHARD 1F0 V 1B0 1W0 1REDUCE_GRAD 1REDUCE_GRAD 1REDUCE_WAIT O
1 6 1REDUCE_GRAD comes before the REDUCE_WAIT of the one before
. | 1UNSHARD 1F0 V 1BW0 1REDUCE_WAIT 1REDUCE_GRAD O
1 4 1REDUCE_WAIT: no 1REDUCE_GRAD runs
. | 1UNSHARD 1F0 V 1BW0 1REDUCE_GRAD O
1 5 1REDUCE_WAIT is missing
. | 1UNSHARD 1F0 V 1BW0 O
1 5 1REDUCE_GRAD is missing, though chunk 0 has one
. | 1F0 V 1BW0 1REDUCE_GRAD 1REDUCE_WAIT O
1 6 1UNSHARD is missing, though chunk 0 has one
. | 1UNSHARD 1F0 V 1BW0 1REDUCE_GRAD 1REDUCE_WAIT O 1RESHARD
1 7 1RESHARD comes after O
. | 1UNSHARD 1F0 V 0UNSHARD 1BW0 1REDUCE_GRAD 1REDUCE_WAIT O
1 3 0UNSHARD stands on stage 1, but chunk 0 is on stage 0; move it there
. | 2UNSHARD 1F0 V 1BW0 O
1 0 2UNSHARD: the chunks are 0 to 1
"""


def cases(text: str, good: tuple[str, str], m: int):
    lines = text.strip().splitlines()
    for rows, place in zip(lines[::2], lines[1::2], strict=True):
        row, column, reason = place.split(maxsplit=2)
        both = zip(rows.split(" | "), good, strict=True)
        orders = [right if given == "." else given for given, right in both]
        yield pytest.param(orders, m, int(row), int(column), reason, id=reason[:40])


@pytest.mark.parametrize(
    ("rows", "m", "row", "column", "reason"),
    [*cases(OF_PASSES, GOOD, 2), *cases(OF_COLLECTIVES, SHARDED, 1)],
)
def test_a_mistake_is_named_and_marked(rows, m, row, column, reason):
    with pytest.raises(ScheduleError) as error:
        build(*rows, m=m)
    first, *picture = str(error.value).splitlines()
    assert first.startswith(f"row {row}, column {column} (counted from 0): {reason}")
    marked, cells = picture[row + 1], rows[row].split()
    at = marked.index("^")
    assert marked.strip(" ^") == "here"
    if column < len(cells):
        assert picture[row][at:].split()[0] == cells[column]
    else:
        assert len(picture[row]) <= at


def test_the_twins_of_the_wrong_ones_are_right():
    assert build(*GOOD, m=2).n_stages == 2
    assert build(*SHARDED).orders == orders_of(*SHARDED)


def test_the_whole_message():
    with pytest.raises(ScheduleError) as error:
        build("0F0 0BW0 0F1 0BW1", "1F0 1BW0 1BW1 1F1", m=2)
    assert str(error.value) == dedent("""\
        row 1, column 2 (counted from 0): 1BW1 comes before 1F1; swap them
        stage 0 | 0F0  0BW0 0F1  0BW1
        stage 1 | 1F0  1BW0 1BW1 1F1
                            ^^^^ here""")


def test_counts_are_checked_first():
    with pytest.raises(RequestError, match="n_microbatches is 0; it must be at least"):
        build("", m=0)
    with pytest.raises(RequestError, match="1 rows of jobs for 2 stages"):
        build("0F0 0BW0", stage_of=(0, 1))


def test_a_stage_of_two_chunks_may_deadlock_with_itself():
    build("0F0 1F0 1BW0 0BW0", stage_of=(0, 0))
    with pytest.raises(ScheduleError, match="deadlock: stage 0 waits at 1F0"):
        build("1F0 0F0 1BW0 0BW0", stage_of=(0, 0))
    with pytest.raises(ScheduleError, match="deadlock: stage 0 waits at 0BW0"):
        build("0F0 1F0 0BW0 1BW0", stage_of=(0, 0))


def test_gradients_are_summed_after_the_last_w():
    row, sums = "0F0 0F1 0B0 0B1 0W1 {} 0W0 {} O", "0REDUCE_GRAD 0REDUCE_WAIT"
    build(row.format("", sums), m=2)
    build(row.format(sums, sums), m=2)
    with pytest.raises(ScheduleError, match=r"0REDUCE_GRAD is missing after 0W0"):
        build(row.format(sums, ""), m=2)


@pytest.mark.parametrize("stage_of", [(), (1,), (0, 2), (-1, 0), (0, 10**12)])
def test_a_stage_without_a_chunk_is_refused(stage_of):
    with pytest.raises(RequestError, match="must hold at least one chunk") as error:
        Placement(stage_of)
    assert str(list(stage_of)) in str(error.value)
    Placement((0, 1, 0))  # stages may hold different numbers


def test_the_three_placements():
    assert Placement.single(4).stage_of == (0, 1, 2, 3)
    assert Placement.interleaved(3, 2).stage_of == (0, 1, 2, 0, 1, 2)
    assert Placement.wave(3).stage_of == (0, 1, 2, 2, 1, 0)
    assert Placement.wave(2, 3).stage_of == (0, 1, 1, 0, 0, 1)
    assert Placement.wave(2, 3).chunks_of == ((0, 3, 4), (1, 2, 5))
