"""The loops of the planner: timed as by the clock, and the same in C and in Python."""

import math
import os
import random
import subprocess
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from zbpp.core import (
    Costs,
    Placement,
    Schedule,
    longest_span,
    lower_bound,
    replay,
)
from zbpp.schedules.planner import compiled as compiled_folder
from zbpp.schedules.planner.budget import Budget
from zbpp.schedules.planner.compiled import library as library_module
from zbpp.schedules.planner.compiled.library import library
from zbpp.schedules.planner.search import compiled, critical_path, list_scheduler
from zbpp.schedules.planner.search.critical_path import XorShift64, time_rows
from zbpp.schedules.planner.search.list_scheduler import Settings
from zbpp.schedules.planner.search.problem import PlacementProblem, Rows
from zbpp.schedules.planner.search.seeds import (
    LINE_RULES,
    RULES,
    is_line,
    known_order,
    line_settings_of,
    seeds,
    settings_of,
    stretched_order,
)

SEEDS = range(12)
is_compiled = pytest.mark.skipif(library is None, reason="needs the compiled loops")


def problem_of(seed: int) -> PlacementProblem:
    """Some stages do not split, some passes have peaks, some take no time."""
    rng = random.Random(seed)
    p, v = rng.randint(1, 5), rng.choice((1, 2, 2, 3))
    kind = rng.choice((Placement.wave, Placement.interleaved))
    placement = Placement.single(p) if v == 1 else kind(p, v)
    times = [
        tuple(rng.choice((0.0, 0.5, 1.3, 2.0)) for _ in range(p * v)) for _ in "fbw"
    ]
    costs = Costs(
        *times,
        comm=rng.choice((0.0, 0.3)),
        splits=tuple(rng.random() < 0.8 for _ in range(p)),
        send_occupies=0.2 if seed % 4 == 0 else 0.0,
    )
    memory = Costs(memory_limit=rng.choice((1.0, 1.75, 3.0)))
    if seed % 3 == 0:
        peak_w = rng.choice((0.0, 0.1))
        memory = Costs(m_w=1.3, peak_b=0.9, peak_w=peak_w, memory_limit=4.0)
    held = costs.with_memory(memory).on(placement).joined()
    return PlacementProblem(held, rng.randint(1, 8))


def some_settings(problem: PlacementProblem) -> Iterator[Settings]:
    """Of every third rule, and of an order whose W's are to be placed."""
    if is_line(problem):
        yield from (line_settings_of(problem, rule) for rule in LINE_RULES[::3])
    else:
        yield from (settings_of(problem, rule) for rule in RULES[::3])
    for overrun in (0.0, 0.5):
        yield known_order(stretched_order(problem, 1.5), overrun, is_fair=not overrun)


def random_rows(problem: PlacementProblem, rng: random.Random) -> Rows:
    """Orders that end: passes are drawn from those whose input is computed."""
    last, m = 2 * problem.n_chunks - 1, problem.n_microbatches
    done = [0] * (3 * problem.n_chunks)
    rows: Rows = [array("i") for _ in range(problem.n_stages)]
    while True:
        ready = []
        for q in range(len(done)):
            before = q - 1 if q <= last else q - problem.n_chunks
            is_joint = q > last and problem.joint[problem.stage[q]]
            if not is_joint and done[q] < (m if q == 0 else done[before]):
                ready.append(q)
        if not ready:
            return rows
        q = rng.choice(ready)
        done[q] += 1
        rows[problem.stage[q]].append(q)


def clock_span(problem: PlacementProblem, rows: Rows) -> float:
    m = problem.n_microbatches
    return longest_span(replay(problem.orders(rows), problem.costs, n_microbatches=m))


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_are_timed_as_by_the_clock(seed: int) -> None:
    problem = problem_of(seed)
    rows = random_rows(problem, random.Random(seed))
    orders = [order[:-1] for order in problem.orders(rows)]
    slots = replay(orders, problem.costs, n_microbatches=problem.n_microbatches)
    times, _ = time_rows(problem, rows)
    assert times is not None
    assert times.starts == [[slot.start for slot in row] for row in slots]
    assert times.span == clock_span(problem, rows)
    plan, starts = compiled.timed(problem, rows)
    assert plan.span == times.span
    assert list(map(list, starts)) == times.begins[: 2 * problem.n_chunks]


def test_rows_that_wait_for_one_another_have_no_times() -> None:
    problem = problem_of(1)
    rows = [row[::-1] for row in random_rows(problem, random.Random(1))]
    assert time_rows(problem, rows)[0] is None
    assert compiled.timed(problem, rows).plan.span == math.inf


@pytest.mark.parametrize("seed", SEEDS)
def test_list_schedules_run_at_the_times_of_the_clock_in_c_and_in_python(
    seed: int,
) -> None:
    """Or later: a stage may wait for a better pass that then finds no memory."""
    problem = problem_of(seed)
    for settings in some_settings(problem):
        for below in (math.inf, 1.05 * problem.target):
            spent = Budget(math.inf)
            plan = compiled.list_schedule(problem, settings, below, spent)
            same = list_scheduler.list_schedule(problem, settings, below)
            assert (plan, spent.spent) == same
            if plan is not None:
                assert plan.span < below + 2 * problem.tiny
                assert plan.span >= clock_span(problem, plan.rows) * (1 - 1e-9)
                assert problem.fits(plan.rows)


@pytest.mark.parametrize("seed", SEEDS)
def test_moves_keep_a_plan_valid_and_are_the_same_in_c_and_in_python(
    seed: int,
) -> None:
    problem = problem_of(seed)
    worst = seeds(problem, Budget(math.inf))[-1].plan
    threshold = 0.0 if seed % 2 else 0.05
    pairs = [(Budget(1e3), XorShift64(seed)) for _ in range(2)]
    (spent, draws), (same_spent, same_draws) = pairs
    better = compiled.improve(problem, worst, spent, draws, threshold)
    same = critical_path.improve(problem, worst, same_spent, same_draws, threshold)
    assert better == same and better.span <= worst.span
    assert spent.spent == same_spent.spent and draws.state == same_draws.state
    assert better.span == pytest.approx(clock_span(problem, better.rows), rel=1e-12)
    n = problem.n_microbatches
    Schedule("moved", problem.placement, n, problem.orders(better.rows))
    assert problem.fits(better.rows)


def test_moves_stop_at_the_bound_and_at_the_end_of_the_budget() -> None:
    costs = Costs(2.0, 2.0, 2.0, memory_limit=4.0)
    problem = PlacementProblem(costs.on(Placement.wave(4)), 8)
    best = seeds(problem, Budget(math.inf))[0].plan
    bound = lower_bound(problem.placement, 8, costs)
    assert best.span == pytest.approx(bound)
    budget = Budget(1e4)
    assert compiled.improve(problem, best, budget, XorShift64(0)) is best
    assert budget.spent == 0
    a_rule = settings_of(problem, RULES[0])
    longer = compiled.list_schedule(problem, a_rule, math.inf, budget)
    assert longer is not None
    none = Budget(0)
    assert compiled.improve(problem, longer, none, XorShift64(0)) is longer


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
    (tmp_path / "loops.c").write_text("/* others */")
    assert library_module._is_stale(library)
