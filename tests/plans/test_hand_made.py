"""Hand-made orders: pictures, closed forms of memory and idle time, and DualPipeV.

A picture is drawn by hand, one cell a unit of time, and is at the top of the file that
makes the order. `Schedule` itself checks that each pass is there once, on its stage and
after its input, and that no stages wait for one another (tests/core).
"""

import csv
import inspect
from functools import cache
from itertools import product
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace

import pytest

from zbpp.core import (
    Costs,
    PassKind,
    Schedule,
    draw,
    peaks,
)
from zbpp.planning import PlanRequest, make_plan, plan
from zbpp.schedules import (
    plan_combined_1f1b,
    plan_dual_pipe_v,
    plan_fthenb,
    plan_one_f_one_b,
    plan_placement,
    plan_vpp,
    plan_zb_h1,
    plan_zb_h2,
    plan_zb_v,
    to_torch_csv,
)
from zbpp.simulator import idle, simulate

F, B, W, BW = PassKind
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
PAIRS = Costs(f=2, b=2, w=2, fb=4)  # and a pair 2

PICTURES = [
    ("FThenB", 3, 4, UNIT),
    ("1F1B", 3, 4, UNIT),
    ("VPP", 2, 4, Costs(f=2, b=1, w=1)),
    ("ZBH1", 3, 4, UNIT),
    ("ZBH2", 3, 6, UNIT),
    ("ZBV", 2, 3, TWO_CHUNKS),
    ("DualPipeV", 2, 4, PAIRS),
    ("Combined1F1B", 2, 4, PAIRS),
]
"""Mode, stages, micro-batches, and costs of the picture in the file of an order."""


def drawn(mode: str, p: int, m: int, costs: Costs) -> str:
    return draw(simulate(HAND_MADE[mode](n_stages=p, n_microbatches=m), costs))


@pytest.mark.parametrize("case", PICTURES, ids=lambda case: case[0])
def test_a_schedule_equals_the_picture_in_its_file(case):
    mode, *_ = case
    path = inspect.getsourcefile(HAND_MADE[mode])
    source = Path(path).read_text(encoding="utf-8")
    assert indent(drawn(*case), "    ") + "\n\n" in source


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_plan_equals_the_picture_in_the_planner(limit):
    schedule = plan("ZB", n_stages=2, n_microbatches=4, memory_limit=limit)
    first, rest = draw(simulate(schedule)).split("\n")
    picture = f"limit {limit}  {first}\n         {rest}"
    path = inspect.getsourcefile(plan_placement)
    assert indent(picture, "    ") in Path(path).read_text(encoding="utf-8")


def test_groups_of_vpp_when_the_stages_do_not_divide_the_microbatches():
    """Two stages, five micro-batches: a group of two and one of three."""
    first = drawn("VPP", 2, 5, Costs(f=2, b=1, w=1)).splitlines()[0]
    forwards = [cell for cell in first.split() if "F" in cell]
    assert " ".join(forwards) == "0F0 0F1 2F0 2F1 0F2 0F3 0F4 2F2 2F3 2F4"


# --- closed forms ---------------------------------------------------------------------

GRID = list(product(range(1, 9), range(1, 21)))
TIMES = (1.0, 0.6, 1.7)
PEAK = {  # of the stage that holds most, in M_B, for any M_W from 0 to M_B
    "FThenB": lambda p, m: m,
    "1F1B": lambda p, m: min(p, m),
    "ZBH1": lambda p, m: min(p, m),
    "ZBH2": lambda p, m: min(2 * p - 1, m),
    "ZBV": lambda p, m: min(p, m),
}
IDLE = {  # of the slowest stage, and the domain of the form: m >= this, W <= F or not
    "FThenB": (lambda p, f, b, w: (p - 1) * (f + b + w), lambda p: 1, False),
    "1F1B": (lambda p, f, b, w: (p - 1) * (f + b + w), lambda p: 1, False),
    "VPP": (lambda p, f, b, w: (p - 1) * (f + b + w) / 2, lambda p: p, False),
    "ZBH1": (lambda p, f, b, w: (p - 1) * (f + b - w), lambda p: p, True),
    "ZBH2": (
        lambda p, f, b, w: max(0, (p - 1) * (f + b - 2 * w)),
        lambda p: 2 * p - 1,
        True,
    ),
}


@cache
def hand_made(mode: str, p: int, m: int) -> Schedule:
    return HAND_MADE[mode](n_stages=p, n_microbatches=m)


def largest_idle(mode: str, p: int, m: int, costs: Costs) -> float:
    return max(idle(simulate(hand_made(mode, p, m), costs)))


def peak(schedule: Schedule, m_w: float) -> float:
    return max(peaks(schedule.orders, Costs(m_w=m_w).on(schedule.placement)))


@pytest.mark.parametrize("v", [1, 2, 3])
def test_vpp_has_its_closed_forms_for_any_number_of_chunks(v):
    for p, m in GRID[::2]:
        schedule = plan_vpp(n_stages=p, n_microbatches=m, chunks_per_stage=v)
        assert schedule.placement.n_chunks == p * v
        # at least the closed form of its largest group, and exact when p divides m
        group = -(-m // max(1, m // p))
        held = peak(schedule, 0.5)
        assert held <= min(m, ((v - 1) * group + 2 * p - 1) / v) + 1e-9
        if m % p == 0 and m > p:
            assert held == pytest.approx((1 + (p - 1) / (p * v)) * p)
        if m >= p:
            waited = max(idle(simulate(schedule)))
            assert waited == pytest.approx(3 * (p - 1) / v)


@pytest.mark.parametrize("mode", PEAK)
@pytest.mark.parametrize("m_w", [0.0, 0.366, 1.0])
def test_memory_is_as_promised(mode, m_w):
    for p, m in [*GRID[::3], (17, 31), (24, 60)]:
        held = peak(hand_made(mode, p, m), m_w)
        assert held == pytest.approx(PEAK[mode](p, m)), (p, m)


@pytest.mark.parametrize("mode", IDLE)
def test_idle_time_is_the_closed_form_in_its_domain(mode):
    form, least, w_at_most_f = IDLE[mode]
    for p in (1, 2, 3, 6):
        for m in {p, 2 * p - 1, 3 * p + 1} - set(range(least(p))):
            for f, b, w in product(TIMES, repeat=3):
                if w <= f or not w_at_most_f:
                    waited = largest_idle(mode, p, m, Costs(f, b, w))
                    assert waited == pytest.approx(form(p, f, b, w)), (p, m, f, b, w)


def test_zb_v_never_waits_with_equal_times_and_enough_microbatches():
    for p, m in GRID:
        waited = largest_idle("ZBV", p, m, Costs())
        assert (waited == pytest.approx(0)) == (m >= 2 * p - 1), (p, m, waited)
    assert largest_idle("ZBV", 4, 12, Costs(f=1, b=1.5, w=0.5)) > 1


# --- DualPipeV ------------------------------------------------------------------------


@pytest.mark.parametrize("p", range(2, 9))
def test_dual_pipe_v_is_the_order_of_torch(p):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for m in range(2 * p, 4 * p + 1, p):
        sizes = SimpleNamespace(pp_group_size=p, _n_microbatches=m)
        order_of = schedules.ScheduleDualPipeV._calculate_single_rank_operations
        of_torch = [[repr(action) for action in order_of(sizes, r)] for r in range(p)]
        ours = to_torch_csv(plan_dual_pipe_v(n_stages=p, n_microbatches=m))
        assert list(csv.reader(ours.splitlines())) == of_torch


def test_auto_takes_pairs_where_they_pay():
    for fb, name in ((4, "DualPipeV"), (6, "ZBV")):
        costs = Costs(f=2, b=2, w=2, comm=0.2, fb=fb, memory_limit=2.5)
        sizes = {"n_stages": 2, "n_microbatches": 12}
        assert (
            make_plan(PlanRequest(schedule="auto", costs=costs, **sizes)).mode == name
        )
