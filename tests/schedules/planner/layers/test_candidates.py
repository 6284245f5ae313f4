"""Splits drawn for their lower bounds: new, no worse than asked for, in order."""

from math import inf

import pytest
from layer_plan import plan_layers

from zbpp.core import Costs, LayerCosts, MemoryModel, Placement, Schedule
from zbpp.planning import MODES
from zbpp.planning.search import Problem
from zbpp.schedules import even_split
from zbpp.schedules.planner.budget import Budget
from zbpp.schedules.planner.layers.candidates import low_bounds
from zbpp.schedules.planner.layers.trials import Trials


def llama() -> LayerCosts:
    """32 layers, the last with a head worth 2.4 more; 28.3B times of 4 layers."""
    passes = [(one / 4,) * 31 + (one / 4 * 3.4,) for one in (10.408, 10.204, 7.703)]
    return LayerCosts(32, *passes, comm=0.408, m_w=0.432432, limit=32.0)


def trials_of(layers: LayerCosts, p: int, m: int) -> Trials:
    placement = Placement.wave(p)

    def planner(costs: Costs, memory: MemoryModel, effort: str) -> Schedule:
        return Problem(m, costs, memory, effort).plan(MODES["ZBV"], placement)

    return Trials(planner, layers, placement, m)


def test_the_lowest_means_of_bounds_come_first() -> None:
    trials = trials_of(llama(), 4, 8)
    even = even_split(32, 8)
    below = trials.bound(even)
    drawn = low_bounds(trials, [even], Budget(inf), below=below, number=40)
    assert even not in drawn and len(set(drawn)) == len(drawn) > 10
    outlooks = [trials.outlook(split) for split in drawn]
    assert outlooks == sorted(outlooks) and outlooks[0] < trials.outlook(even)
    assert all(sum(split) == 32 and min(split) >= 1 for split in drawn)
    assert all(trials.bound(split) < below for split in drawn)
    assert trials.n_plans == 0
    again = trials_of(llama(), 4, 8)
    assert drawn == low_bounds(again, [even], Budget(inf), below=below, number=40)


def test_no_plan_is_below_the_bound_of_its_split() -> None:
    trials = trials_of(llama(), 4, 8)
    for split in ((4,) * 8, (3, 4, 5, 4, 5, 4, 5, 2), (2, 4, 4, 4, 5, 5, 5, 3)):
        found = trials.of(split)
        assert found is not None
        assert trials.outlook(split) <= trials.bound(split) <= found.step * (1 + 1e-9)


def test_draws_end_with_the_budget_and_without_moves() -> None:
    trials = trials_of(llama(), 4, 8)
    even = even_split(32, 8)
    assert low_bounds(trials, [even], Budget(0.0), below=inf, number=9) == []
    few = LayerCosts(n_layers=8)
    full = trials_of(few, 4, 8)
    assert low_bounds(full, [(1,) * 8], Budget(inf), below=inf, number=9) == []


@pytest.mark.slow
def test_two_chunks_of_a_heavy_head_with_real_times() -> None:
    """Share of the step beyond perfect balance; .186 from balanced splits alone."""
    found = plan_layers("ZBV", llama(), n_stages=8, n_microbatches=24)
    assert 1 - found.ideal_step / found.step <= 0.172
