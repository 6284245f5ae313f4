"""Plans on two lanes: judged independently, beside their bounds, and beside peers."""

import json
import random
from dataclasses import replace

import pytest
from judge import judge
from moe import C, N, moe_costs, span_in_groups

from zbpp.core import Costs, Parts, Placement, lower_bound, schedule_text
from zbpp.core.files.costs_file import costs_data
from zbpp.planning import plan
from zbpp.schedules import (
    lay_out,
    plan_combined_1f1b,
    plan_dual_pipe_v,
    plan_placement,
)
from zbpp.schedules.planner.lanes import plan as lane_plan
from zbpp.schedules.planner.lanes import scheduler
from zbpp.schedules.planner.lanes.problem import LaneProblem
from zbpp.schedules.planner.search.problem import PlacementProblem
from zbpp.simulator import peak_memory, simulate, span


def random_case(seed):
    """A placement, micro-batches, and random costs with parts and a limit."""
    rng = random.Random(seed)
    p = rng.randint(1, 4)
    placement = rng.choice(
        (Placement.single(p), Placement.wave(p), Placement.interleaved(p, 2))
    )

    def parts(first, n):
        lanes = [(C, N)[(first + k) % 2] for k in range(n)]
        return tuple(
            (lane, rng.choice((0.0, 1.0, rng.uniform(0.1, 3)))) for lane in lanes
        )

    def layer():
        n = rng.choice((1, 2, 4))
        f, b = parts(0, n), parts(n % 2 == 0, n)
        same = sum(lane is C for lane, _ in b)
        w = tuple((C, rng.uniform(0.1, 2)) for _ in range(rng.choice((1, same))))
        return Parts(f, b, w, rng.randint(1, 2))

    chunks = tuple(layer() for _ in placement.stage_of)
    m_b = tuple(rng.uniform(0.5, 2) for _ in chunks)
    costs = Costs(
        parts=chunks,
        comm=rng.choice((0.0, rng.uniform(0, 2))),
        loss=rng.choice((0.0, 0.3)),
        m_b=m_b,
        m_w=tuple(rng.random() * one for one in m_b),
        splits=rng.choice((None, tuple(rng.random() < 0.5 for _ in range(p)))),
    )
    one = [sum(m_b[c] for c in cs) for cs in placement.chunks_of]
    limit = tuple(rng.uniform(1, p + 1) * each for each in one)
    return (
        placement,
        rng.randint(1, 8),
        rng.choice((costs, replace(costs, memory_limit=limit))),
    )


def planned(placement, m, costs, n_parts=3e4):
    """Plan with little effort, but all of its steps."""
    base = PlacementProblem(costs.on(placement).joined().above_fixed(), m)
    whole = plan_placement(
        placement=placement,
        n_microbatches=m,
        costs=replace(costs, parts=None),
        effort="fast",
    )
    problem = LaneProblem(base)
    rows = lane_plan._search(problem, n_parts, 0.0)
    found = [replace(whole, costs=None)]
    return found if rows is None else [*found, problem.schedule(rows, "lanes")]


@pytest.mark.parametrize("seed", range(24))
def test_the_judge_agrees_and_no_bound_is_above_a_plan(seed):
    placement, m, costs = random_case(seed)
    data = json.loads(json.dumps(costs_data(costs)))
    for schedule in planned(placement, m, costs):
        timeline = simulate(schedule, costs)
        verdict = judge(json.loads(schedule_text(schedule)), data)
        assert verdict.span == pytest.approx(span(timeline))
        if schedule.parts is not None:
            assert verdict.peaks <= [x + 1e-9 for x in peak_memory(timeline, costs)]
        bound = lower_bound(placement, m, costs)
        assert bound <= span(timeline) * (1 + 1e-9)
        assert bound > 0


def test_the_judge_refuses_what_is_broken():
    costs = moe_costs(0.4)
    schedule = lay_out(plan_dual_pipe_v(n_stages=2, n_microbatches=4), costs)
    data, text = costs_data(costs), json.loads(schedule_text(schedule))
    text["parts"][0].remove("0F0.1~")
    with pytest.raises(ValueError, match="missing or twice"):
        judge(text, data)
    text["parts"][0].insert(1, "0F0.1")
    with pytest.raises(ValueError, match=r"cannot run 0F0\.1"):
        judge(text, data)
    with pytest.raises(ValueError, match="over its limit"):
        judge(json.loads(schedule_text(schedule)), data | {"memory_limit": 2})


@pytest.mark.parametrize(
    "placement", [Placement.wave(3), Placement.interleaved(2, 2), Placement.single(3)]
)
def test_the_loop_in_c_is_the_one_in_python(placement):
    if scheduler.library is None:
        pytest.skip("the loops are not compiled")
    costs = moe_costs(0.4, 2, memory_limit=2.5, comm=0.1)
    problem = LaneProblem(PlacementProblem(costs.on(placement), 5))
    draws = random.Random(0)
    for _ in range(10):
        settings = lane_plan._change(lane_plan._draw(problem, draws), draws)
        rules = settings.rules(problem)
        in_c = scheduler.list_schedule(problem, rules)
        assert in_c is not None
        assert in_c == scheduler._Stages(problem, rules).run(float("inf"))
        below = 0.97 * in_c[0]
        assert scheduler.list_span(problem, rules, below=below) >= in_c[0]


@pytest.mark.parametrize("p, m", [(4, 8), pytest.param(8, 16, marks=pytest.mark.slow)])
def test_peers_take_what_the_survey_says(p, m):
    """Where jobs begin when all before them on their stage have ended."""
    table = {
        ("DualPipeV", 4): {0.2: 1.188, 0.4: 1.396},
        ("DualPipeV", 8): {0.2: 1.198, 0.4: 1.406},
        ("Combined", 4): {0.2: 1.240, 0.4: 1.326, 0.6: 1.591},
        ("Combined", 8): {0.2: 1.271, 0.4: 1.358, 0.6: 1.624},
    }
    dual = plan_dual_pipe_v(n_stages=p, n_microbatches=m)
    combined = plan_combined_1f1b(n_stages=p, n_microbatches=m)
    for (name, stages), spans in table.items():
        if stages != p:
            continue
        for share, expected in spans.items():
            costs = moe_costs(share)
            ideal = m * max(3.0, 2 * share / (1 - share))
            w_first = name == "Combined"
            laid = lay_out(combined if w_first else dual, costs, w_first=w_first)
            found = span_in_groups(laid, costs, w_first=w_first) / ideal
            assert found == pytest.approx(expected, abs=6e-4), (name, share)
            # without waiting for one another they are shorter
            free = lay_out(laid, costs)
            assert span(simulate(free, costs)) / ideal < found


def test_plans_are_shorter_than_peers_and_than_passes_in_a_row():
    costs = moe_costs(0.4, memory_limit=4.0)
    found = plan("ZBVPP", n_stages=4, n_microbatches=8, costs=costs, effort="fast")
    ideal = 8 * 3
    assert found.parts is not None
    assert span(simulate(found, costs)) / ideal < 0.98 * 1.396  # DualPipeV
    alone = replace(found, parts=None)
    assert span(simulate(alone, costs)) > 1.1 * span(simulate(found, costs))
    assert max(peak_memory(simulate(found, costs), costs)) <= 4.0 + 1e-9


def test_auto_takes_more_chunks_where_layers_exchange():
    costs = moe_costs(0.4, memory_limit=2.0)
    found = plan("auto", n_stages=2, n_microbatches=3, costs=costs, effort="fast")
    assert found.placement.n_chunks == 8


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("limit, goal", [(8.0, 1.34), (12.0, 1.17), (16.0, 1.13)])
def test_eight_stages_reach_the_goals(limit, goal):
    costs = moe_costs(0.4, memory_limit=limit)
    found = plan_placement(
        placement=Placement.wave(8, 4), n_microbatches=16, costs=costs
    )
    assert span(simulate(found, costs)) / 48 <= goal
    assert max(peak_memory(simulate(found, costs), costs)) <= limit * (1 + 1e-9)
