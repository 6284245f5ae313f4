"""The text of torch's CSV; backward/test_torch_stage.py lets torch run it."""

import csv
import io

import pytest

from zbpp.core import (
    Check,
    Pass,
    PassKind,
    Placement,
    RequestError,
    Schedule,
    Step,
)
from zbpp.planning import MODES, plan
from zbpp.schedules import from_torch_csv, to_torch_csv, torch_schedule_name

F, B, W, BW = PassKind


def test_letters_are_those_of_torch():
    mixed = Schedule(
        "mixed",
        Placement.single(2),
        2,
        (
            tuple(Pass(kind, 0, i) for i in (0, 1) for kind in (F, BW)),
            tuple(Pass(kind, 1, i) for i in (0, 1) for kind in (F, B, W)),
        ),
    )
    assert to_torch_csv(mixed) == "0F0,0B0,0F1,0B1\n1F0,1I0,1W0,1F1,1I1,1W1\n"


def test_zb_h1_of_two_stages():
    """Cell by cell: chunk, letter, micro-batch; O is left out."""
    assert to_torch_csv(plan("ZBH1", n_stages=2, n_microbatches=4)) == (
        "0F0,0F1,0I0,0W0,0F2,0I1,0W1,0F3,0I2,0W2,0I3,0W3\n"
        "1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1F3,1I3,1W2,1W3\n"
    )


@pytest.mark.parametrize("mode", MODES)
def test_one_row_a_rank_and_one_cell_a_pass(mode):
    for p, m in ((1, 1), (2, 5), (4, 3)):
        schedule = plan(mode, n_stages=p, n_microbatches=m)
        text = to_torch_csv(schedule)
        rows = list(csv.reader(io.StringIO(text)))
        assert [len(row) for row in rows] == [len(o) - 1 for o in schedule.orders]
        assert text.count("\n") == p and "\n\n" not in text
        letters = {cell.strip("0123456789") for row in rows for cell in row}
        mixed = {"F", "I", "W", "B"} if MODES[mode].pairs else set()
        letters = {letter for letter in letters if not letter.startswith("(")}
        assert letters in ({"F", "B"}, {"F", "I", "W"}, mixed)


def test_steps_and_checks_are_left_to_the_caller():
    row = (Check(0), Pass(F, 0, 0), Pass(BW, 0, 0), Step(0))
    schedule = Schedule("with O and V", Placement.single(1), 1, (row,))
    assert to_torch_csv(schedule) == "0F0,0B0\n"


@pytest.mark.parametrize("mode", MODES)
def test_the_name_for_torch_has_the_same_placement(mode):
    torch = pytest.importorskip("torch.distributed.pipelining.schedules")
    placed = pytest.importorskip("torch.distributed.pipelining._utils")
    schedule = plan(mode, n_stages=4, n_microbatches=8)
    name = torch_schedule_name(schedule.placement)
    theirs = torch.get_schedule_class(name)
    each = schedule.placement.n_chunks // 4
    assert issubclass(theirs, torch.PipelineScheduleSingle) == (each == 1)
    is_v = theirs is torch.ScheduleZBVZeroBubble  # as torchtitan decides
    style = "v" if is_v else "loop"
    found = placed.generate_stage_to_rank_mapping(4, 4 * each, style=style)
    assert [found[chunk] for chunk in range(4 * each)] == list(
        schedule.placement.stage_of
    )
    expected = {"1F1B": {1}, "ZBVZeroBubble": {2}, "Interleaved1F1B": {2}}
    assert each in expected[name]


def test_a_placement_of_no_schedule_of_torch_has_no_name():
    assert torch_schedule_name(Placement.interleaved(2, 3)) == "Interleaved1F1B"
    for stage_of in ((0, 1, 1, 0, 0, 1), (1, 0), (0, 1, 1), (0, 0, 1, 1)):
        assert torch_schedule_name(Placement(stage_of)) is None


@pytest.mark.parametrize("mode", MODES)
def test_reading_back_gives_the_plan(mode):
    for p, m in ((1, 1), (3, 5)):
        schedule = plan(mode, n_stages=p, n_microbatches=m)
        again = from_torch_csv(to_torch_csv(schedule), name=mode)
        assert again.orders == schedule.orders
        assert again.placement == schedule.placement


def test_idle_cells_transfers_and_overlaps_of_torch_are_understood():
    text = "0F0,,0SEND_F0,1RECV_B0,(0F1;0B0)OVERLAP_F_B,,0B1,0REDUCE_GRAD\n"
    (row,) = from_torch_csv(text).orders
    assert [str(job) for job in row] == [
        "0F0",
        "(0F1;0BW0)OVERLAP_F_B",
        "0BW1",
        "0REDUCE_GRAD",
        "0REDUCE_WAIT",
        "O",
    ]


def test_the_actions_of_torch_are_read_as_it_writes_them():
    torch = pytest.importorskip("torch.distributed.pipelining.schedules")
    kinds = torch._ComputationType
    letters = (kinds.FORWARD, kinds.BACKWARD_INPUT, kinds.BACKWARD_WEIGHT)
    cells = [str(torch._Action(0, kind, 0)) for kind in letters]
    expected = (*(Pass(kind, 0, 0) for kind in (F, B, W)), Step(0))
    assert from_torch_csv(",".join(cells)).orders == (expected,)
    joint = str(torch._Action(0, kinds.FULL_BACKWARD, 0))
    assert from_torch_csv(f"{cells[0]},{joint}").orders[0][1] == Pass(BW, 0, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0", r"t.csv: row 0, column 1 .*'0X0' is no job of torch's"),
        ("", "no rank runs chunk 0"),
        ("0F0,0B0\n2F0,2B0", "no rank runs chunk 1"),
        ("0B0,0F0", "t.csv: .*0BW0"),
        ("0F0,0B0\n0F1,0B1", "t.csv: "),
    ],
)
def test_what_is_no_schedule_is_refused_with_its_place(text, message):
    with pytest.raises(RequestError, match=message):
        from_torch_csv(text, source="t.csv")
