"""One kind of file: what `zbpp plan` writes, and what reads it."""

import json
import re

import pytest

import zbpp
from zbpp.cli import main
from zbpp.core import LayerCosts, schedule_text, write_layers
from zbpp.planning import PlanRequest
from zbpp.simulator import bubble_rate, idle, overhead, simulate

SIZES = ("-p", "4", "-m", "12", "--effort", "fast")
COSTS = {"f": 2.0, "b": 3.0, "w": 1.0, "comm": 0.25, "memory_limit": 5}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.json").write_text(json.dumps(COSTS))
    return tmp_path


def run(*words):
    assert main([str(word) for word in words]) == 0


@pytest.fixture
def says(capsys):
    def lines(*words):
        capsys.readouterr()
        run(*words)
        return capsys.readouterr().out

    return lines


@pytest.mark.parametrize("mode", ["ZBH1", "ZBV", "auto"])
def test_plan_and_show_agree_about_costs(mode, says):
    told = says("plan", mode, *SIZES, "--costs", "c.json", "-o", "plan.json")
    rate = re.search(r"bubble rate ([\d.]+%)", told)[1]
    shown = says("show", "plan.json")
    assert re.search(r"bubble rate +([\d.]+%)", shown)[1] == rate
    assert re.search(r"^costs +(.*)$", shown, re.M)[1] == "those in plan.json"
    plan = zbpp.read_plan("plan.json")
    assert plan.costs == zbpp.Costs(**COSTS) and plan.has_costs
    assert f"{bubble_rate(simulate(plan)):.2%}" == rate
    # the control: unit costs give another rate
    assert f"{bubble_rate(simulate(plan.schedule)):.2%}" != rate


def test_show_names_the_costs_that_it_uses(says):
    run("plan", "ZBH1", *SIZES, "-o", "plain.json")
    assert not zbpp.read_plan("plain.json").has_costs
    unit = "none are given: F, B and W take 1, messages nothing"
    write_layers(LayerCosts(n_layers=8), "l.json")
    for words, named in (
        (("plain.json",), unit),
        (("ZBH1", *SIZES), unit),
        (("plain.json", "--costs", "c.json"), "c.json"),
        (("ZBH1", *SIZES, "--layers", "l.json"), "l.json"),
    ):
        shown = says("show", *words)
        assert re.search(r"^costs +(.*)$", shown, re.M)[1] == named


@pytest.mark.parametrize("flags", [(), ("--enable_optimizer_post_validation",)])
def test_one_reader_for_plans_and_schedules(flags, folder):
    run("plan", "ZBV", *SIZES, *flags, "--costs", "c.json", "-o", "plan.json")
    plan = zbpp.read_plan("plan.json")
    assert plan.schedule.is_post_validated == bool(flags)
    (folder / "schedule.json").write_text(schedule_text(plan.schedule))
    again = zbpp.read_plan("schedule.json")
    assert again.schedule.orders == plan.schedule.orders and not again.has_costs
    assert zbpp.plan("plan.json").orders == zbpp.plan("schedule.json").orders
    with pytest.raises(zbpp.RequestError, match="ZBV: cannot be read"):
        zbpp.read_plan("ZBV")


def test_own_schedules_are_rows_beside_modes(says, folder):
    run("plan", "ZBH1", *SIZES, "--costs", "c.json", "-o", "plan.json")
    schedule = zbpp.plan("FThenB", n_stages=4, n_microbatches=12)
    (folder / "own.json").write_text(schedule_text(schedule))
    modes = "1F1B,plan.json,own.json,ZBH1,other.json"
    other = zbpp.plan("1F1B", n_stages=2, n_microbatches=2)
    (folder / "other.json").write_text(schedule_text(other))
    words = ("compare", "-p", 4, "-m", 12, "--modes", modes)
    data = json.loads(says(*words, "--effort", "fast", "--json"))
    rows = {row["mode"]: row for row in data["comparisons"][0]["modes"]}
    assert list(rows) == modes.split(",")
    unit = simulate(zbpp.plan("plan.json"))
    assert rows["plan.json"]["bubble_rate"] != rows["own.json"]["bubble_rate"]
    assert rows["own.json"]["bubble_rate"] == bubble_rate(simulate(schedule))
    assert rows["other.json"]["reason"].startswith("other.json: n_stages is 2, but 4")
    assert bubble_rate(unit) >= 0


def test_auto_names_its_winner_everywhere(says):
    told = says("plan", "auto", *SIZES, "-o", "plan.json")
    plan = zbpp.read_plan("plan.json")
    assert plan.mode == "ZBV" and plan.schedule.name == "auto: ZBV"
    assert told.startswith("plan.json: auto: ZBV, 4 stages")
    assert plan.line.startswith("auto: ZBV; predicted step 36, memory 4; ZB ")
    assert says("show", "plan.json").startswith("auto: ZBV: 4 stages")
    table = says("compare", *SIZES, "--modes", "1F1B,auto")
    assert "auto: ZBV" in table.splitlines()
    layers = LayerCosts(n_layers=16, f=2.0)
    for by_mode in (False, True):
        request = PlanRequest(
            schedule="auto", n_stages=4, n_microbatches=8, costs=layers,
            effort="fast", by_mode=by_mode,
        )  # fmt: skip
        plan = zbpp.make_plan(request)
        assert plan.mode != "auto" and plan.schedule.name == f"auto: {plan.mode}"
    assert f"auto: {plan.mode}, layers " in plan.line


@pytest.mark.parametrize("f", [1 / 3, 0.1, 0.7])
def test_no_bubble_is_zero_and_not_below(f, says):
    sizes = {"n_stages": 4, "n_microbatches": 12}
    for mode in ("ZBV", "ZBH2", "auto"):
        timeline = simulate(zbpp.plan(mode, costs=zbpp.Costs(f, f, f), **sizes),
                            zbpp.Costs(f, f, f))  # fmt: skip
        assert bubble_rate(timeline) >= 0 and overhead(timeline) >= 0
        assert min(idle(timeline)) >= -1e-9
    with open("c.json", "w") as file:
        json.dump({"f": f, "b": f, "w": f}, file)
    words = ("compare", "-p", 4, "-m", 12, "--costs", "c.json", "--csv", "c.csv")
    table = says(*words, "--effort", "fast", "--modes", "ZBH2,ZBV")
    with open("c.csv") as file:
        assert "-" not in file.read().replace("e-", "") and "-0.00" not in table


@pytest.mark.parametrize("name", ["bandwidth", "delay"])
def test_equal_links_stretch_and_others_are_named(name):
    def planned(value):
        costs = LayerCosts(n_layers=8, message=2.0, **{name: value})
        return zbpp.plan("1F1B", n_stages=4, n_microbatches=8, costs=costs)

    for links in ((0.5,), [0.5, 0.5], (0.5,) * 3):
        assert planned(links) == planned(0.5)
    with pytest.raises(zbpp.RequestError, match=f"{name} has 2 entries for 4 stages"):
        planned((0.5, 0.25))


WRONG = {
    "plan ZVB -p 2 -m 2 -o x.json": "did you mean ZBV?",
    "plan ZBX -p 2 -m 2 -o x.json": "did you mean ZB or ZBV?",
    "plan NOPE -p 2 -m 2 -o x.json": "unknown schedule mode 'NOPE'; choose one of",
    "plan ZBV -p 2 -m 2 -o x.json --costs l.json": "this is a layers file, not a costs",
    "plan ZBV -p 2 -m 2 -o x.json --costs p.json": "this is a schedule file, not a",
    "show c.json": "c.json: this is a costs file, not a schedule or plan file; give it",
    "show l.json": "this is a layers file, not a schedule or plan file; give it as --l",
    "--verison": "unknown flag '--verison'; did you mean --version?",
    "--hlep": "unknown flag '--hlep'; did you mean --help?",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_line_says_what_is_wrong_and_what_to_type(words, capsys):
    run("plan", "ZBH1", "-p", "2", "-m", "2", "-o", "p.json")
    write_layers(LayerCosts(n_layers=8), "l.json")
    capsys.readouterr()
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert WRONG[words] in error and error.count("\n") == 1


def test_lists_by_stage_under_a_v_are_told_from_lists_by_chunk(says):
    lists = {4: True, 8: False}
    for n, is_told in lists.items():
        with open("c.json", "w") as file:
            json.dump({"f": [1.0] * (n - 1) + [2.0]}, file)
        words = ("compare", *SIZES, "--costs", "c.json", "--modes", "ZBV")
        assert ("dealt evenly to its chunks" in says(*words)) == is_told
