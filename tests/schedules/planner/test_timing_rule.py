"""The timing rule of the clock, which planners inline: every copy gives its times."""

import inspect
import math
import random
from dataclasses import replace
from functools import partial

import pytest

from zbpp.core import Costs, MemoryModel, Placement, longest_span, replay
from zbpp.schedules.planner.budget import Budget
from zbpp.schedules.planner.multi.list_scheduler import list_schedule
from zbpp.schedules.planner.multi.place_weights import place_weights
from zbpp.schedules.planner.multi.problem import PlacementProblem, Rows
from zbpp.schedules.planner.multi.rounds import _Draft, plan_rounds
from zbpp.schedules.planner.multi.rules import (
    RULES,
    is_v,
    order_of,
    ranks_of,
    settings_of,
)
from zbpp.schedules.planner.multi.timing import time_again, time_rows
from zbpp.schedules.planner.single.list_scheduler import list_schedule_line
from zbpp.schedules.planner.single.problem import Line, time_orders
from zbpp.schedules.planner.single.seeds import seeds as line_seeds

SEEDS = range(40)


def random_costs(rng: random.Random, n_chunks: int, n_stages: int) -> Costs:
    def times(least: float) -> tuple[float, ...]:
        return tuple(rng.uniform(least, 2.0) for _ in range(n_chunks))

    return Costs(
        *(times(0.1), times(0.1), times(0.0)),
        comm=rng.choice((0.0, 0.3)),
        loss=rng.choice((0.0, 0.4)),
        splits=tuple(rng.random() < 0.8 for _ in range(n_stages)),
    )


def random_problem(seed: int, placement: Placement | None = None) -> PlacementProblem:
    rng = random.Random(seed)
    p = rng.randint(1, 5)
    if placement is None:
        kind = rng.choice((Placement.wave, Placement.interleaved))
        placement = kind(p, rng.choice((1, 2, 3)))
    costs = random_costs(rng, placement.n_chunks, placement.n_stages)
    memory = MemoryModel(limit=rng.choice((1.0, 2.5, 4.0, 100.0)))
    return PlacementProblem.of(placement, rng.randint(1, 8), costs, memory)


def random_rows(problem: PlacementProblem, rng: random.Random) -> Rows:
    """Orders that end: passes are drawn from those whose input is computed."""
    last, m = 2 * problem.n_chunks - 1, problem.n_microbatches
    done = [0] * (3 * problem.n_chunks)
    rows: Rows = [[] for _ in range(problem.n_stages)]
    while True:
        ready = []
        for q in range(len(done)):
            stage = problem.stage[q]
            before = q - 1 if q <= last else q - problem.n_chunks
            if q > last and stage in problem.joint:
                continue
            if done[q] < (m if q == 0 else done[before]):
                ready.append(q)
        if not ready:
            return rows
        q = rng.choice(ready)
        done[q] += 1
        rows[problem.stage[q]].append(q)


def clock_starts(problem: PlacementProblem, rows: Rows) -> list[list[float]]:
    """Starts of the passes by `zbpp.core.clock`."""
    orders = [order[:-1] for order in problem.orders(rows)]
    slots = replay(orders, problem.times, n_microbatches=problem.n_microbatches)
    return [[slot.start for slot in row] for row in slots]


def clock_span(problem: PlacementProblem, rows: Rows) -> float:
    orders = problem.orders(rows)
    return longest_span(
        replay(orders, problem.times, n_microbatches=problem.n_microbatches)
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_of_any_placement_are_timed_as_by_the_clock(seed):
    problem = random_problem(seed)
    rows = random_rows(problem, random.Random(seed))
    times = time_rows(problem, rows)
    assert times is not None
    assert times.starts == clock_starts(problem, rows)
    assert times.span == clock_span(problem, rows)


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_of_a_line_are_timed_as_by_the_clock(seed):
    problem = random_problem(seed, Placement.single(1 + seed % 5))
    p, free = problem.n_stages, MemoryModel()
    problem = replace(problem, memory=free.on(problem.placement, problem.times.splits))
    rows = random_rows(problem, random.Random(seed))
    kinds = [bytearray(q // p for q in row) for row in rows]
    assert time_orders(line_of_problem(problem), kinds) == clock_span(problem, rows)


def line_of_problem(problem: PlacementProblem) -> Line:
    times, held = problem.times, problem.memory
    return Line(
        problem.n_microbatches,
        *(times.f, times.b, times.w, times.hops),
        *(held.m_b, held.m_w, held.limit, times.splits),
        *(held.peak_f, held.peak_b, held.peak_w),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_w_are_placed_at_the_times_of_the_clock(seed):
    problem = random_problem(seed)
    problem = replace(
        problem, memory=replace(problem.memory, limit=(math.inf,) * problem.n_stages)
    )
    rows = random_rows(problem, random.Random(seed))
    without = [[q for q in row if q < 2 * problem.n_chunks] for row in rows]
    for late in (0.0, 0.5, 1.0):
        each = [late] * problem.n_stages
        plan = place_weights(problem, without, each, math.inf)
        assert plan is not None
        assert plan.span == pytest.approx(clock_span(problem, plan.rows), rel=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_rounds_run_at_the_times_of_the_clock(seed):
    problem = random_problem(seed, Placement.wave(1 + seed % 5))
    plan = plan_rounds(problem)
    if plan is None:
        assert max(problem.memory.limit) < problem.n_stages  # it needs more memory
    else:
        assert plan.span == pytest.approx(clock_span(problem, plan.rows), rel=1e-12)


def test_list_scheduling_of_a_line_runs_at_the_times_of_the_clock():
    """Or later: a stage may wait for a better pass that then finds no memory."""
    ratios = []
    for seed in SEEDS:
        problem = random_problem(seed, Placement.single(1 + seed % 5))
        p, line = problem.n_stages, line_of_problem(problem)
        for rules in line_seeds(line):
            run = list_schedule_line(line, rules)
            rows = [
                [(s, 2 * p - 1 - s, 3 * p - 1 - s)[kind] for kind in row]
                for s, row in enumerate(run.kinds)
            ]
            ratios.append(run.span / clock_span(problem, rows))
    check_ratios(ratios)


def test_list_scheduling_of_any_placement_runs_at_the_times_of_the_clock():
    """Or later, as above."""
    ratios = []
    for seed in SEEDS:
        problem = random_problem(seed)
        ranks = partial(ranks_of, problem, partial(order_of, problem))
        for rule in RULES[::4]:
            if rule.stretch > 0 or is_v(problem):
                settings = settings_of(problem, rule, ranks)
                plan = list_schedule(problem, settings, math.inf, Budget(math.inf))
                assert plan is not None
                ratios.append(plan.span / clock_span(problem, plan.rows))
    check_ratios(ratios)


def check_ratios(ratios: list[float]) -> None:
    """None is below 1, nearly all are 1, and none is far from it."""
    assert len(ratios) > 200
    assert min(ratios) > 1 - 1e-9
    assert sum(ratio < 1 + 1e-9 for ratio in ratios) > 0.98 * len(ratios)
    assert max(ratios) < 1.02


COPIES = (
    time_again,
    time_orders,
    place_weights,
    list_schedule_line,
    list_schedule,
    _Draft.put,
)


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_of_the_rule_says_that_it_is_one(copy):
    source = inspect.getsource(copy)
    assert "# The rule of core/clock.py, inlined for speed" in source
