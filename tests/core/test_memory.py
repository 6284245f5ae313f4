import pytest

from zbpp.core import (
    MemoryModel,
    Pass,
    PassKind,
    Placement,
    Schedule,
    ScheduleError,
    Step,
    held_during,
    parse_job,
    peaks,
)

F, B, W, BW = PassKind
ONE = MemoryModel(m_b=1.0, m_w=0.4).on(Placement.single(1))


def order(text: str):
    return tuple(parse_job(cell, stage=0) for cell in text.split())


def test_f_takes_at_its_start_b_and_w_give_back_at_their_end():
    held = held_during(order("0F0 0F1 0B0 0W0 0BW1 O"), ONE, stage=0)
    assert held == pytest.approx([1.0, 2.0, 2.0, 1.4, 1.0, 0.0])


def test_each_pass_changes_memory_so_that_nothing_is_left():
    changes = [ONE.change(kind, 0) for kind in (F, B, W)]
    assert changes == pytest.approx([1.0, -0.6, -0.4])
    assert sum(changes) == pytest.approx(0.0)
    assert ONE.change(BW, 0) == -1.0


def test_peak_is_the_largest_held_during_any_job():
    assert peaks([order("0F0 0F1 0BW0 0BW1")], ONE) == [2.0]
    assert peaks([order("0F0 0BW0 0F1 0BW1")], ONE) == [1.0]
    assert peaks([order("0F0 0B0 0F1 0B1 0W0 0W1")], ONE) == [1.4]
    assert peaks([()], ONE) == [0.0]


def test_a_limit_is_kept_to_the_last_digit_but_not_beyond():
    rows = (order("0F0 0B0 0F1 0B1 0W0 0W1"),)
    Schedule("fits", Placement.single(1), 2, rows, MemoryModel(m_w=0.4, limit=1.4))
    with pytest.raises(ScheduleError) as error:
        Schedule("no", Placement.single(1), 2, rows, MemoryModel(m_w=0.4, limit=1.39))
    assert "row 0, column 2" in str(error.value)
    assert "0F1 needs memory 1.4, over the limit 1.39 of stage 0" in str(error.value)


def test_each_stage_has_its_own_limit():
    rows = (
        (Pass(F, 0, 0), Pass(BW, 0, 0), Step(0)),
        (Pass(F, 1, 0), Pass(BW, 1, 0), Step(1)),
    )
    placement = Placement.single(2)
    Schedule("fits", placement, 1, rows, MemoryModel(limit=(1.0, 1.0)))
    with pytest.raises(ScheduleError, match=r"over the limit 0.5 of stage 1"):
        Schedule("no", placement, 1, rows, MemoryModel(limit=(1.0, 0.5)))
