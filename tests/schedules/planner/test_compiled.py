"""The compiled loops give the plans of the Python ones to the last bit."""

import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from zbpp.core import Costs, MemoryModel, Placement
from zbpp.schedules.planner import compiled as compiled_folder
from zbpp.schedules.planner.budget import Budget
from zbpp.schedules.planner.compiled import library as library_module
from zbpp.schedules.planner.compiled.library import library
from zbpp.schedules.planner.draws import Draws
from zbpp.schedules.planner.multi import compiled, critical_path, list_scheduler, timing
from zbpp.schedules.planner.multi import place_weights as weights
from zbpp.schedules.planner.multi.problem import PlacementProblem
from zbpp.schedules.planner.multi.rules import (
    RULES,
    is_v,
    order_of,
    ranks_of,
    settings_of,
)
from zbpp.schedules.planner.multi.timing import retime, time_rows
from zbpp.schedules.planner.single import compiled as compiled_line
from zbpp.schedules.planner.single import list_scheduler as line_scheduler
from zbpp.schedules.planner.single import problem as line_problem
from zbpp.schedules.planner.single.problem import Kinds, line_of
from zbpp.schedules.planner.single.seeds import seeds as line_seeds

is_compiled = pytest.mark.skipif(library is None, reason="no compiled loops")
SEEDS = range(24)


def costs_and_memory(seed: int, n: int, p: int) -> tuple[Costs, MemoryModel]:
    """Random ones; some stages do not split, some passes have peaks, some take 0."""
    rng = random.Random(seed)
    times = [tuple(rng.choice((0.0, 0.5, 1.3, 2.0)) for _ in range(n)) for _ in "fbw"]
    splits = tuple(rng.random() < 0.8 for _ in range(p))
    peaks: dict[str, float] = {}
    if seed % 3 == 0:
        peaks = {"m_w": 1.3, "peak_b": 0.9, "peak_w": rng.choice((0.0, 0.1))}
    limit = rng.choice((3.0, 5.0)) if peaks else rng.choice((1.0, 1.75, 3.0))
    memory = MemoryModel(limit=limit, **peaks)
    comm, sends = rng.choice((0.0, 0.3)), 0.2 if seed % 4 == 0 else 0.0
    return Costs(*times, comm=comm, splits=splits, send_occupies=sends), memory


def problem_of(seed: int) -> PlacementProblem:
    rng = random.Random(seed)
    kind, p = rng.choice((Placement.wave, Placement.interleaved)), rng.randint(1, 5)
    placement = kind(p, rng.choice((1, 2, 2, 3)))
    costs, memory = costs_and_memory(seed, placement.n_chunks, p)
    return PlacementProblem.of(placement, rng.randint(1, 8), costs, memory)


@is_compiled
@pytest.mark.parametrize("seed", SEEDS)
def test_list_scheduling_of_a_line_is_the_same(seed: int) -> None:
    p = 1 + seed % 5
    line = line_of(p, 1 + seed % 8, *costs_and_memory(seed, p, p))
    for cut in (math.inf, 1.1 * line.bound()):
        for rules in line_seeds(line):
            ours = compiled_line.list_schedule_line(line, rules, cut=cut)
            assert ours == line_scheduler.list_schedule_line(line, rules, cut=cut)
            for kinds in mixed_up(ours.kinds, random.Random(seed)):
                span = line_problem.time_orders(line, kinds)
                assert compiled_line.time_orders(line, kinds) == span


def mixed_up(kinds: Kinds, rng: random.Random) -> Iterator[Kinds]:
    """The rows; then with jobs swapped: they wait for one another, or hold too much."""
    for n in (0, 1, 4) if kinds else ():
        rows = [bytearray(row) for row in kinds]
        for _ in range(n):
            row = rng.choice(rows)
            i, j = rng.randrange(len(row)), rng.randrange(len(row))
            row[i], row[j] = row[j], row[i]
        yield rows


@is_compiled
@pytest.mark.parametrize("seed", SEEDS)
def test_list_scheduling_and_moves_of_any_placement_are_the_same(seed: int) -> None:
    problem = problem_of(seed)
    order = partial(order_of, problem)
    ranks = partial(ranks_of, problem, order)
    for rule in RULES[seed % 6 :: 6]:
        if rule.stretch == 0 and not is_v(problem):
            continue
        settings = settings_of(problem, rule, ranks)
        for below in (math.inf, 1.05 * problem.target):
            both = Budget(math.inf), Budget(math.inf)
            plan = compiled.list_schedule(problem, settings, below, both[0])
            same = list_scheduler.list_schedule(problem, settings, below, both[1])
            assert plan == same and both[0].spent == both[1].spent
            rows, late = order(rule.stretch), [rule.late] * problem.n_stages
            plan = compiled.place_weights(problem, rows, late, below)
            assert plan == weights.place_weights(problem, rows, late, below)
            if plan is not None:
                assert compiled.retime(problem, plan) == timing.retime(problem, plan)
        if plan is not None and time_rows(problem, plan.rows) is not None:
            check_moves(problem, seed, rule.stretch > 0)


def check_moves(problem: PlacementProblem, seed: int, long: bool) -> None:
    settings = settings_of(
        problem, RULES[1], partial(ranks_of, problem, partial(order_of, problem))
    )
    plan = compiled.list_schedule(problem, settings, math.inf, Budget(math.inf))
    assert plan is not None
    start = retime(problem, plan)
    both = [(Budget(2e3 if long else 5e2), Draws(seed)) for _ in range(2)]
    heat = 0.0 if seed % 2 else 0.05
    ours = compiled.improve(problem, start, *both[0], heat)
    assert ours == critical_path.improve(problem, start, *both[1], heat)
    (one, draws), (other, same) = both
    assert one.spent == other.spent and draws.state == same.state


@is_compiled
def test_another_rule_or_another_draw_gives_another_plan() -> None:
    """The comparisons above would see a difference."""
    costs, memory = Costs(1.3, 1.1, 0.7, 0.1), MemoryModel(limit=2.0)
    problem = PlacementProblem.of(Placement.wave(3), 8, costs, memory)
    plans = set()
    for rule in (RULES[0], RULES[2]):
        settings = settings_of(
            problem, rule, partial(ranks_of, problem, partial(order_of, problem))
        )
        plan = compiled.list_schedule(problem, settings, math.inf, Budget(math.inf))
        assert plan is not None
        for seed in (0, 1):
            moved = compiled.improve(
                problem, retime(problem, plan), Budget(2e3), Draws(seed)
            )
            plans.add(str(moved.rows))
    assert len(plans) == 4


@pytest.mark.parametrize("value", ["0", ""])
def test_the_environment_variable_switches_them_off(value: str) -> None:
    code = "from zbpp.schedules.planner.compiled import library as l; print(l.library)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "ZBPP_COMPILED": value},
        capture_output=True,
        text=True,
        check=True,
    )
    is_off = result.stdout.strip() == "None"
    built = Path(compiled_folder.__file__).with_name("loops.shared")
    assert is_off == (value == "0" or not built.exists())


@is_compiled
def test_loops_of_other_sources_are_not_taken(tmp_path, monkeypatch) -> None:
    assert not library_module._is_stale(library)
    monkeypatch.setattr(library_module, "__file__", str(tmp_path / "library.py"))
    assert not library_module._is_stale(library), "a wheel has no sources"
    (tmp_path / "moves.c").write_text("/* others */")
    assert library_module._is_stale(library)
