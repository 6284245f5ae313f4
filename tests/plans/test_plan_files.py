"""A plan is a value with a file: API, commands and pipelines read it alike."""

import json
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import zbpp
from zbpp.cli import main
from zbpp.core import (
    Costs,
    LayerCosts,
    LimitError,
    RequestError,
    schedule_text,
    write_layers,
)
from zbpp.planning import Plan, PlanRequest, make_plan, read_plan
from zbpp.simulator import bubble_rate, simulate

COSTS = Costs(f=1.0, b=1.25, w=0.5, comm=0.1, optimizer=0.25)
LAYERS = LayerCosts(
    n_layers=9, f=1.0, b=1.0, w=0.5, m_b=1.0, m_w=0.5, m_r=0.125, memory_limit=9.0
)
SIZES = {"n_stages": 3, "n_microbatches": 6, "effort": "fast"}
WORDS = ("-p", "4", "-m", "12", "--effort", "fast")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    costs = {"f": 2.0, "b": 3.0, "w": 1.0, "comm": 0.25, "memory_limit": 5}
    (tmp_path / "c.json").write_text(json.dumps(costs))


@pytest.fixture
def says(capsys):
    def lines(*words):
        capsys.readouterr()
        assert main([str(word) for word in words]) == 0
        return capsys.readouterr().out

    return lines


def planned(mode: str, **more: object) -> Plan:
    return make_plan(PlanRequest(schedule=mode, **SIZES, **more))


PLANS = {
    "auto": {"costs": COSTS, "memory_limit": 3.0},
    "auto by mode": {"costs": LAYERS, "by_mode": True},
    "1F1B": {},
    "ZBV": {"costs": replace(COSTS, all_gather=0.25, gathers=True)},
    "ZBH1": {"costs": LAYERS, "recompute": "auto"},
    "ZB": {"costs": replace(COSTS, m_r=0.1), "recompute": (0, 2)},
}


@pytest.mark.parametrize("mode", PLANS)
def test_a_plan_is_what_its_file_says(mode):
    plan = planned(mode.removesuffix(" by mode"), **PLANS[mode])
    plan.save("plan.json")
    again = read_plan("plan.json")
    assert again == plan
    with open("plan.json") as file:
        figures = json.load(file)["figures"]
    for name, figure in figures.items():
        assert figure == pytest.approx(getattr(plan, name)), name
    if mode == "auto by mode":
        assert again.line.startswith(f"auto: {plan.mode}, layers ")
        lost = {one.mode: str(one) for one in again.rejected}
        assert lost["1F1B"].startswith("1F1B +") and lost["1F1B"] in again.line


def test_a_plan_or_its_file_is_a_schedule_with_its_own_costs():
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
    with open("schedule.json", "w") as file:
        file.write(schedule_text(plan.schedule))
    again = read_plan("schedule.json")
    assert again.schedule.orders == plan.schedule.orders and not again.has_costs
    with pytest.raises(RequestError, match="ZBV: cannot be read"):
        read_plan("ZBV")


# --- commands -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["ZBH1", "auto"])
def test_plan_and_show_agree_about_costs(mode, says):
    said = says("plan", mode, *WORDS, "--costs", "c.json", "-o", "plan.json")
    rate = re.search(r"bubble rate ([\d.]+%)", said)[1]
    shown = says("show", "plan.json")
    assert re.search(r"bubble rate +([\d.]+%)", shown)[1] == rate
    plan = read_plan("plan.json")
    assert f"{bubble_rate(simulate(plan)):.2%}" == rate
    # the control: unit costs give another rate
    assert f"{bubble_rate(simulate(plan.schedule)):.2%}" != rate
    assert main(["show", "plan.json", "--memory_limit", "1"]) == 2


def test_show_names_the_costs_that_it_uses(says):
    says("plan", "ZBH1", *WORDS, "-o", "plain.json")
    says("plan", "ZBH1", *WORDS, "--costs", "c.json", "-o", "plan.json")
    unit = "none are given: F, B and W take 1, messages nothing"
    write_layers(LayerCosts(n_layers=8), "l.json")
    for words, named in (
        (("plain.json",), unit),
        (("ZBH1", *WORDS), unit),
        (("plan.json",), "those in plan.json"),
        (("plain.json", "--costs", "c.json"), "c.json"),
        (("ZBH1", *WORDS, "--layers", "l.json"), "l.json"),
    ):
        shown = says("show", *words)
        assert re.search(r"^costs +(.*)$", shown, re.M)[1] == named


def test_auto_names_its_winner_everywhere(says):
    said = says("plan", "auto", *WORDS, "-o", "plan.json")
    plan = read_plan("plan.json")
    assert plan.mode == "ZBV" and plan.schedule.name == "auto: ZBV"
    assert said.startswith("plan.json: auto: ZBV, 4 stages")
    assert plan.line.startswith("auto: ZBV; predicted step 36, memory 4; ZB ")
    assert says("show", "plan.json").startswith("auto: ZBV: 4 stages")
    table = says("compare", *WORDS, "--modes", "1F1B,auto")
    assert "auto: ZBV" in table.splitlines()


WRONG = {
    "plan ZBV -p 2 -m 2 -o x.json --costs l.json": "this is a layers file, not a costs",
    "plan ZBV -p 2 -m 2 -o x.json --costs p.json": "this is a schedule file, not a",
    "show c.json": "c.json: this is a costs file, not a schedule or plan file; give it",
    "show l.json": "this is a layers file, not a schedule or plan file; give it as --l",
}


def test_a_line_says_what_is_wrong_and_what_to_type(says, capsys):
    says("plan", "ZBH1", "-p", "2", "-m", "2", "-o", "p.json")
    write_layers(LayerCosts(n_layers=8), "l.json")
    for words, message in WRONG.items():
        capsys.readouterr()
        assert main(words.split()) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, words


# --- pipelines ------------------------------------------------------------------------


def make_pipeline(source, n_stages, *, mesh=None, **planned):
    """A pipeline of nine layers; ``planned`` are arguments of `zbpp.plan_model`."""
    torch.manual_seed(0)
    model = [nn.Linear(4, 4) for _ in range(9)]
    sizes = {"n_stages": n_stages, "n_microbatches": 6}
    if planned:
        source = zbpp.plan_model(model, source, **planned, **sizes)
    loss_fn, optimizer = nn.functional.mse_loss, torch.optim.SGD
    more = {"loss_fn": loss_fn, "optimizer": optimizer, "mesh": mesh}
    return zbpp.Pipeline(model, source, **more, **sizes)


def test_a_pipeline_runs_a_plan_and_keeps_what_it_was_made_for():
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


def test_a_limit_beside_a_plan_has_its_unit(says, capsys):
    in_bytes = replace(COSTS, m_b=2.0**30, m_w=2.0**29)
    planned("ZBH1", costs=in_bytes).save("plan.json")
    shown = says("show", "plan.json", "--memory_limit", "4GiB")
    assert "within memory 4.00 GiB" in shown
    with make_pipeline("plan.json", 3, memory_limit="4GiB") as pipeline:
        assert pipeline.plan.costs.memory_limit == 2.0**32
    assert main(["show", "plan.json", "--memory_limit", "2GiB"]) == 2
    assert "over the limit 2.00 GiB" in capsys.readouterr().err


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


@pytest.mark.parametrize("mesh", [2, "pp", zbpp.DataParallel(mesh="pp")])
def test_a_mesh_that_is_none_is_refused_in_a_line(mesh):
    with pytest.raises(RequestError, match=r"mesh is .*; give zbpp.mesh\(stages="):
        make_pipeline("ZBH1", 2, mesh=mesh)


# --- splits of a model's layers -------------------------------------------------------

TIMES = (0.5, *(1.0,) * 7, 4.0)
SKEWED = {"layer_costs": LayerCosts(n_layers=9, f=TIMES, b=TIMES, w=TIMES)}
SMALL = {"n_stages": 3, "n_microbatches": 4}


def split(schedule="ZBH1", **asked) -> tuple[int, ...]:
    """The layers of each stage of a pipeline; its schedule says the same."""
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
    skewed = SKEWED["layer_costs"]
    write_layers(skewed, "l.json")
    planned = make_plan(PlanRequest(schedule="ZBH1", costs=skewed, **SMALL))
    balanced = planned.split
    assert balanced not in ((3, 3, 3), (1, 1, 7)) and balanced[2] == 1
    assert split(**SKEWED) == split(layer_costs="l.json") == balanced
    assert split(planned.schedule) == balanced
    for even in ({}, {"split": "even", **SKEWED}):
        assert split(**even) == (3, 3, 3)
    assert split(planned.schedule, split=[1, 1, 7]) == (1, 1, 7)
    # 1F1B holds four micro-batches on stage 0: two layers fit
    small, large = (split("1F1B", memory_limit=x, **SKEWED)[0] for x in (6.0, None))
    assert small == 2 < large


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"split": "unequal", **SKEWED}, "choose balanced or even"),
        ({"layer_costs": LayerCosts(n_layers=8)}, "of 8 layers, but the model has 9"),
        ({"costs": Costs(), **SKEWED}, "leave costs out"),
        ({"split": (3, 3, 2), **SKEWED}, "add up to 9 layers"),
    ],
)
def test_a_split_that_does_not_fit_is_refused(asked, words):
    with pytest.raises(RequestError, match=words):
        split(**asked)
