"""Replicas of stages in the commands that plan and draw."""

import json

import pytest
from commands import SIZES, shown

from zbpp.cli.commands import main
from zbpp.core import read_schedule
from zbpp.modes import plan
from zbpp.schedules import add_collectives, read_torch_csv
from zbpp.simulator.page import page_data

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
        ("parameters", {"shards": True}),
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
    assert "4 REDUCE_GRAD" in text if shard != "gradients" else "12 REDUCE_GRAD" in text
    assert ("UNSHARD" in text) == (shard != "none") and "  + " in text
    assert "collectives" not in _shown_text(capsys, *ZBV, *costs)


def _shown_text(capsys, *arguments) -> str:
    assert main(["show", *arguments]) == 0
    return capsys.readouterr().out


def test_compare_and_plot_know_them(tmp_path, capsys, costs) -> None:
    both = []
    for flags in ([], [*TWO, "--shard", "parameters"]):
        assert main(["compare", "--json", *SIZES, *costs, *flags]) == 0
        (found,) = json.loads(capsys.readouterr().out)["comparisons"]
        both.append({one["mode"]: one["step"] for one in found["modes"]})
    assert all(both[1][mode] > both[0][mode] for mode in both[0])
    page = tmp_path / "x.html"
    assert main(["plot", *ZBV, *costs, *TWO, "--out", str(page)]) == 0
    (panel,) = page_data(page.read_text())["panels"]
    assert len(panel["collectives"]) == 4


def test_csv_for_torch_says_how_it_is_loaded(tmp_path, capsys) -> None:
    files = ["--out", str(tmp_path / "p.json"), "--csv", str(tmp_path / "t.csv")]
    assert main(["plan", *ZBV, *TWO, *files]) == 0
    assert 'format="compute_comms"' in capsys.readouterr().out
    assert "0SEND_F0" in (tmp_path / "t.csv").read_text()
    assert main(["show", str(tmp_path / "t.csv")]) == 0
    read = read_torch_csv(tmp_path / "t.csv")
    assert read.orders == read_schedule(tmp_path / "p.json").orders


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data_parallel", "0"], "--data_parallel is 0; it must be at least 1"),
        (["--shard", "parameters"], "--shard parameters needs replicas"),
    ],
)
def test_what_does_not_go_together_is_refused(capsys, flags, message) -> None:
    assert main(["show", *ZBV, *flags]) == 2
    assert message in capsys.readouterr().err
