"""The schemas fit what the commands write, and refuse what they would not read.

What needs a run is checked where it runs: tests/bench/test_bench.py (results),
tests/training/test_train.py (metrics), tests/cli/test_models.py (estimates).
"""

import json

import pytest
from jsonschema import Draft202012Validator
from pages import ROOT, Page
from schemas import SCHEMAS, mistakes

import zbpp
from zbpp.cli import main
from zbpp.core import Costs, LayerCosts, Parts, schedule_text, write_costs, write_layers
from zbpp.planning import MODES
from zbpp.schedules import add_collectives, post_validated

SIZES = {"n_stages": 2, "n_microbatches": 4}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_one_and_the_page_links_it(name):
    Draft202012Validator.check_schema(SCHEMAS[name])
    page = ROOT / "docs" / "reference" / "schemas.md"
    assert f"(schemas/{name}.schema.json)" in page.read_text()


@pytest.mark.parametrize("mode", MODES)
def test_schedules_of_all_modes(mode):
    schedule = zbpp.plan(mode, **SIZES)
    for variant in (
        schedule,
        post_validated(schedule),
        add_collectives(schedule, shards=True),
    ):
        data = json.loads(schedule_text(variant))
        assert not mistakes("schedule", data)
        data["jobs"][0][0] = "0X0"
        assert "'0X0' does not match" in mistakes("schedule", data)[0]


def test_files_with_split_and_recompute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    costs = LayerCosts(n_layers=6, m_r=0.1)
    write_layers(costs, "layers.json")
    assert not mistakes("layers", json.loads((tmp_path / "layers.json").read_text()))
    sizes = ["-p", "2", "-m", "3", "--layers", "layers.json", "--recompute", "all"]
    assert main(["plan", "ZBV", *sizes, "-o", "plan.json"]) == 0
    data = json.loads((tmp_path / "plan.json").read_text())
    assert {"split", "recompute"} <= set(data["schedule"])
    assert not mistakes("plan", data)


def test_plan_files(tmp_path):
    plan = zbpp.make_plan(zbpp.PlanRequest(schedule="auto", **SIZES))
    plan.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    assert not mistakes("plan", data)
    data["schedule"]["jobs"][1][0] = 7  # the schema of schedules takes part
    data["costs"]["f"] = "much"
    assert len(mistakes("plan", data)) == 2


def test_costs_files(tmp_path):
    costs = Costs(f=(1, 2), comm=0.5, m_b=2.0**30)
    write_costs(costs, tmp_path / "costs.json")
    data = json.loads((tmp_path / "costs.json").read_text())
    assert not mistakes("costs", data)
    for wrong in ({"F": 1}, {"f": -1}, {"m_b": "1.5 cows"}, {"splits": [1]}):
        assert mistakes("costs", data | wrong), wrong


def test_files_with_parts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    layer = Parts(
        (("compute", 1), ("network", 1)),
        (("network", 1), ("compute", 2)),
        (("compute", 1),),
    )
    write_costs(Costs(parts=layer), "costs.json")
    costs = json.loads((tmp_path / "costs.json").read_text())
    assert not mistakes("costs", costs)
    costs["parts"]["f"][1][0] = "wire"
    assert mistakes("costs", costs)
    write_layers(LayerCosts(4, parts=(layer,) * 4), "layers.json")
    layers = json.loads((tmp_path / "layers.json").read_text())
    assert not mistakes("layers", layers)
    layers["parts"][1]["layers"] = 2
    assert mistakes("layers", layers)
    sizes = ["-p", "2", "-m", "4", "--costs", "costs.json"]
    assert main(["plan", "ZB", *sizes, "-o", "plan.json"]) == 0
    data = json.loads((tmp_path / "plan.json").read_text())
    assert not mistakes("plan", data)
    data["schedule"]["parts"][0][0] = "0F0"  # a pass, where its parts are due
    assert mistakes("plan", data)


@pytest.mark.parametrize("kind", ["costs", "layers"])
def test_the_keys_are_those_that_are_read(kind, tmp_path, capsys):
    """The parser lists its keys where it refuses one: they are the schema's."""
    file = tmp_path / "file.json"
    head = {"n_layers": 2} if kind == "layers" else {}
    file.write_text(json.dumps(head | {"nothing": 1}))
    flag = "--layers" if kind == "layers" else "--costs"
    assert main(["show", "1F1B", "-p", "2", "-m", "2", flag, str(file)]) == 2
    words = set(capsys.readouterr().err.replace(",", " ").replace("'", " ").split())
    known = set(SCHEMAS[kind]["properties"])
    assert known <= words, known - words


def test_data_that_is_shown_in_the_documents():
    names = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")]
    blocks = [b.text for name in names for b in Page.read(name).blocks("json")]
    kinds = {'"format"': "schedule", '"n_layers"': "layers"}
    for text in blocks:
        kind = next((kinds[key] for key in kinds if key in text), "costs")
        assert not mistakes(kind, json.loads(text)), text
    assert len(blocks) > 10
