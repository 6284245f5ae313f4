"""Plans against proved optima, published generators, tables and patterns."""

import json
import math
from array import array
from pathlib import Path

import pytest

from zbpp.core import Costs, Placement, Schedule, lower_bound
from zbpp.planning import plan
from zbpp.schedules import plan_zb_v
from zbpp.schedules.patterns.v_patterns import v_half_rows, v_min_rows
from zbpp.schedules.planner.budget import Budget
from zbpp.schedules.planner.search.compiled import list_schedule
from zbpp.schedules.planner.search.problem import PlacementProblem
from zbpp.schedules.planner.search.seeds import known_order
from zbpp.simulator import bubble_rate, simulate, span

DATA = Path(__file__).parents[2] / "data"
MODES = {"single": "ZB", "v": "ZBV"}
MODELS = {
    "unit": (Costs(), 0.5),
    "1.5B": (Costs(18.522, 18.086, 9.337, 0.601), 0.366412),
    "28.3B": (Costs(10.408, 10.204, 7.703, 0.408), 0.432432),
}


def rows(name: str) -> list[dict]:
    return json.loads((DATA / name).read_text(encoding="utf-8"))["rows"]


@pytest.mark.parametrize(
    "row",
    rows("optimum_public.json"),
    ids=lambda row: f"{row['kind']}-{row['p']}x{row['m']}-{row['mem_limit']:g}",
)
def test_proved_optima_are_met(row):
    """The V's costs and span are in units of a chunk's pass; one is missed by 1."""
    unit = 1.0 if row["kind"] == "single" else 2.0
    costs = Costs(f=unit, b=unit, w=unit)
    memory = Costs(m_w=row["costs"]["wfrac"], memory_limit=row["mem_limit"])
    p, m = row["p"], row["m"]
    schedule = plan(
        MODES[row["kind"]],
        n_stages=p,
        n_microbatches=m,
        costs=costs.with_memory(memory),
    )
    missed = (row["kind"], p, m, row["mem_limit"]) == ("v", 4, 4, 1.5)
    assert span(simulate(schedule, costs)) == pytest.approx(row["obj"] + missed)


def test_shifts_find_an_optimum_that_no_single_move_does():
    """Proved by the solver; without shifts 41."""
    costs, memory = Costs(2.0, 2.0, 2.0), Costs(memory_limit=1.875)
    schedule = plan(
        "ZBV", n_stages=3, n_microbatches=5, costs=costs.with_memory(memory)
    )
    assert span(simulate(schedule, costs)) == 40


@pytest.mark.parametrize("name", ["ZB-1p", "ZB-2p", "ZB-V"])
@pytest.mark.parametrize(
    "row", rows("paper_tables.json"), ids=lambda row: f"{row['model']}-m{row['m']}"
)
def test_the_papers_bubbles_are_met(row, name):
    costs = Costs(row["tf"], row["tb"], row["tw"], row["tcomm"])
    p, m = row["p"], row["m"]
    memory = Costs(
        m_b=1.0, m_w=row["m_w_over_m_b"], memory_limit=2 * p if name == "ZB-2p" else p
    )
    schedule = plan(
        "ZBV" if name == "ZB-V" else "ZB",
        n_stages=p,
        n_microbatches=m,
        costs=costs.with_memory(memory),
        effort="fast",
    )
    planned = simulate(schedule, costs)
    if name in row["bubble"]:
        assert bubble_rate(planned) < row["bubble"][name] + 5e-5
    if name == "ZB-V":
        bound = lower_bound(schedule.placement, m, costs.with_memory(memory))
        assert span(planned) <= bound * 1.001


def peers(kind: str, largest: float, above: float = 0) -> list[dict]:
    return [
        row
        for row in rows("peers_public.json")
        if kind in row and above < row["p"] * row["m"] <= largest
    ]


def name_of(row: dict) -> str:
    return f"{row['costs']['name']}-{row['p']}x{row['m']}-{row['limit']:g}"


def check_peer(row: dict, kind: str, effort: str) -> None:
    """At least as good, and better where it is over 1 % above its bound."""
    times = row["costs"]
    costs = Costs(*(float(times[name]) for name in ("F", "B", "W", "comm")))
    memory = Costs(m_b=1.0, m_w=times["wfrac"], memory_limit=row["limit"])
    p, m, peer = row["p"], row["m"], row[kind]["bubble"]
    schedule = plan(
        MODES[kind],
        n_stages=p,
        n_microbatches=m,
        costs=costs.with_memory(memory),
        effort=effort,
    )
    Schedule("judge", schedule.placement, m, schedule.orders, memory)
    ours = bubble_rate(simulate(schedule, costs))
    assert ours <= peer + 1e-5  # five digits are given
    work = m * (times["F"] + times["B"] + times["W"])
    bound = lower_bound(schedule.placement, m, costs.with_memory(memory))
    if work / (1 - peer) > 1.01 * bound:
        assert ours < peer - 1e-5


@pytest.mark.parametrize("row", peers("single", math.inf), ids=name_of)
def test_no_published_generator_of_one_chunk_is_better(row):
    check_peer(row, "single", "fast")


@pytest.mark.parametrize("row", peers("v", 64), ids=name_of)
def test_no_published_generator_of_a_small_v_is_better(row):
    check_peer(row, "v", "default")


@pytest.mark.slow
@pytest.mark.parametrize("row", peers("v", math.inf, above=64), ids=name_of)
def test_no_published_generator_of_a_large_v_is_better(row):
    check_peer(row, "v", "fast")


PATTERNS = {
    "V-Min": (v_min_rows, lambda p: (p + 4) // 3),
    "V-Half": (v_half_rows, lambda p: (p + 2) // 2),
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("p", "m"), [(4, 4), (6, 9), (7, 14), (12, 24)])
def test_published_patterns_are_met(pattern, model, p, m):
    """Under the memory of a pattern, whenever its W's are placed."""
    rows_of, limit = PATTERNS[pattern]
    costs, share = MODELS[model]
    memory = Costs(m_w=share, memory_limit=limit(p))
    problem = PlacementProblem(costs.with_memory(memory).on(Placement.wave(p)), m)
    order = [array("i", row) for row in rows_of(problem.numbers, m)]
    plans = [
        list_schedule(problem, known_order(order, overrun), math.inf, Budget(math.inf))
        for overrun in (0.0, 0.5, 0.75, 1.0)
    ]
    spans = [pattern_plan.span for pattern_plan in plans if pattern_plan is not None]
    assert spans
    schedule = plan(
        "ZBV",
        n_stages=p,
        n_microbatches=m,
        costs=costs.with_memory(memory),
        effort="fast",
    )
    assert span(simulate(schedule, costs)) <= min(spans) * (1 + 1e-9)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 4), (6, 9), (7, 10), (16, 24)])
def test_the_hand_made_zb_v_is_met(model, p, m):
    costs, share = MODELS[model]
    memory = Costs(m_w=share, memory_limit=float(p))
    hand_made = span(simulate(plan_zb_v(n_stages=p, n_microbatches=m), costs))
    schedule = plan(
        "ZBV",
        n_stages=p,
        n_microbatches=m,
        costs=costs.with_memory(memory),
        effort="fast",
    )
    assert span(simulate(schedule, costs)) <= hand_made * (1 + 1e-9)
