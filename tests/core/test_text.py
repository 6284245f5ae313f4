from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbpp.core import (
    Check,
    Pass,
    PassKind,
    Placement,
    RequestError,
    Slot,
    Step,
    Timeline,
    draw,
    format_job,
    grid,
    parse_job,
)

F, B, W, BW = PassKind
passes = st.builds(
    Pass, st.sampled_from(PassKind), st.integers(0, 999), st.integers(0, 9999)
)


@given(st.one_of(passes, st.just(Step(3)), st.just(Check(3))))
def test_a_job_is_read_back_as_it_was_written(job):
    assert parse_job(str(job), stage=3) == job


def test_jobs_in_words():
    assert parse_job("3BW7", stage=0) == Pass(BW, 3, 7)
    assert parse_job("O", stage=2) == Step(2) != Step(1)
    assert parse_job("V", stage=2) == Check(2)
    assert format_job(Pass(W, 3, 7)) == "3W7"
    assert format_job(Pass(W, 3, 7), with_chunk=False) == "W7"
    assert format_job(Step(1), with_chunk=False) == "O"


@pytest.mark.parametrize(
    "cell",
    [
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
        "0.0F0",
        "o",
        "\u0660F0",
        None,
        3,
        ["0F0"],
        {"0F0": 1},
        "9" * 5000 + "F0",
    ],
)
def test_what_names_no_job_is_refused_and_quoted(cell):
    with pytest.raises(RequestError, match="is not a job; write <chunk>") as e:
        parse_job(cell, stage=0)
    assert repr(cell)[:60] in str(e.value)


def test_grid_is_as_wide_as_its_longest_cell():
    rows = [["0F0", "0BW0", "O"], ["1F0"]]
    assert grid(rows) == "stage 0 | 0F0  0BW0 O\nstage 1 | 1F0"


def test_grid_marks_a_place():
    rows = [["0F0", "0BW0"], ["1F0", "1BW0"]]
    assert grid(rows, mark=(1, 1)) == dedent("""\
        stage 0 | 0F0  0BW0
        stage 1 | 1F0  1BW0
                       ^^^^ here""")


def test_grid_shows_only_what_stands_near_the_mark():
    rows = [[f"0F{i}" for i in range(10, 50)], [f"1F{i}" for i in range(10, 30)]]
    top, mark, below = grid(rows, mark=(0, 20)).splitlines()
    assert top.startswith("stage 0 | ... 0F24 ") and top.endswith(" 0F36 ...")
    assert mark.index("^^^^") == top.index("0F30")
    assert below == "stage 1 | ... 1F24 1F25 1F26 1F27 1F28 1F29"


def test_grid_can_mark_the_place_after_the_last_job():
    assert grid([["0F0"]], mark=(0, 1)).splitlines()[1] == " " * 14 + "^^^ here"


def timeline(*rows: tuple[Slot, ...], chunks_per_stage: int = 1) -> Timeline:
    placement = Placement.interleaved(len(rows), chunks_per_stage)
    return Timeline("drawn", placement, 1, rows)


def test_draw_shows_idle_and_long_jobs_and_hides_jobs_without_time():
    first = (
        Slot(Pass(F, 0, 0), 0.0, 1.0),
        Slot(Pass(BW, 0, 0), 3.0, 5.0),
        Slot(Step(0), 5.0, 5.0),
    )
    second = (Slot(Pass(F, 1, 0), 1.0, 2.0),)
    assert draw(timeline(first, second)) == "0 | F0  .   .   BW0 -\n1 | .   F0"


def test_draw_starts_at_the_first_job_in_cells_of_the_given_unit():
    slots = (Slot(Pass(F, 0, 0), 10.0, 15.0), Slot(Pass(F, 0, 1), 20.0, 25.0))
    assert draw(timeline(slots), unit=5.0) == "0 | F0 .  F1"
    assert draw(timeline(slots), unit=2.5) == "0 | F0 -  .  .  F1 -"


def test_draw_tells_the_chunks_of_a_stage_apart():
    slots = (Slot(Pass(F, 0, 0), 0.0, 1.0), Slot(Pass(F, 1, 0), 1.0, 2.0))
    assert draw(timeline(slots, chunks_per_stage=2)) == "0 | 0F0 1F0"


def test_draw_aligns_ten_stages_and_more():
    rows = [(Slot(Pass(F, s, 0), 0.0, 1.0),) for s in range(11)]
    assert draw(timeline(*rows)).splitlines()[9:] == [" 9 | F0", "10 | F0"]


def test_draw_writes_a_v_without_time_in_front_of_the_next_job():
    first, second = Pass(F, 0, 0), Pass(BW, 0, 0)
    for takes, drawn in ((0, "0 | F0   .    VBW0"), (1, "0 | F0  .   V   BW0")):
        check = Slot(Check(0), 2, 2 + takes)
        slots = (Slot(first, 0, 1), check, Slot(second, 2 + takes, 3 + takes))
        assert draw(Timeline("x", Placement.single(1), 1, (slots,))) == drawn
