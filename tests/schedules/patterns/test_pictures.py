"""Each mode as drawn by hand; the same picture stands on top of its file."""

import importlib
from textwrap import dedent, indent

import pytest

from zbpp.core import Costs, draw
from zbpp.schedules import (
    plan_combined_1f1b,
    plan_dual_pipe_v,
    plan_fthenb,
    plan_one_f_one_b,
    plan_vpp,
    plan_zb_h1,
    plan_zb_h2,
    plan_zb_v,
)
from zbpp.schedules.patterns.v_patterns import v_half_rows, v_min_rows
from zbpp.simulator import simulate

HAND_MADE = {
    "FThenB": plan_fthenb,
    "1F1B": plan_one_f_one_b,
    "VPP": plan_vpp,
    "ZBH1": plan_zb_h1,
    "ZBH2": plan_zb_h2,
    "ZBV": plan_zb_v,
    "DualPipeV": plan_dual_pipe_v,
    "Combined1F1B": plan_combined_1f1b,
}

UNIT = Costs()
TWO_CHUNKS = Costs(f=2, b=2, w=2)  # a pass of one of two chunks takes 1

# file, mode, stages, micro-batches, costs, picture
PICTURES = {
    "fthenb": (
        "FThenB",
        3,
        4,
        UNIT,
        """\
        0 | F0  F1  F2  F3  .   .   .   .   .   .   BW0 -   BW1 -   BW2 -   BW3 -
        1 | .   F0  F1  F2  F3  .   .   .   BW0 -   BW1 -   BW2 -   BW3 -
        2 | .   .   F0  F1  F2  F3  BW0 -   BW1 -   BW2 -   BW3 -""",
    ),
    "one_f_one_b": (
        "1F1B",
        3,
        4,
        UNIT,
        """\
        0 | F0  F1  F2  .   .   .   .   BW0 -   F3  BW1 -   .   BW2 -   .   BW3 -
        1 | .   F0  F1  .   .   BW0 -   F2  BW1 -   F3  BW2 -   .   BW3 -
        2 | .   .   F0  BW0 -   F1  BW1 -   F2  BW2 -   F3  BW3 -""",
    ),
    "vpp": (
        "VPP",
        2,
        4,
        Costs(f=2, b=1, w=1),
        """\
        0 | 0F0  0F1  2F0  2F1  0F2  2BW0 0F3  2BW1 2F2  0BW0 2F3  0BW1 .    2BW2 .    2BW3 0BW2 0BW3
        1 | .    1F0  1F1  3F0  3BW0 3F1  3BW1 1F2  1BW0 1F3  1BW1 3F2  3BW2 3F3  3BW3 1BW2 1BW3""",  # noqa: E501
    ),
    "zb_h1": (
        "ZBH1",
        3,
        4,
        UNIT,
        """\
        0 | F0 F1 F2 .  .  B0 W0 F3 B1 W1 B2 W2 B3 W3
        1 | .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
        2 | .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3""",
    ),
    "zb_h2": (
        "ZBH2",
        3,
        6,
        UNIT,
        """\
        0 | F0 F1 F2 F3 F4 B0 W0 F5 B1 W1 B2 W2 B3 W3 B4 W4 B5 W5
        1 | .  F0 F1 F2 B0 F3 B1 F4 B2 W0 F5 B3 W1 B4 W2 B5 W3 W4 W5
        2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 F5 B5 W1 W2 W3 W4 W5""",
    ),
    "zb_v": (
        "ZBV",
        2,
        3,
        TWO_CHUNKS,
        """\
        0 | 0F0 0F1 0F2 3F0 3B0 3W0 3F1 3B1 3W1 0B0 0W0 3F2 3B2 3W2 0B1 0W1 0B2 0W2
        1 | .   1F0 2F0 1F1 2F1 2B0 2W0 1F2 1B0 1W0 2F2 2B1 2W1 1B1 2B2 1B2 1W1 2W2 1W2""",  # noqa: E501
    ),
    "dual_pipe_v": (
        "DualPipeV",
        2,
        4,
        Costs(f=2, b=2, w=2, fb=4),
        """\
        0 | 0F0      0F1      0F2      3F0      3B0      3W0      3F1      0F3&3BW1 -        .        3F2&0BW0 -        3BW2     -        3F3&0BW1 -        3BW3     -        0B2      0W2      0B3      0W3
        1 | .        1F0      2F0      1F1      2F1      1F2      2BW0     -        2F2&1BW0 -        1F3&2BW1 -        2F3&1BW1 -        2BW2     -        1BW2     -        2B3      1B3      2W3      1W3""",  # noqa: E501
    ),
    "combined_1f1b": (
        "Combined1F1B",
        2,
        4,
        Costs(f=2, b=2, w=2, fb=4),
        """\
        0 | 0F0      0F1      2F0      2F1      0F2      .        0F3&2BW0 -        2F2&2BW1 -        2F3&0BW0 -        0BW1     -        2BW2     -        2BW3     -        0BW2     -        0BW3     -
        1 | .        1F0      1F1      3F0      3F1&3BW0 -        1F2&3BW1 -        1F3&1BW0 -        3F2&1BW1 -        3F3&3BW2 -        3BW3     -        1BW2     -        1BW3     -""",  # noqa: E501
    ),
}


def drawn(mode: str, n_stages: int, n_microbatches: int, costs: Costs) -> str:
    schedule = HAND_MADE[mode](n_stages=n_stages, n_microbatches=n_microbatches)
    return draw(simulate(schedule, costs))


@pytest.mark.parametrize("file", PICTURES)
def test_a_schedule_is_what_is_drawn_on_top_of_its_file(file):
    *request, picture = PICTURES[file]
    assert drawn(*request) == dedent(picture)
    module = importlib.import_module(f"zbpp.schedules.patterns.{file}")
    assert indent(dedent(picture), "    ") + "\n\n" in module.__doc__


def test_fewer_microbatches_than_stages():
    assert drawn("ZBH1", 3, 1, UNIT) == dedent("""\
        0 | F0 .  .  .  .  B0 W0
        1 | .  F0 .  .  B0 W0
        2 | .  .  F0 B0 W0""")
    assert drawn("ZBH2", 3, 2, UNIT) == dedent("""\
        0 | F0 F1 .  .  .  B0 W0 B1 W1
        1 | .  F0 F1 .  B0 .  B1 W0 W1
        2 | .  .  F0 B0 F1 B1 W0 W1""")
    assert drawn("1F1B", 3, 1, UNIT) == dedent("""\
        0 | F0  .   .   .   .   .   .   BW0 -
        1 | .   F0  .   .   .   BW0 -
        2 | .   .   F0  BW0 -""")
    assert drawn("ZBV", 2, 1, TWO_CHUNKS) == dedent("""\
        0 | 0F0 .   .   3F0 3B0 3W0 .   0B0 0W0
        1 | .   1F0 2F0 .   .   2B0 1B0 2W0 1W0""")


def test_published_patterns_are_what_their_table_says():
    """F and B of a stage's first chunk, f and b of its second."""
    numbers = [range(4)] * 3
    drawn = [
        ["".join("FfbB"[q] for q in row) for row in rows_of(numbers, 3)]
        for rows_of in (v_min_rows, v_half_rows)
    ]
    assert drawn == [
        ["FfFbfFBbfBbB", "FfFbfBFbfBbB", "FfFfbBFfbBbB"],
        ["FFfbFfbBfbBB", "FfFbfFBbfBbB", "FfFfbBFfbBbB"],
    ]


def test_groups_of_vpp_when_the_stages_do_not_divide_the_microbatches():
    """Two stages, five micro-batches: a group of two and one of three."""
    first = drawn("VPP", 2, 5, Costs(f=2, b=1, w=1)).splitlines()[0]
    forwards = [cell for cell in first.split() if "F" in cell]
    assert " ".join(forwards) == "0F0 0F1 2F0 2F1 0F2 0F3 0F4 2F2 2F3 2F4"


def test_zb_h2_of_the_paper_has_no_bubble_with_four_stages():
    """p=4, m=8: every stage works 24 units without a pause; the makespan is 27."""
    rows = drawn("ZBH2", 4, 8, UNIT).splitlines()
    cells = [row.split("|")[1].split() for row in rows]
    assert [row.count(".") for row in cells] == [0, 1, 2, 3]
    assert [len(row) for row in cells] == [24, 25, 26, 27]
    assert all("." not in row[stage:] for stage, row in enumerate(cells))
    fewer = drawn("ZBH1", 4, 8, UNIT).splitlines()
    assert any("." in row.split()[6:] for row in fewer)
