"""The parts of the wave planner by themselves: timing, rounds, the critical path."""

import math
import random

import pytest

from zbpp.core import Costs, MemoryModel, Placement, Schedule, lower_bound
from zbpp.schedules.planner.budget import Budget
from zbpp.schedules.planner.draws import Draws
from zbpp.schedules.planner.multi.critical_path import improve
from zbpp.schedules.planner.multi.groups import plan_in_groups
from zbpp.schedules.planner.multi.iterated import improve_in_turns
from zbpp.schedules.planner.multi.moves import improve_further
from zbpp.schedules.planner.multi.problem import PlacementProblem, Plan
from zbpp.schedules.planner.multi.rounds import plan_rounds
from zbpp.schedules.planner.multi.seeds import seeds
from zbpp.schedules.planner.multi.timing import time_rows
from zbpp.simulator import simulate, span

PLACEMENTS = (
    Placement.wave(3, 2),
    Placement.wave(4, 2),
    Placement.wave(3, 3),
    Placement.interleaved(3, 2),
    Placement.single(4),
)


def case(seed: int) -> tuple[PlacementProblem, Costs]:
    rng = random.Random(seed)
    placement = PLACEMENTS[seed % len(PLACEMENTS)]
    n, p = placement.n_chunks, placement.n_stages
    times = (tuple(rng.uniform(0.3, 1.5) for _ in range(n)) for _ in range(3))
    costs = Costs(*times, comm=rng.choice((0.0, 0.2)))
    memory = MemoryModel(limit=rng.choice((1.0, 1.5, 2.0, p)) * 1.0)
    return PlacementProblem.of(placement, rng.randint(1, 9), costs, memory), costs


def schedule_of(problem: PlacementProblem, plan: Plan) -> Schedule:
    """Build the schedule, which checks its order and its memory."""
    return Schedule(
        "test",
        problem.placement,
        problem.n_microbatches,
        problem.orders(plan.rows),
        problem.memory_model,
    )


@pytest.mark.parametrize("seed", range(15))
def test_rows_are_timed_as_the_simulator_does(seed):
    problem, costs = case(seed)
    plan = seeds(problem, Budget(math.inf))[0].plan
    times = time_rows(problem, plan.rows)
    assert times is not None
    timeline = simulate(schedule_of(problem, plan), costs)
    assert times.span == pytest.approx(span(timeline), rel=1e-12)
    assert times.span == pytest.approx(plan.span, rel=1e-12)
    for starts, row in zip(times.starts, timeline.rows, strict=True):
        assert starts == pytest.approx([slot.start for slot in row[: len(starts)]])


def test_rows_that_wait_for_one_another_have_no_times():
    problem, _ = case(0)
    plan = seeds(problem, Budget(math.inf))[0].plan
    rows = [row[::-1] for row in plan.rows]
    assert time_rows(problem, rows) is None


@pytest.mark.parametrize("seed", range(15))
def test_moves_on_the_critical_path_keep_the_plan_valid(seed):
    problem, costs = case(seed)
    found = seeds(problem, Budget(math.inf))
    worst = found[-1].plan
    better = improve(problem, worst, Budget(2e4), Draws(0))
    assert better.span <= worst.span
    timeline = simulate(schedule_of(problem, better), costs)
    assert span(timeline) == pytest.approx(better.span, rel=1e-12)


def test_moves_on_the_critical_path_shorten_most_plans():
    """Each case starts at its worst seed; a search that moved nothing would fail."""
    shorter = 0
    for seed in range(15):
        problem, _ = case(seed)
        worst = seeds(problem, Budget(math.inf))[-1].plan
        plan = improve(problem, worst, Budget(2e4), Draws(0))
        shorter += plan.span < worst.span * 0.999
    assert shorter >= 10


def test_detours_shorten_a_plan_that_no_move_makes_better():
    costs, memory = Costs(10.408, 10.204, 7.703, 0.408), MemoryModel(1, 0.432432, 2)
    problem = PlacementProblem.of(Placement.wave(4), 6, costs, memory)
    start = seeds(problem, Budget(2e6))[0].plan
    cold = improve(problem, start, Budget(2e5), Draws(0))
    assert improve(problem, cold, Budget(2e5), Draws(0)).span == cold.span
    assert improve(problem, cold, Budget(2e5), Draws(0), 0.02).span < cold.span - 1


def test_groups_find_the_optimum_that_admits_pairs():
    """4 stages, 4 micro-batches, limit 1.5: 45, proved by the solver."""
    memory = MemoryModel(limit=1.5)
    problem = PlacementProblem.of(Placement.wave(4), 4, Costs(2.0, 2.0, 2.0), memory)
    others = improve(
        problem, seeds(problem, Budget(2e6))[0].plan, Budget(2e5), Draws(0), 0.02
    )
    assert others.span == 46
    plan = plan_in_groups(problem, Budget(1e5), others.span * 1.05)
    assert plan is not None and plan.span == 45
    schedule_of(problem, plan)
    assert plan_in_groups(problem, Budget(1e5), 44.0) is None
    assert improve_further(problem, others).span == 45


@pytest.mark.parametrize("seed", range(5))
def test_turns_keep_the_plan_valid_and_shorten_one_that_moves_do_not(seed):
    problem, costs = case(seed)
    worst = seeds(problem, Budget(math.inf))[-1].plan
    better = improve_in_turns(problem, worst, Budget(1e4), Draws(seed))
    assert better.span <= worst.span
    timeline = simulate(schedule_of(problem, better), costs)
    assert span(timeline) == pytest.approx(better.span, rel=1e-12)
    assert improve_in_turns(problem, worst, Budget(0), Draws(0)) is worst


def test_turns_shorten_a_plan_that_detours_do_not():
    memory = MemoryModel(limit=1.875)
    problem = PlacementProblem.of(Placement.wave(3), 5, Costs(), memory)
    start = seeds(problem, Budget(2e6))[0].plan
    moved = improve(problem, start, Budget(3e5), Draws(0), 0.02)
    assert moved.span == 20.5
    assert improve_in_turns(problem, moved, Budget(1e5), Draws(0)).span == 20


def test_moves_stop_at_the_bound_and_at_the_end_of_the_budget():
    problem, _ = case(1)
    plan = seeds(problem, Budget(math.inf))[-1].plan
    assert improve(problem, plan, Budget(0), Draws(0)) is plan
    unit = PlacementProblem.of(
        Placement.wave(4), 8, Costs(2.0, 2.0, 2.0), MemoryModel(limit=4.0)
    )
    best = seeds(unit, Budget(math.inf))[0].plan
    budget = Budget(1e4)
    assert improve(unit, best, budget, Draws(0)) is best
    assert budget.spent == 0


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (6, 20)])
def test_rounds_of_equal_times_have_no_bubble(p, m):
    problem = PlacementProblem.of(
        Placement.wave(p), m, Costs(2.0, 2.0, 2.0), MemoryModel(limit=float(p))
    )
    plan = plan_rounds(problem)
    assert plan is not None
    assert plan.span == 6.0 * m
    schedule_of(problem, plan)


def test_rounds_of_real_times_meet_the_bound_at_p():
    """The 1.5B model: the plan cannot be shorter, and one W more would be longer."""
    costs = Costs(18.522, 18.086, 9.337, 0.601)
    memory = MemoryModel(m_w=0.366412, limit=8.0)
    problem = PlacementProblem.of(Placement.wave(8), 24, costs, memory)
    plan = plan_rounds(problem)
    assert plan is not None
    bound = lower_bound(Placement.wave(8), 24, costs, memory)
    assert plan.span == pytest.approx(bound, rel=1e-9)
    assert plan.span + problem.time[-1] > bound * 1.003


@pytest.mark.parametrize("limit", [1.0, 1.5, 2.5, 4.0])
def test_rounds_keep_any_memory(limit):
    memory = MemoryModel(limit=limit)
    problem = PlacementProblem.of(Placement.wave(6), 8, Costs(2.0, 2.0, 2.0), memory)
    plan = plan_rounds(problem)
    assert plan is not None
    schedule_of(problem, plan)
