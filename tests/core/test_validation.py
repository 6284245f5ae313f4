"""Each rule of a schedule: its message, its place, and a valid twin that passes."""

from textwrap import dedent

import pytest

from zbpp.core import (
    Placement,
    RequestError,
    Schedule,
    ScheduleError,
    parse_job,
)


def build(*rows: str, stage_of=None, m: int = 1) -> Schedule:
    placement = Placement(stage_of or tuple(range(len(rows))))
    return Schedule(
        "built",
        placement,
        m,
        tuple(
            tuple(parse_job(cell, stage=stage) for cell in row.split())
            for stage, row in enumerate(rows)
        ),
    )


GOOD = ("0F0 0F1 0BW0 0BW1 O", "1F0 1B0 1F1 1W0 1BW1 O")

# what is wrong, the rows, place (row, column), the reason
WRONG = {
    "unknown chunk": (("0F0 0F1 2F0", GOOD[1]), (0, 2), "2F0: the chunks are 0 to 1"),
    "unknown micro-batch": (
        ("0F0 0F1 0F2 0BW0", GOOD[1]),
        (0, 2),
        "0F2: the micro-batches are 0 to 1",
    ),
    "wrong stage": (
        (GOOD[0], "1F0 1B0 0F1"),
        (1, 2),
        "0F1 stands on stage 1, but chunk 0 is on stage 0; move it there",
    ),
    "doubled": (
        ("0F0 0F1 0F0 0BW0 0BW1 O", GOOD[1]),
        (0, 2),
        "0F0 repeats 0F0 of column 0; remove one",
    ),
    "B and BW": (
        (GOOD[0], "1F0 1B0 1F1 1BW0 1BW1"),
        (1, 3),
        "1BW0 repeats 1B0 of column 1",
    ),
    "BW and B": (
        (GOOD[0], "1F0 1BW0 1F1 1B0 1BW1"),
        (1, 3),
        "1B0 repeats 1BW0 of column 1",
    ),
    "BW and W": (
        (GOOD[0], "1F0 1BW0 1F1 1W0 1BW1"),
        (1, 3),
        "1W0 repeats 1BW0 of column 1",
    ),
    "B before F": (
        ("0BW0 0F0 0F1 0BW1 O", GOOD[1]),
        (0, 0),
        "0BW0 comes before 0F0; swap them",
    ),
    "W before B": (
        (GOOD[0], "1F0 1W0 1B0 1F1 1BW1 O"),
        (1, 1),
        "1W0 comes before 1B0; swap them",
    ),
    "F left out": (("0F0 0BW0 O", GOOD[1]), (0, 3), "0F1 is missing"),
    "backward left out": (
        ("0F0 0F1 0BW0 O", GOOD[1]),
        (0, 4),
        "0B1 (with 0W1, or 0BW1) is missing",
    ),
    "W left out": ((GOOD[0], "1F0 1B0 1F1 1BW1 O"), (1, 5), "1W0 is missing"),
    "pass after O": (
        ("0F0 0F1 0BW0 O 0BW1", GOOD[1]),
        (0, 4),
        "0BW1 comes after O; the optimizer step must be the last job",
    ),
    "two O": (("0F0 0F1 0BW0 0BW1 O O", GOOD[1]), (0, 5), "O repeats O of column 4"),
    "O on one stage only": (
        (GOOD[0], "1F0 1B0 1F1 1W0 1BW1"),
        (1, 5),
        "O is missing, though stage 0 has one",
    ),
    "late V": (
        ("0F0 0F1 0BW0 V 0BW1", "V 1F0 1BW0 1F1 1BW1"),
        (0, 3),
        "V must come before the first backward pass",
    ),
    "V on one stage only": (
        ("V 0F0 0F1 0BW0 0BW1", "1F0 1BW0 1F1 1BW1"),
        (1, 4),
        "V is missing, though stage 0 has one",
    ),
    "deadlock": (
        ("0F0 0BW0 0F1 0BW1", "1F0 1F1 1BW0 1BW1"),
        (0, 1),
        "deadlock: stage 0 waits at 0BW0, stage 1 waits at 1F1; no stage can go on",
    ),
}


def test_the_twin_of_the_wrong_ones_is_right():
    assert build(*GOOD, m=2).n_stages == 2


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_named_and_marked(name):
    rows, (row, column), reason = WRONG[name]
    with pytest.raises(ScheduleError) as error:
        build(*rows, m=2)
    first, *picture = str(error.value).splitlines()
    assert first.startswith(f"row {row}, column {column} (counted from 0): {reason}")
    marked = picture[row + 1]
    cells = rows[row].split()
    at = marked.index("^")
    assert marked.strip(" ^") == "here"
    if column < len(cells):
        assert picture[row][at:].split()[0] == cells[column]
    else:
        assert len(picture[row]) <= at


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
