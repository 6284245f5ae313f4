"""The schemas fit what the commands write, and refuse what they would not read.

What needs a run is checked where it runs: tests/bench/test_bench.py (results),
tests/training/test_train.py (metrics), tests/cli/test_models.py (estimates).
"""

import json

import pytest
from pages import ROOT
from schemas import SCHEMAS, mistakes

import zbpp
from zbpp.cli import main
from zbpp.core import Costs, LayerCosts, Parts, schedule_text, write_costs, write_layers
from zbpp.planning import MODES
from zbpp.schedules import add_collectives, post_validated

SIZES = {"n_stages": 2, "n_microbatches": 4}
PARTS = Parts(
    (("compute", 1), ("network", 1)),
    (("network", 1), ("compute", 2)),
    (("compute", 1),),
)


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_valid_and_the_page_links_it(name):
    assert mistakes(name, None)  # it is checked before it is used
    page = ROOT / "docs" / "reference" / "schemas.md"
    assert f"(schemas/{name}.schema.json)" in page.read_text()


@pytest.mark.parametrize("mode", MODES)
def test_schedules_of_all_modes(mode):
    schedule = zbpp.plan(mode, **SIZES)
    sharded = add_collectives(schedule, shards=True)
    for variant in (schedule, post_validated(schedule), sharded):
        data = json.loads(schedule_text(variant))
        assert not mistakes("schedule", data)
        data["jobs"][0][0] = "0X0"
        assert "'0X0' does not match" in mistakes("schedule", data)[0]


COSTS = Costs(f=(1, 2), comm=0.5, m_b=2.0**30)


@pytest.mark.parametrize(
    ("kind", "costs", "wrong"),
    [
        ("costs", COSTS, {"F": 1}),
        ("costs", COSTS, {"f": -1}),
        ("costs", COSTS, {"m_b": "1.5 cows"}),
        ("costs", COSTS, {"splits": [1]}),
        ("costs", Costs(parts=PARTS), {"parts": {"f": [["wire", 1]]}}),
        ("layers", LayerCosts(n_layers=6, m_r=0.1), {"n_layers": "six"}),
        ("layers", LayerCosts(4, parts=(PARTS,) * 4), {"parts": [{"layers": 2}]}),
    ],
)
def test_files_of_costs(tmp_path, kind, costs, wrong):
    write = write_costs if kind == "costs" else write_layers
    write(costs, tmp_path / "file.json")
    data = read(tmp_path / "file.json")
    assert not mistakes(kind, data)
    assert mistakes(kind, data | wrong)


@pytest.mark.parametrize(
    ("costs", "words", "keys"),
    [
        (COSTS, "ZBV --costs costs.json", set()),
        (Costs(parts=PARTS), "ZB --costs costs.json", {"parts"}),
        (
            LayerCosts(n_layers=6, m_r=0.1),
            "ZBV --layers costs.json --recompute all",
            {"split", "recompute"},
        ),
    ],
)
def test_plan_files(tmp_path, monkeypatch, costs, words, keys):
    monkeypatch.chdir(tmp_path)
    write = write_costs if isinstance(costs, Costs) else write_layers
    write(costs, "costs.json")
    assert main(["plan", *words.split(), "-p", "2", "-m", "4", "-o", "plan.json"]) == 0
    data = read(tmp_path / "plan.json")
    assert not mistakes("plan", data) and keys <= set(data["schedule"])
    data["schedule"]["jobs"][1][0] = 7  # the schema of schedules takes part
    assert len(mistakes("plan", data)) == 1


@pytest.mark.parametrize("kind", ["costs", "layers"])
def test_the_keys_are_those_that_are_read(kind, tmp_path, capsys):
    """The parser lists its keys where it refuses one: they are the schema's."""
    file = tmp_path / "file.json"
    head = {"n_layers": 2} if kind == "layers" else {}
    file.write_text(json.dumps(head | {"nothing": 1}))
    assert main(["show", "1F1B", "-p", "2", "-m", "2", f"--{kind}", str(file)]) == 2
    words = set(capsys.readouterr().err.replace(",", " ").replace("'", " ").split())
    known = set(SCHEMAS[kind]["properties"])
    assert known <= words, known - words
