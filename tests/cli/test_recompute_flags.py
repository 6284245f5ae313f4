"""`--recompute` plans, shows and runs parts whose graph B computes again."""

import json
from pathlib import Path

import pytest

from zbpp.cli import main
from zbpp.core import read_schedule

COSTS = {"f": 1, "b": 1, "w": 1, "m_b": 1, "m_w": 0.5, "m_r": 0.05}
SIZES = ["--stages", "3", "--microbatches", "6", "--effort", "fast"]


@pytest.fixture
def costs(tmp_path: Path) -> str:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(COSTS))
    return str(path)


def planned(tmp_path: Path, mode: str, *more: str) -> str:
    out = str(tmp_path / "plan.json")
    command = ["plan", "--pipeline_schedule_mode", mode, *SIZES, "--out", out, *more]
    assert main(command) == 0
    return out


def figures(capsys: pytest.CaptureFixture[str], *command: str) -> dict[str, object]:
    capsys.readouterr()
    assert main(["show", *command, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("mode", ["ZB", "ZBV", "auto"])
def test_auto_recomputes_where_memory_is_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], costs: str, mode: str
) -> None:
    more = ("--costs", costs, "--memory_limit", "1.1")
    free = figures(capsys, planned(tmp_path, mode, *more), *more)
    path = planned(tmp_path, mode, *more, "--recompute", "auto")
    assert "recompute: chunks 0" in capsys.readouterr().out
    found = figures(capsys, path, *more)
    assert found["recompute"] is not None
    assert free["recompute"] is None
    assert found["span"] < free["span"]
    assert max(found["peak_memory"]) <= 1.1 + 1e-9


def test_a_plan_with_recompute_is_shown_with_its_longer_b(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], costs: str
) -> None:
    path = planned(tmp_path, "ZBV", "--costs", costs, "--recompute", "all")
    assert read_schedule(path).recompute == (True,) * 6
    found = figures(capsys, path, "--costs", costs)
    assert found["span"] >= 6 * (2 * 1 + 1 + 1)
    assert main(["show", path]) == 0  # with costs that know no m_r
    assert "recompute      chunks 0-5" in capsys.readouterr().out
    assert figures(capsys, path)["span"] == found["span"]


def test_a_list_names_chunks_or_with_a_layers_file_layers(
    tmp_path: Path, costs: str
) -> None:
    path = planned(tmp_path, "ZBV", "--costs", costs, "--recompute", "0,3")
    assert read_schedule(path).recompute == (True, False, False, True, False, False)
    layers = tmp_path / "layers.json"
    layers.write_text(json.dumps(COSTS | {"n_layers": 6, "f": [1] * 5 + [2]}))
    path = planned(
        tmp_path, "ZB", "--layers", str(layers), "--split", "even", "--recompute", "0,2"
    )
    assert read_schedule(path).recompute == ((0,), (0,), False)


def test_orders_that_are_given_are_not_planned_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], costs: str
) -> None:
    path = planned(tmp_path, "ZB", "--costs", costs)
    out = str(tmp_path / "other.json")
    command = ["plan", "--pipeline_schedule_mode", path, "--out", out, "--recompute"]
    assert main([*command, "1"]) == 0
    assert read_schedule(out).recompute == (False, True, False)
    assert main([*command, "auto"]) == 2
    assert "are given" in capsys.readouterr().err
