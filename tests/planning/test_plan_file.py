"""A plan is a value with a file, which is read wherever a schedule file is."""

import json
from dataclasses import replace

import pytest
from small_model import batch, make_pipeline

import zbpp
from zbpp.cli import main
from zbpp.core import Costs, LayerCosts, LimitError, MemoryModel, RequestError
from zbpp.planning import Plan, PlanRequest, make_plan, read_plan

COSTS = Costs(f=1.0, b=1.25, w=0.5, comm=0.1, optimizer=0.25)
LAYERS = LayerCosts(
    n_layers=9, f=1.0, b=1.0, w=0.5, m_b=1.0, m_w=0.5, m_r=0.125, memory_limit=9.0
)
SIZES = {"n_stages": 3, "n_microbatches": 6, "effort": "fast"}


def planned(mode: str, **more: object) -> Plan:
    return make_plan(PlanRequest(schedule=mode, **SIZES, **more))


PLANS = {
    "auto": {"costs": COSTS, "memory_limit": 3.0},
    "1F1B": {},
    "ZBV": {"costs": replace(COSTS, all_gather=0.25, gathers=True)},
    "ZBH1": {"costs": LAYERS, "recompute": "auto"},
    "ZB": {"costs": replace(COSTS, m_r=0.1), "recompute": (0, 2)},
}


@pytest.mark.parametrize("mode", PLANS)
def test_a_plan_is_what_its_file_says(mode, tmp_path):
    plan, path = planned(mode, **PLANS[mode]), tmp_path / "plan.json"
    plan.save(path)
    assert read_plan(path) == plan
    figures = json.loads(path.read_text())["figures"]
    for name, figure in figures.items():
        assert figure == pytest.approx(getattr(plan, name)), name
    assert figures["lower_bound"] <= figures["span"] * (1 + 1e-9)


def test_the_choice_of_auto_is_in_the_file_with_its_reasons(tmp_path):
    asked = PlanRequest(schedule="auto", costs=LAYERS, by_mode=True, **SIZES)
    plan, path = make_plan(asked), tmp_path / "plan.json"
    plan.save(path)
    again = read_plan(path)
    assert again == plan and again.line.startswith(f"auto: {plan.mode}, layers ")
    lost = {one.mode: str(one) for one in again.rejected}
    assert lost["1F1B"].startswith("1F1B +") and lost["1F1B"] in again.line


def test_a_plan_or_its_file_is_a_schedule_with_its_own_costs(tmp_path):
    plan, path = planned("ZBV", **PLANS["ZBV"]), tmp_path / "plan.json"
    plan.save(path)
    for source in (plan, path, str(path)):
        again = make_plan(PlanRequest(schedule=source))
        assert (again.schedule, again.costs) == (plan.schedule, plan.costs)
        other = make_plan(PlanRequest(schedule=source, costs=Costs()))
        assert (other.schedule, other.costs) == (plan.schedule, Costs())
    assert zbpp.plan(str(path)) == plan.schedule
    with pytest.raises(LimitError, match="ZBV with 3 stages"):
        make_plan(PlanRequest(schedule=plan, memory_limit=1.0))
    with pytest.raises(RequestError, match="n_stages is 3, but 4 is asked for"):
        make_plan(PlanRequest(schedule=path, n_stages=4))


def test_commands_take_plan_files(tmp_path, capsys):
    plan, path = planned("auto", **PLANS["auto"]), tmp_path / "plan.json"
    plan.save(path)
    assert main(["show", "--json", str(path)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["span"] == plan.span and max(shown["peak_memory"]) == plan.peak
    assert main(["show", "--json", str(path), "--memory_limit", "1"]) == 2
    assert "over the limit 1" in capsys.readouterr().err
    out = tmp_path / "schedule.json"
    assert main(["plan", str(path), "--out", str(out)]) == 0
    assert zbpp.plan(str(out)).orders == plan.schedule.orders


def test_a_limit_beside_a_plan_has_its_unit(tmp_path, capsys):
    path = tmp_path / "plan.json"
    in_bytes = MemoryModel(m_b=2.0**30, m_w=2.0**29)
    planned("ZBH1", costs=COSTS.with_memory(in_bytes)).save(path)
    assert main(["show", str(path), "--memory_limit", "4GiB"]) == 0
    assert "within memory 4.00 GiB" in capsys.readouterr().out
    with make_pipeline(path, 3, memory_limit="4GiB") as pipeline:
        assert pipeline.plan.costs.memory_limit == 2.0**32
    assert main(["show", str(path), "--memory_limit", "2GiB"]) == 2
    assert "over the limit 2.00 GiB" in capsys.readouterr().err


def test_a_pipeline_runs_a_plan_and_keeps_what_it_was_made_for(tmp_path):
    plan, path = planned("ZBH1", costs=LAYERS, recompute=(0, 4)), tmp_path / "plan.json"
    plan.save(path)
    losses = []
    for source in (plan, path, plan.schedule):
        with make_pipeline(source, 3) as pipeline:
            losses.append(pipeline.step(*batch(0)).loss)
            assert tuple(map(len, pipeline.split)) == plan.split
            known = None if source is plan.schedule else plan.costs
            assert pipeline.plan.known_costs == known
    assert len(set(losses)) == 1


def test_a_file_that_is_no_plan_is_refused(tmp_path):
    plan, path = planned("auto", **PLANS["auto"]), tmp_path / "plan.json"
    plan.save(path)
    data = json.loads(path.read_text())
    for key in set(data) - {"format"}:
        for value in (None, 7, "x", [[]]):
            path.write_text(json.dumps(data | {key: value}))
            if (key, value) not in (("mode", "x"), ("line", "x")):
                with pytest.raises(RequestError, match=r"plan\.json: "):
                    read_plan(path)
    path.write_text(json.dumps(data | {"more": 1}))
    with pytest.raises(RequestError, match="unknown key 'more'"):
        zbpp.plan(str(path))
