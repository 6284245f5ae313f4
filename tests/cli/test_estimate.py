"""``zbpp estimate``: the form of what it prints and writes."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from schemas import mistakes

from zbpp.cli import main
from zbpp.core import read_costs, read_layers

pytestmark = pytest.mark.needs("torch")

SOURCE = """
import torch
from torch import nn
from torch.nn.functional import mse_loss

def build():
    x = torch.randn(8, 64)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()).double() for _ in range(6)]
    return layers, (x.double(), x.double()), mse_loss
"""
SIZES = ["--stages", "2", "--microbatches", "4"]
PARTS = {
    "parameters",
    "gradients",
    "optimizer",
    "buffers",
    "rollback",
    "activations_peak",
    "peak",
}


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_small_model.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "a_small_model", raising=False)
    importlib.invalidate_caches()


def test_json_has_bytes_by_mode_and_stage(capsys: pytest.CaptureFixture[str]) -> None:
    modes = ["--modes", "1F1B", "zb-h1"]
    flags = ["--model", "a_small_model:build", *modes, "--optimizer", "sgd"]
    assert main(["estimate", *SIZES, *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not mistakes("estimate", found)
    assert mistakes("estimate", found | {"unit": "GiB"})
    assert found["unit"] == "bytes" and list(found["modes"]) == ["1F1B", "ZBH1"]
    for mode, stages in found["modes"].items():
        assert len(stages) == 2
        for stage in stages:
            assert set(stage) >= PARTS
            n = 3 * (64 * 64 + 64) * 8
            assert stage["parameters"] == stage["gradients"] == n
            assert stage["rollback"] == (n if mode == "ZBH1" else 0)
            assert stage["peak"] > 2 * n and stage["optimizer"] == 0


def test_a_row_says_that_its_stage_is_over_the_limit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["estimate", *SIZES, "--model", "a_small_model:build", "--modes", "FThenB"]
    assert main([*flags, "--json"]) == 0
    stages = json.loads(capsys.readouterr().out)["modes"]["FThenB"]
    small, large = sorted(stage["peak"] for stage in stages)
    assert small < large
    for limit, n_over in ((small - 1, 2), (small, 1)):
        assert main([*flags, "--memory_limit", str(limit)]) == 0
        rows = capsys.readouterr().out.splitlines()
        assert sum(" over " in f"{row} " for row in rows) == n_over, rows


@pytest.mark.slow
def test_what_fits_is_named_and_the_files_feed_the_planner(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--modes", "1F1B", "FThenB", "--memory_limit", "150KiB", "--optimizer"]
    files = ["--costs_out", "costs.json", "--layers_out", "layers.json"]
    model = ["--model", "a_small_model:build"]
    assert main(["estimate", *SIZES, *model, *flags, "none", *files]) == 0
    out = capsys.readouterr().out
    assert "no mode fits 150 KiB a stage" in out and "1F1B none" in out
    flags[4] = "1000KiB"
    assert main(["estimate", *SIZES, *model, *flags, "none"]) == 0
    out = capsys.readouterr().out
    assert "1F1B, FThenB fit 1000 KiB" in out and "1F1B none" not in out
    memory = read_costs("costs.json")
    assert isinstance(memory.m_b, tuple) and len(memory.m_b) == 2
    assert memory.memory_limit == 150 * 1024
    assert read_layers("layers.json").n_layers == 6
    assert main(["show", "1F1B", *SIZES, "--costs", "costs.json"]) == 2  # over it


def test_without_a_model_that_of_training_is_estimated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = ["--size", "tiny"]
    assert main(["estimate", *SIZES, *small, "--modes", "ZBV"]) == 0
    assert "ZBV" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--optimizer", "adamx"], "torch.optim has none of this name"),
        (["--stages", "40"], "no mode can be had: 6 layers cannot fill 40 chunks"),
    ],
)
def test_what_cannot_be_estimated_is_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", "a_small_model:build", "--modes", "1F1B"]
    assert main(["estimate", *SIZES, *model, *flags]) == 2
    assert message in capsys.readouterr().err
