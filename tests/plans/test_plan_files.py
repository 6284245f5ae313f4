"""A plan is a value with a file: API, commands and pipelines read it alike."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import zbpp
from zbpp.core import (
    Costs,
    Lane,
    LayerCosts,
    LimitError,
    Parts,
    RequestError,
    schedule_text,
    write_costs,
)
from zbpp.planning import Plan, PlanRequest, make_plan, read_plan

COSTS = Costs(f=1.0, b=1.25, w=0.5, comm=0.1, optimizer=0.25)
_PASS = ((Lane.COMPUTE, 1.0), (Lane.NETWORK, 0.5), (Lane.COMPUTE, 0.0))
PARTS = Parts(_PASS, _PASS, ((Lane.COMPUTE, 1.0),), layers=2)
LAYERS = LayerCosts(
    n_layers=9, f=1.0, b=1.0, w=0.5, m_b=1.0, m_w=0.5, m_r=0.125, memory_limit=9.0
)
SIZES = {"n_stages": 3, "n_microbatches": 6, "effort": "fast"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def planned(mode: str, **more: object) -> Plan:
    return make_plan(PlanRequest(schedule=mode, **SIZES, **more))


PLANS = {
    "auto": {"costs": COSTS, "memory_limit": 3.0},
    "auto of layers": {"costs": LAYERS},
    "1F1B": {},
    "ZBV": {"costs": replace(COSTS, all_gather=0.25)},
    "ZBH1": {"costs": LAYERS, "recompute": "auto"},
    "ZB": {"costs": replace(COSTS, m_r=0.1), "recompute": (0, 2)},
    "VPP": {"costs": COSTS, "recompute": "none"},
    "ZBVPP": {"costs": Costs(parts=PARTS), "recompute": "none"},
    "ZBH2": {"costs": Costs(parts=PARTS, m_r=0), "recompute": "all"},
    "VHalf": {"costs": replace(COSTS, speed=(1, 0.5, 2)), "recompute": "none"},
}


@pytest.mark.parametrize("mode", PLANS)
def test_a_plan_equals_its_file(mode):
    plan = planned(mode.removesuffix(" of layers"), **PLANS[mode])
    plan.save("plan.json")
    again = read_plan("plan.json")
    assert again == plan
    with open("plan.json") as file:
        figures = json.load(file)["figures"]
    for name, figure in figures.items():
        assert figure == pytest.approx(getattr(plan, name)), name
    if mode == "auto of layers":
        assert again.line.startswith(f"auto: {plan.mode}, layers ")
        lost = {one.mode: str(one) for one in again.rejected}
        assert lost["1F1B"].startswith("1F1B +") and lost["1F1B"] in again.line


def test_a_plan_or_its_file_is_a_schedule_with_its_costs():
    plan = planned("ZBV", **PLANS["ZBV"])
    plan.save("plan.json")
    for source in (plan, "plan.json"):
        again = make_plan(PlanRequest(schedule=source))
        assert (again.schedule, again.costs) == (plan.schedule, plan.costs)
        other = make_plan(PlanRequest(schedule=source, costs=Costs()))
        assert (other.schedule, other.costs) == (plan.schedule, Costs())
    assert zbpp.plan("plan.json") == plan.schedule
    with pytest.raises(LimitError, match="ZBV with 3 stages"):
        make_plan(PlanRequest(schedule=plan, memory_limit=1.0))
    with pytest.raises(RequestError, match="n_stages is 3, but 4 is asked for"):
        make_plan(PlanRequest(schedule="plan.json", n_stages=4))
    planned("ZBH1", costs=LAYERS).save("layers.json")
    with pytest.raises(RequestError, match="is for 9 layers"):
        make_plan(PlanRequest(schedule="layers.json", costs=LayerCosts(n_layers=20)))
    with open("schedule.json", "w") as file:
        file.write(schedule_text(plan.schedule))
    again = read_plan("schedule.json")
    assert again.schedule.orders == plan.schedule.orders and not again.has_costs
    with pytest.raises(RequestError, match="ZBV: cannot be read"):
        read_plan("ZBV")


# --- pipelines ------------------------------------------------------------------------


def make_pipeline(source, n_stages):
    """A pipeline of nine layers."""
    torch.manual_seed(0)
    model = [nn.Linear(4, 4) for _ in range(9)]
    sizes = {"n_stages": n_stages, "n_microbatches": 6}
    more = {"loss_fn": nn.functional.mse_loss, "optimizer": torch.optim.SGD}
    return zbpp.Pipeline(model, source, **more, **sizes)


def test_a_pipeline_runs_a_plan_and_keeps_its_costs():
    plan = planned("ZBH1", costs=LAYERS, recompute=(0, 4))
    plan.save("plan.json")
    losses, x = [], torch.ones(12, 4)
    for source in (plan, "plan.json", plan.schedule):
        with make_pipeline(source, 3) as pipeline:
            losses.append(pipeline.step(x, x).loss)
            assert tuple(map(len, pipeline.split)) == plan.split
            known = None if source is plan.schedule else plan.costs
            assert pipeline.plan.known_costs == known
    assert len(set(losses)) == 1


def test_a_split_backward_is_validated_where_there_are_stages_to_wait_for():
    asked = {("1F1B", 2): False, ("ZBH1", 1): False, ("ZBH1", 2): True}
    for (mode, n_stages), expected in asked.items():
        with make_pipeline(mode, n_stages) as pipeline:
            assert pipeline.schedule.is_post_validated is expected


def test_a_pipeline_switches_to_a_schedule_or_a_plan_but_not_to_a_mode():
    with make_pipeline("ZBH1", 3) as running:
        sizes = {"n_stages": 3, "n_microbatches": running.schedule.n_microbatches}
        running.switch(zbpp.plan("1F1B", **sizes))
        running.switch(make_plan(PlanRequest(schedule="FThenB", **sizes)))
        assert running.schedule.name == "FThenB"
        with pytest.raises(RequestError, match=r"not 'ZBV'; zbpp.plan\(mode, n_st"):
            running.switch("ZBV")


# --- splits of a model's layers -------------------------------------------------------

TIMES = (0.5, *(1.0,) * 7, 4.0)
SKEWED = {"costs": LayerCosts(n_layers=9, f=TIMES, b=TIMES, w=TIMES)}
SMALL = {"n_stages": 3, "n_microbatches": 4}


def split(schedule="ZBH1", **asked) -> tuple[int, ...]:
    """The layers of each stage of a pipeline; its schedule has the same."""
    layers = [nn.Linear(2, 2) for _ in range(9)]
    settings = {"loss_fn": nn.functional.mse_loss, "optimizer": None}
    if isinstance(schedule, str):
        settings |= SMALL
    plan = zbpp.plan_model(layers, schedule, **asked, **settings)
    pipeline = zbpp.Pipeline(layers, plan, device="cpu", **settings)
    sizes = tuple(map(len, pipeline.split))
    assert plan.schedule.split in (None, sizes)
    return sizes


def test_a_split_follows_the_costs_of_layers_the_schedule_or_the_request():
    skewed = SKEWED["costs"]
    write_costs(skewed, "l.json")
    planned = make_plan(PlanRequest(schedule="ZBH1", costs=skewed, **SMALL))
    balanced = planned.split
    assert balanced not in ((3, 3, 3), (1, 1, 7)) and balanced[2] == 1
    assert split(**SKEWED) == split(costs="l.json") == balanced
    assert split(planned.schedule) == balanced
    for even in ({}, {"split": "even", **SKEWED}):
        assert split(**even) == (3, 3, 3)
    assert split(planned.schedule, split=[1, 1, 7]) == (1, 1, 7)
    # 1F1B holds four micro-batches on stage 0: two layers fit
    small, large = (split("1F1B", memory_limit=x, **SKEWED)[0] for x in (6.0, None))
    assert small == 2 < large
