"""`zbpp profile`: a costs file that plans, of the built-in model and a user's."""

import json
from pathlib import Path

import pytest
from commands import TINY_LLAMA, run

from zbpp.cli import main
from zbpp.core import read_costs, read_layers

SMALL = [*TINY_LLAMA, "--microbatches", "2", "--rounds", "2"]
MODEL = """
import torch
from torch import nn

def build():
    layers = [nn.Linear(8, 8 * n) for n in (1, 1)] + [nn.Linear(8, 3)]
    return layers, (torch.randn(4, 8), torch.randn(4, 3)), nn.functional.mse_loss
"""


@pytest.mark.slow
def test_the_own_model_is_profiled_in_time_and_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, layers = tmp_path / "costs.json", tmp_path / "layers.json"
    code = main(
        ["profile", *SMALL, "--stages", "1", "--out", str(out), "--layers_out",
         str(layers), "--json"]
    )  # fmt: skip
    assert code == 0
    data = json.loads(capsys.readouterr().out)
    assert [chunk["stage"] for chunk in data["chunks"]] == [0]
    found = read_layers(layers)
    assert found.n_layers == 6
    costs = read_costs(out)
    assert costs.m_b == pytest.approx((sum(found.of("m_b")),))
    assert data["chunks"][0]["left"]["F"] == pytest.approx(costs.m_b[0], rel=0.1)
    assert isinstance(costs.f, tuple) and min(costs.f) > 0


@pytest.mark.slow
@pytest.mark.dist
def test_a_users_model_is_profiled_by_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    done = run(
        "profile", "--model", "my_model:build", "--out", "c.json", "--rounds", "2",
        "--layers_out", "l.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "link 0-1: delay" in done.stdout and "3 layers" not in done.stderr
    costs = read_costs("c.json")
    assert isinstance(costs.comm, tuple) and costs.comm[0] > 0
    assert isinstance(costs.m_fixed, tuple) and costs.m_fixed[0] > 4 * 2 * 72
    found = read_layers("l.json")
    assert found.parameters == (288.0, 288.0, 108.0)


def test_a_model_of_too_few_layers_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    flags = ["--out", "x.json", "--model", "my_model:build", "--stages", "4"]
    assert main(["profile", *flags]) == 2
    error = capsys.readouterr().err
    assert "has 3 layers for 4 chunks" in error and len(error.splitlines()) == 1
