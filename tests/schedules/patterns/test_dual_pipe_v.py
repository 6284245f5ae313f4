"""DualPipeV: the picture, torch's order, and what a pair is in every room."""

# ruff: noqa: E501  (a picture is one line a stage)

import csv
import json
from dataclasses import replace
from textwrap import dedent
from types import SimpleNamespace

import pytest
from judge import judge

from zbpp.core import (
    Costs,
    PassKind,
    RequestError,
    Schedule,
    ScheduleError,
    draw,
    lower_bound,
    parse_schedule,
    peaks,
    schedule_text,
)
from zbpp.planning import PlanRequest, make_plan
from zbpp.schedules import plan_dual_pipe_v, to_torch_csv
from zbpp.simulator import idle, simulate, span

F, B, W, BW = PassKind
COSTS = Costs(f=2, b=2, w=2, fb=4)  # a pass of a chunk takes 1, a pair 2


def planned(p: int, m: int) -> Schedule:
    return plan_dual_pipe_v(n_stages=p, n_microbatches=m)


def test_four_stages_and_eight_micro_batches_are_as_drawn():
    assert (
        draw(simulate(planned(4, 8), COSTS))
        == dedent("""\
        0 | 0F0      0F1      0F2      0F3      0F4      0F5      0F6      7F0      7B0      7W0      7F1      7B1      7W1      7F2      7B2      7W2      7F3      0F7&7BW3 -        .        7F4&0BW0 -        7BW4     -        7F5&0BW1 -        7BW5     -        7F6&0BW2 -        7BW6     -        7F7&0BW3 -        7BW7     -        0B4      0W4      0B5      0W5      0B6      0W6      0B7      0W7
        1 | .        1F0      1F1      1F2      1F3      1F4      6F0      1F5      6F1      6B0      6W0      6F2      6B1      6W1      6F3      1F6&6BW2 -        .        6F4&1BW0 -        1F7&6BW3 -        6F5&1BW1 -        6BW4     -        6F6&1BW2 -        6BW5     -        6F7&1BW3 -        6BW6     -        1BW4     -        6B7      1B5      6W7      1B6      1W5      1B7      1W6      1W7
        2 | .        .        2F0      2F1      2F2      5F0      2F3      5F1      2F4      5F2      5B0      5W0      5F3      2F5&5BW1 -        .        5F4&2BW0 -        2F6&5BW2 -        5F5&2BW1 -        2F7&5BW3 -        5F6&2BW2 -        5BW4     -        5F7&2BW3 -        5BW5     -        2BW4     -        5BW6     -        2B5      5B7      2B6      2W5      2B7      5W7      2W6      2W7
        3 | .        .        .        3F0      4F0      3F1      4F1      3F2      4F2      3F3      4F3      3F4      4BW0     -        4F4&3BW0 -        3F5&4BW1 -        4F5&3BW1 -        3F6&4BW2 -        4F6&3BW2 -        3F7&4BW3 -        4F7&3BW3 -        4BW4     -        3BW4     -        4BW5     -        3BW5     -        4B6      3B6      4B7      3B7      4W6      3W6      4W7      3W7""")
    )


@pytest.mark.parametrize("p", range(2, 9))
def test_it_is_the_order_of_torch(p):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for m in range(2 * p, 4 * p + 1, 1 if p < 6 else p):
        sizes = SimpleNamespace(pp_group_size=p, _n_microbatches=m)
        of_torch = [
            [repr(action) for action in order]
            for order in (
                schedules.ScheduleDualPipeV._calculate_single_rank_operations(sizes, r)
                for r in range(p)
            )
        ]
        schedule = planned(p, m)
        text = to_torch_csv(schedule)
        assert list(csv.reader(text.splitlines())) == of_torch


@pytest.mark.parametrize("p, m", [(1, 1), (2, 1), (3, 4), (4, 3), (4, 7), (5, 12)])
@pytest.mark.parametrize("fb", [None, 2.5])
def test_the_judge_agrees_for_any_number_of_micro_batches(p, m, fb):
    schedule = planned(p, m)
    costs = Costs(f=1.5, b=1.2, w=0.7, comm=0.3, send_occupies=0.1, fb=fb)
    data = {"f": 1.5, "b": 1.2, "w": 0.7, "comm": 0.3, "send_occupies": 0.1}
    data |= {} if fb is None else {"fb": fb}
    verdict = judge(json.loads(schedule_text(schedule)), data)
    assert verdict.span == pytest.approx(span(simulate(schedule, costs)))
    memory = Costs().on(schedule.placement)
    assert verdict.peaks == pytest.approx(peaks(schedule.orders, memory))
    assert max(verdict.peaks) <= p + 0.5


@pytest.mark.parametrize("fb", [4, 5, 6])
@pytest.mark.parametrize("p, m", [(2, 4), (4, 9), (6, 24)])
def test_the_idle_time_is_that_of_the_formula(p, m, fb):
    costs = Costs(f=2, b=2, w=2, fb=fb)
    slowest = max(idle(simulate(planned(p, m), costs)))
    assert slowest == pytest.approx((p - 1) * (fb - 4) + (6 - fb) / 2)


@pytest.mark.parametrize("fb", [2.0, 2.5, 3.4, 9.0])
@pytest.mark.parametrize("p, m", [(2, 4), (4, 9), (3, 20)])
def test_no_schedule_of_pairs_is_below_the_bound(p, m, fb):
    costs = Costs(f=1.5, b=1.2, w=0.7, comm=0.1, fb=fb)
    schedule = planned(p, m)
    bound = lower_bound(schedule.placement, m, costs)
    assert bound <= span(simulate(schedule, costs))
    alone = lower_bound(schedule.placement, m, replace(costs, fb=None))
    assert (bound < alone) == (fb < 3.4)


def test_auto_takes_pairs_where_they_pay():
    for fb, name in ((4, "DualPipeV"), (6, "ZBV")):
        request = PlanRequest(
            schedule="auto",
            n_stages=2,
            n_microbatches=12,
            costs=Costs(f=2, b=2, w=2, comm=0.2, fb=fb, memory_limit=2.5),
        )
        assert make_plan(request).mode == name


def test_a_schedule_file_holds_pairs():
    schedule = planned(3, 6)
    text = schedule_text(schedule)
    assert '"(3F5;2BW2)OVERLAP_F_B"' in text
    assert parse_schedule(text).orders == schedule.orders


@pytest.mark.parametrize(
    "cell, named",
    [
        ("(0F1;3F0)OVERLAP_F_B", "is no pair of an F and a B or BW"),
        ("(3BW0;0F1)OVERLAP_F_B", "is no pair of an F and a B or BW"),
        ("(0F1;3UNSHARD)OVERLAP_F_B", "is not a job"),
        ("(0F1;0BW1)OVERLAP_F_B", "0BW1 comes before 0F1"),
        ("(0F0;3BW0)OVERLAP_F_B", "0F0 repeats 0F0 of column 0"),
    ],
)
def test_a_wrong_pair_is_named_in_its_place(cell, named):
    rows = ["0F0", "3F0", "(0F1;3BW0)OVERLAP_F_B", "3F1", "0BW0", "3BW1", "0BW1"]
    data = json.loads(schedule_text(planned(2, 2)))
    others = ["1F0", "2F0", "1F1", "2BW0", "2F1", "1BW0", "2BW1", "1BW1"]
    parse_schedule(json.dumps(data | {"jobs": [rows, others]}))
    rows[2] = cell
    error = (
        RequestError if "no pair" in named or "not a job" in named else ScheduleError
    )
    with pytest.raises(error, match=f"row 0, column 2(.|\\n)*{named}"):
        parse_schedule(json.dumps(data | {"jobs": [rows, others]}))
