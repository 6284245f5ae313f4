"""The text of torch's CSV; backward/test_torch_stage.py lets torch run it."""

import csv
import io

import pytest

from zbpp.core import (
    Check,
    Pass,
    PassKind,
    Placement,
    Schedule,
    Step,
)
from zbpp.planning import MODES, plan
from zbpp.schedules import to_torch_csv, torch_schedule_name

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


def test_cells_are_actions_of_torch():
    torch = pytest.importorskip("torch.distributed.pipelining.schedules")
    kinds = torch._ComputationType
    letters = (kinds.FORWARD, kinds.BACKWARD_INPUT, kinds.BACKWARD_WEIGHT)
    actions = [str(torch._Action(0, kind, 0)) for kind in letters]
    row = tuple(Pass(kind, 0, 0) for kind in (F, B, W))
    schedule = Schedule("split", Placement.single(1), 1, (row,))
    assert to_torch_csv(schedule) == f"{','.join(actions)}\n"
