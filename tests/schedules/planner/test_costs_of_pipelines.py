"""Unequal links, a loss, stages that cannot split: plans judged by the simulator.

A plan that knew nothing of the links is the control.
"""

import random
from dataclasses import replace

import pytest

from zbpp.core import Costs, Placement, lower_bound, lower_bounds
from zbpp.planning import plan
from zbpp.schedules import plan_placement
from zbpp.simulator import critical_path, makespan, simulate, span, work

LINKS = (0.1, 1.5, 0.1)
COSTS = Costs(1.0, 1.0, 0.7, comm=LINKS, loss=0.3)


@pytest.mark.parametrize(
    ("mode", "limit", "gap"),
    [
        ("ZB", 2, 0.05),
        ("ZB", 3, 0.1),
        ("ZB", 4, 0.06),
        ("ZB", 8, 1e-9),
        ("ZBV", 2, 0.4),
        ("ZBV", 4, 0.2),
        ("ZBV", 8, 0.03),
    ],
)
def test_unequal_links_and_a_loss_are_planned_close_to_the_bound(mode, limit, gap):
    memory = Costs(memory_limit=limit)
    schedule = plan(
        mode, n_stages=4, n_microbatches=12, costs=COSTS.with_memory(memory)
    )
    bound = lower_bound(schedule.placement, 12, COSTS.with_memory(memory))
    reached = span(simulate(schedule, COSTS))
    assert bound * (1 - 1e-9) <= reached <= bound * (1 + gap)


def test_a_plan_for_equal_links_is_worse():
    """Control: links matter, and the planner heeds them."""
    request = {"n_stages": 4, "n_microbatches": 12, "memory_limit": 4}
    blind = plan("ZB", **request, costs=replace(COSTS, comm=0.0, loss=0.0))
    aware = plan("ZB", **request, costs=COSTS)
    assert span(simulate(aware, COSTS)) < span(simulate(blind, COSTS))


def test_the_last_stage_does_the_loss():
    schedule = plan("ZB", n_stages=4, n_microbatches=12, costs=COSTS)
    assert work(simulate(schedule, COSTS)) == pytest.approx(
        [32.4] * 3 + [12 * (2.7 + 0.3)]
    )
    assert lower_bounds(schedule.placement, 12, COSTS)["work"] == pytest.approx(36)
    # stage 0: down 3 + 1.7, then stage 3's 12 (1.3 + 1), up 3 + 1.7, and a W
    assert span(simulate(schedule, COSTS)) == pytest.approx(37.7)


@pytest.mark.parametrize(
    "placement", [Placement.single(3), Placement.interleaved(3, 2)]
)
def test_the_graph_and_the_clock_agree_on_links(placement):
    costs = Costs(1.0, 1.3, 0.6, comm=(0.3, 0.9, 0.2), loss=0.4)
    schedule = plan_placement(placement=placement, n_microbatches=5, costs=costs)
    assert critical_path(schedule, costs, with_steps=False).length == pytest.approx(
        makespan(simulate(schedule, costs))
    )


@pytest.mark.needs("ortools")
def test_the_solver_knows_links_loss_and_joint_stages():
    from solver import certify

    costs = Costs(1.0, 1.0, 0.5, comm=(0.2, 0.7), loss=0.1, splits=(True, False, True))
    memory = Costs(memory_limit=2)
    schedule = plan("ZB", n_stages=3, n_microbatches=3, costs=costs.with_memory(memory))
    proof = certify(schedule, costs.with_memory(memory), seconds=100, workers=1)
    assert proof.is_optimal
    assert proof.span == pytest.approx(span(simulate(proof.schedule, costs)))
    assert proof.span <= span(simulate(schedule, costs)) * (1 + 1e-9)


def test_many_stages_with_unequal_links():
    rng = random.Random(1)
    p, m = 128, 48
    links = tuple(rng.choice((0.02, 0.1, 0.5)) for _ in range(p - 1))
    costs, memory = Costs(comm=links, loss=0.2), Costs(memory_limit=p)
    schedule = plan(
        "ZB",
        n_stages=p,
        n_microbatches=m,
        costs=costs.with_memory(memory),
        effort="fast",
    )
    bound = lower_bound(schedule.placement, m, costs.with_memory(memory))
    reached = span(simulate(schedule, costs))
    assert bound * (1 - 1e-9) <= reached <= bound * 1.1
