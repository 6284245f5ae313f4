"""Replicas of stages in the commands that plan and draw."""

import json

import pytest
from commands import SIZES, shown
from timeline_page import page_data

from zbpp.cli import main
from zbpp.core import read_schedule
from zbpp.planning import plan
from zbpp.schedules import add_collectives

COSTS = {"f": 2, "b": 2, "w": 2, "all_gather": 1.5, "reduce_scatter": 3}
ZBV = ["--pipeline_schedule_mode", "ZBV", *SIZES]
TWO = ["--data_parallel", "2"]


@pytest.fixture
def costs(tmp_path) -> list[str]:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(COSTS))
    return ["--costs", str(path)]


@pytest.mark.parametrize(
    ("shard", "expected"),
    [
        ("none", {"shards": False}),
        ("optimizer", {"shards": True}),
        ("gradients", {"shards": True, "reduces": "every"}),
        ("parameters", {"shards": False, "reduces": "every"}),
    ],
)
def test_a_plan_has_the_jobs_and_show_reads_them_back(
    tmp_path, capsys, costs, shard, expected
) -> None:
    out = tmp_path / "plan.json"
    assert main(["plan", *ZBV, *TWO, "--shard", shard, "--out", str(out)]) == 0
    capsys.readouterr()
    alone = plan("ZBV", n_stages=2, n_microbatches=3)
    assert read_schedule(out).orders == add_collectives(alone, **expected).orders
    base, step = shown(capsys, *ZBV, *costs), shown(capsys, str(out), *costs)
    assert step["step_time"] > base["step_time"]
    assert main(["show", str(out), *costs]) == 0
    text = capsys.readouterr().out
    n_sums = 12 if shard in ("gradients", "parameters") else 4
    assert f" {n_sums} REDUCE_GRAD" in text and "  + " in text
    assert ("UNSHARD" in text) == (shard in ("optimizer", "gradients"))
    assert "collectives" not in _shown_text(capsys, *ZBV, *costs)


def _shown_text(capsys, *arguments) -> str:
    assert main(["show", *arguments]) == 0
    return capsys.readouterr().out


def test_compare_and_show_know_them(tmp_path, capsys, costs) -> None:
    both = []
    for flags in ([], [*TWO, "--shard", "parameters"]):
        assert main(["compare", "--json", *SIZES, *costs, *flags]) == 0
        (found,) = json.loads(capsys.readouterr().out)["comparisons"]
        both.append({one["mode"]: one["step"] for one in found["modes"]})
    assert all(both[1][mode] > both[0][mode] for mode in both[0])
    page = tmp_path / "x.html"
    assert main(["show", *ZBV, *costs, *TWO, "--out", str(page)]) == 0
    (panel,) = page_data(page.read_text())["panels"]
    assert panel["lines"][2:] == [2, 2]


def test_passes_that_gather_are_longer(capsys, costs) -> None:
    base = shown(capsys, *ZBV, *costs)
    longer = shown(capsys, *ZBV, *costs, *TWO, "--shard", "parameters")
    assert longer["span"] >= base["span"] + 2 * 3 * 1.5  # each F and B of 3


def test_csv_for_torch_says_how_it_is_loaded(tmp_path, capsys) -> None:
    files = ["--out", str(tmp_path / "p.json"), "--csv", str(tmp_path / "t.csv")]
    assert main(["plan", *ZBV, *TWO, *files]) == 0
    assert 'format="compute_comms"' in capsys.readouterr().out
    assert "0SEND_F0" in (tmp_path / "t.csv").read_text()


def test_times_and_memory_follow_from_what_layers_tell(tmp_path, capsys) -> None:
    """A stage of 4 layers with 10 bytes each: a ring of 2 at 5 a unit, alpha 1."""
    told = {"parameters": 10, "m_fixed": 40, "replica_bandwidth": 5, "replica_delay": 1}
    flags = ["--pipeline_schedule_mode", "ZBH1", *SIZES, "--layers"]
    shards = {"none": 2 * (1 + 10 / 2 / 5), "optimizer": 2 * (1 + 10 / 2 / 5)}
    path = tmp_path / "l.json"
    path.write_text(json.dumps({"n_layers": 8} | told))
    base = shown(capsys, *flags, str(path))
    for shard, time in shards.items():
        found = shown(capsys, *flags, str(path), *TWO, "--shard", shard)
        assert found["step_time"] - base["step_time"] == pytest.approx(4 * time)
        less = base["peak_memory"][0] - found["peak_memory"][0]
        assert less == (4 * (40 - 20 - 30 / 2) if shard == "optimizer" else 0)
    path.write_text(json.dumps({"n_layers": 8, "reduce_scatter": 1} | told))
    given = shown(capsys, *flags, str(path), *TWO)
    assert given["step_time"] - base["step_time"] == pytest.approx(4)


LAYERS = {
    "n_layers": 8,
    "m_b": "0.5GiB",
    "m_w": "0.25GiB",
    "m_fixed": "16GiB",
    "parameters": "4GiB",
    "bandwidth": 8e9,
    "memory_limit": "60GiB",
}


@pytest.fixture
def layers(tmp_path) -> list[str]:
    path = tmp_path / "layers.json"
    path.write_text(json.dumps(LAYERS))
    return ["--devices", "8", "--microbatches", "16", "--layers", str(path)]


def test_meshes_are_compared_and_the_best_is_marked(capsys, layers) -> None:
    assert main(["mesh", *layers]) == 0
    out = capsys.readouterr().out
    assert "4 x 2" in out and "<- auto" in out
    assert "pp 1 x dp 8: no split of 8 layers" in out
    best = out.splitlines()[-1].removeprefix("auto: ")
    assert main(["mesh", *layers, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["best"] == best
    found = [one for one in data["meshes"] if "step" in one]
    shortest = min(found, key=lambda one: one["step"])
    assert best == f"pp {shortest['n_stages']} x dp {shortest['data_parallel']}"
    assert {one["n_stages"] for one in data["meshes"] if "reason" in one} == {1, 2}


def test_sharding_makes_meshes_fit(capsys, layers) -> None:
    assert main(["mesh", *layers, "--json", "--shard", "gradients"]) == 0
    data = json.loads(capsys.readouterr().out)
    sharded = {one["n_stages"]: "step" in one for one in data["meshes"]}
    assert sharded == {1: False, 2: True, 4: True, 8: True}


def test_parts_of_a_costs_file_are_dealt_to_meshes(tmp_path, capsys) -> None:
    path = tmp_path / "parts.json"
    path.write_text(json.dumps({"f": [1, 1, 1, 3], "m_fixed": [4, 4, 4, 12]}))
    flags = ["--devices", "2", "--microbatches", "4", "--costs", str(path), "--json"]
    rates = ["--replica_bandwidth", "1e9", "--mode", "1F1B"]
    assert main(["mesh", *flags, *rates]) == 2
    assert "give --parameters" in capsys.readouterr().err
    assert main(["mesh", *flags, *rates, "--parameters", "4"]) == 0
    one, two = json.loads(capsys.readouterr().out)["meshes"]
    assert one["step"] == pytest.approx(2 * (6 + 4 + 4)) and one["split"] == [4]
    assert two["split"] in ([2, 2], [3, 1])


@pytest.mark.needs("torch")
def test_a_model_is_compared_by_its_own_bytes_and_operations(
    tmp_path, capsys, monkeypatch
) -> None:
    (tmp_path / "meshed.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def build():\n"
        "    x = torch.zeros(16, 64)\n"
        "    return [nn.Linear(64, 64) for _ in range(4)], (x, x), "
        "nn.functional.mse_loss\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    flags = ["--model", "meshed:build", "--devices", "2", "--microbatches", "4"]
    rates = ["--device_flops", "1e6", "--replica_bandwidth", "1e9"]
    assert main(["mesh", *flags, *rates, "--mode", "ZBH1", "--json"]) == 0
    one, two = json.loads(capsys.readouterr().out)["meshes"]
    work = 3 * 4 * (2 * 16 * 64 * 64) / 1e6  # F, B and W of a micro-batch, in seconds
    assert one["step"] - one["exposed"] == pytest.approx(2 * work)
    assert two["step"] > 4 * work / 2
    n = 4 * (64 * 64 + 64)
    assert one["peak_memory"] >= 16 * n  # and what a rollback needs
    assert 8 * n < two["peak_memory"] < one["peak_memory"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--memory_limit", "1GiB"], "meshes fits; the nearest is pp 8 x dp 1"),
        (["--node", "4"], "--node and --node_bandwidth go together"),
        (["--stages", "2"], "Unknown option: --stages"),
        (["--costs", "c.json"], "--layers"),
        (["--out", "x.html"], "Unknown option: --out"),
        (
            ["--data_parallel", "2"],
            "Unknown option: --data_parallel",
        ),
        (["--shard", "gradients", "--devices", "0"], "--devices is 0"),
    ],
)
def test_meshes_that_cannot_be_compared(capsys, layers, flags, message) -> None:
    assert main(["mesh", *layers, *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_plans_are_for_passes_that_gather(tmp_path, capsys) -> None:
    """What passes gather decides the order, not only its figures."""
    path, sums = tmp_path / "costs.json", tmp_path / "sums.json"
    path.write_text(json.dumps({"f": 2, "b": 2, "w": 2, "all_gather": [0, 2, 0, 2]}))
    sums.write_text(json.dumps({"f": [2, 4, 2, 4], "b": [2, 4, 2, 4], "w": 2}))
    shape = ["--pipeline_schedule_mode", "ZB", "--stages", "4", "--microbatches", "8"]
    shard = [*TWO, "--shard", "parameters"]
    gathering = shown(capsys, *shape, "--costs", str(path), *shard)
    summed = shown(capsys, *shape, "--costs", str(sums))
    for figure in ("span", "bubble_rate", "lower_bound", "gap"):
        assert gathering[figure] == summed[figure]
    out = tmp_path / "plan.json"
    assert main(["plan", *shape, "--costs", str(path), "--out", str(out)]) == 0
    capsys.readouterr()
    blind = shown(capsys, str(out), "--costs", str(path), *shard)
    assert gathering["span"] < blind["span"], "the control: gathers change the order"
