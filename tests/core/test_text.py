"""Kinds of jobs and their text, orders, and drawings of timelines."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbpp.core import (
    KINDS,
    Check,
    Collective,
    CollectiveKind,
    Costs,
    Pair,
    PairKind,
    Pass,
    PassKind,
    Placement,
    RequestError,
    Slot,
    Step,
    Timeline,
    draw,
    grid,
    kind_of,
    members_of,
    parse_job,
    passes_in,
    place_of,
)

F, B, W, BW = PassKind
passes = st.builds(
    Pass, st.sampled_from(PassKind), st.integers(0, 999), st.integers(0, 9999)
)


@given(passes)
def test_a_pass_is_read_back_unchanged(job):
    assert parse_job(str(job), stage=3) == job


@pytest.mark.parametrize(
    "cell",
    [
        *(
            "",
            "F0",
            "0F",
            "0f0",
            "0I0",
            "0WB0",
            "00F0",
            "0F01",
            "-1F0",
            "0F0 ",
            "0F0\n",
        ),
        *("0.0F0", "o", "\u0660F0", "9" * 5000 + "F0", None, 3, ["0F0"], {"0F0": 1}),
        *("UNSHARD", "0UNSHARD0", "0 UNSHARD", "0unshard", "0REDUCE"),
        *("(0F0;1F0)OVERLAP_F_B", "(0F0)OVERLAP_F_B", "(O;1B0)OVERLAP_F_B"),
    ],
)
def test_a_text_that_names_no_job_is_refused_and_quoted(cell):
    quoted = r"is not a job; write <chunk>.*UNSHARD\|RESHARD|is no pair of an F and"
    with pytest.raises(RequestError, match=quoted) as e:
        parse_job(cell, stage=0)
    assert repr(cell)[:60].strip("'") in str(e.value)


@pytest.mark.parametrize(
    ("rows", "mark", "shown"),
    [
        ([["0F0", "0BW0", "O"], ["1F0"]], None, "stage 0 | 0F0  0BW0 O\nstage 1 | 1F0"),
        (
            [["0F0", "0BW0"], ["1F0", "1BW0"]],
            (1, 1),
            "stage 0 | 0F0  0BW0\nstage 1 | 1F0  1BW0\n" + " " * 15 + "^^^^ here",
        ),
        ([["0F0"]], (0, 1), "stage 0 | 0F0\n" + " " * 14 + "^^^ here"),
    ],
)
def test_a_grid_is_as_wide_as_its_longest_cell_and_marks_a_place(rows, mark, shown):
    assert grid(rows, mark=mark) == shown


def test_a_grid_shows_only_the_cells_near_the_mark():
    rows = [[f"0F{i}" for i in range(10, 50)], [f"1F{i}" for i in range(10, 30)]]
    top, mark, below = grid(rows, mark=(0, 20)).splitlines()
    assert top.startswith("stage 0 | ... 0F24 ") and top.endswith(" 0F36 ...")
    assert mark.index("^^^^") == top.index("0F30")
    assert below == "stage 1 | ... 1F24 1F25 1F26 1F27 1F28 1F29"


def timeline(*rows: tuple[Slot, ...], chunks_per_stage: int = 1) -> Timeline:
    placement = Placement.interleaved(len(rows), chunks_per_stage)
    return Timeline("drawn", placement, 1, rows)


LATE = timeline((Slot(Pass(F, 0, 0), 10, 15), Slot(Pass(F, 0, 1), 20, 25)))
CHECKED = (Slot(Pass(F, 0, 0), 0, 1), Slot(Check(0), 1, 1), Slot(Pass(B, 0, 0), 1, 2))


@pytest.mark.parametrize(
    ("drawn", "unit", "picture"),
    [
        # Idle is a dot, a long job continues, a job without time is not seen.
        (
            timeline(
                (
                    Slot(Pass(F, 0, 0), 0.0, 1.0),
                    Slot(Pass(BW, 0, 0), 3.0, 5.0),
                    Slot(Step(0), 5.0, 5.0),
                ),
                (Slot(Pass(F, 1, 0), 1.0, 2.0),),
            ),
            1.0,
            "0 | F0  .   .   BW0 -\n1 | .   F0",
        ),
        # It starts at the first job, in cells of the unit.
        (LATE, 5.0, "0 | F0 .  F1"),
        (LATE, 2.5, "0 | F0 -  .  .  F1 -"),
        # Chunks of a stage are distinguished; a V without time is before the next job.
        (
            timeline(
                (Slot(Pass(F, 0, 0), 0, 1), Slot(Pass(F, 1, 0), 1, 2)),
                chunks_per_stage=2,
            ),
            1.0,
            "0 | 0F0 1F0",
        ),
        (timeline(CHECKED), 1.0, "0 | F0  VB0"),
    ],
)
def test_a_timeline_is_drawn(drawn, unit, picture):
    assert draw(drawn, unit=unit) == picture


def test_a_picture_too_large_to_read_is_refused():
    huge = timeline((Slot(Pass(F, 0, 0), 0.0, 1e12),))
    with pytest.raises(RequestError, match=r"a picture of 1e.12 cells a stage; take"):
        draw(huge)
    assert draw(huge, unit=1e12) == "0 | F0"


# --- kinds ----------------------------------------------------------------------------

JOBS = [
    *(Pass(kind, 1, 2) for kind in PassKind),
    *(Collective(kind, 1) for kind in CollectiveKind),
    Step(1),
    Check(1),
    Pair(Pass(PassKind.F, 1, 2), Pass(PassKind.BW, 1, 0)),
]
TWO = Placement.single(2)


def test_there_is_a_row_for_every_kind_and_each_is_seen_here():
    assert [job.kind for job in JOBS] == list(KINDS)


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_a_job_has_a_text_a_time_a_memory_and_a_place(job):
    costs = Costs().on(TWO)
    work = [kind for part in members_of(job) for kind in kind_of(part).work]
    assert costs.of(job) == len(work), "a unit each of F, B and W"
    assert costs.peak(job) >= max(0.0, costs.change(job))
    assert place_of(job) == 1
    assert parse_job(str(job), stage=1) == job
    assert re.sub(r"\(.*\)|\d", "", str(job)) == job.kind
    assert len(passes_in(job)) == {PassKind: 1, PairKind: 2}.get(type(job.kind), 0)
