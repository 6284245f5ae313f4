from dataclasses import replace

import pytest

from zbpp.core import (
    Costs,
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
ONE = Costs(m_b=1.0, m_w=0.4).on(Placement.single(1))


def order(text: str):
    return tuple(parse_job(cell, stage=0) for cell in text.split())


def test_f_takes_at_its_start_b_and_w_give_back_at_their_end():
    held = held_during(order("0F0 0F1 0B0 0W0 0BW1 O"), ONE, stage=0)
    assert held == pytest.approx([1.0, 2.0, 2.0, 1.4, 1.0, 0.0])


def test_each_pass_changes_memory_so_that_nothing_is_left():
    changes = [ONE.change(Pass(kind, 0, 0)) for kind in (F, B, W)]
    assert changes == pytest.approx([1.0, -0.6, -0.4])
    assert sum(changes) == pytest.approx(0.0)
    assert ONE.change(Pass(BW, 0, 0)) == -1.0


def test_peak_is_the_largest_held_during_any_job():
    assert peaks([order("0F0 0F1 0BW0 0BW1")], ONE) == [2.0]
    assert peaks([order("0F0 0BW0 0F1 0BW1")], ONE) == [1.0]
    assert peaks([order("0F0 0B0 0F1 0B1 0W0 0W1")], ONE) == [1.4]
    assert peaks([()], ONE) == [0.0]


def test_a_checkpointed_chunk_holds_most_where_b_computes_again():
    """F leaves 1; B computes 3 again, has 4 inside, and leaves 3 until W.

    order   F0 F1 B0 W0 F2 B1 W1 B2 W2
    held     1  2  6  4  2  6  4  5  3
    inside         *        *     *
    """
    memory = Costs(m_b=1, m_w=3, peak_b=4).on(Placement.single(1))
    jobs = order("0F0 0F1 0B0 0W0 0F2 0B1 0W1 0B2 0W2")
    assert held_during(jobs, memory, stage=0) == [1, 2, 6, 4, 2, 6, 4, 5, 3]
    assert memory.change(Pass(B, 0, 0)) == 2  # up, which was an error once


def test_late_ws_of_checkpointed_chunks_cost_more_than_their_f():
    """Two W's put off hold 6, where two F's in flight hold 2."""
    memory = Costs(m_b=1, m_w=3).on(Placement.single(1))
    assert peaks([order("0F0 0F1 0B0 0B1 0W0 0W1")], memory) == [6]
    assert peaks([order("0F0 0F1 0B0 0W0 0B1 0W1")], memory) == [4]
    assert peaks([order("0F0 0F1 0BW0 0BW1")], memory) == [2 + 2]


def test_fixed_memory_and_the_peak_of_an_optimizer_step_count():
    model = Costs(m_b=1, m_w=0.5, m_fixed=10, peak_w=0.25, peak_o=4)
    memory = model.on(Placement.single(1))
    jobs = (*order("0F0 0B0 0W0"), Step(0))
    assert held_during(jobs, memory, stage=0) == [11, 11, 10.75, 14]
    assert peaks([()], memory) == [10]


def test_a_limit_counts_all_of_it_and_says_bytes():
    rows = ((*order("0F0 0B0 0W0"), Step(0)),)
    gib = 2.0**30
    model = Costs(
        m_b=gib, m_w=2 * gib, m_fixed=9 * gib, limit=11 * gib, memory_unit="bytes"
    )
    Schedule("fits", Placement.single(1), 1, rows, model)
    for worse in ({"m_fixed": 10 * gib}, {"peak_b": 2 * gib}, {"peak_o": 3 * gib}):
        with pytest.raises(ScheduleError, match=r"needs memory 12\.0 GiB, over the"):
            Schedule("no", Placement.single(1), 1, rows, replace(model, **worse))


def test_a_limit_is_kept_to_the_last_digit_but_not_beyond():
    rows = (order("0F0 0B0 0F1 0B1 0W0 0W1"),)
    Schedule("fits", Placement.single(1), 2, rows, Costs(m_w=0.4, limit=1.4))
    with pytest.raises(ScheduleError) as error:
        Schedule("no", Placement.single(1), 2, rows, Costs(m_w=0.4, limit=1.39))
    assert "row 0, column 2" in str(error.value)
    assert "0F1 needs memory 1.4, over the limit 1.39 of stage 0" in str(error.value)


def test_each_stage_has_its_own_limit():
    rows = (
        (Pass(F, 0, 0), Pass(BW, 0, 0), Step(0)),
        (Pass(F, 1, 0), Pass(BW, 1, 0), Step(1)),
    )
    placement = Placement.single(2)
    Schedule("fits", placement, 1, rows, Costs(limit=(1.0, 1.0)))
    with pytest.raises(ScheduleError, match=r"over the limit 0.5 of stage 1"):
        Schedule("no", placement, 1, rows, Costs(limit=(1.0, 0.5)))
