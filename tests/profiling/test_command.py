"""`zbpp profile`: a costs file that plans; own model, a user's, and sleepers."""

import json
from pathlib import Path

import pytest
from commands import TINY_LLAMA, run

from zbpp.cli import main
from zbpp.core import Placement, read_costs, read_layers

SMALL = [*TINY_LLAMA, "--microbatches", "2", "--rounds", "2"]
MODEL = """
import torch
from torch import nn

def build():
    layers = [nn.Linear(8, 8 * n) for n in (1, 1)] + [nn.Linear(8, 3)]
    return layers, (torch.randn(4, 8), torch.randn(4, 3)), nn.functional.mse_loss
"""


def test_layers_that_sleep_are_found_and_planned_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, out = tmp_path / "given.json", tmp_path / "out.json"
    given.write_text('{"f": [4, 2], "b": [3, 6], "w": [1, 2], "optimizer": [2, 3]}')
    code = main(
        ["profile", "--emulate", str(given), "--transport", "local", "--out", str(out),
         "--microbatches", "4", "--rounds", "2"]
    )  # fmt: skip
    assert code == 0
    assert "layers / chunk" in capsys.readouterr().out
    found = read_costs(out)
    assert found.on(Placement.single(2)).f >= (4, 2)
    assert isinstance(found.b, tuple) and found.b >= (3, 6)
    sizes = ["--stages", "2", "--microbatches", "4"]
    assert main(["show", "ZBH1", *sizes, "--costs", str(out)]) == 0


@pytest.mark.slow
def test_the_own_model_is_profiled_in_time_and_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, layers = tmp_path / "costs.json", tmp_path / "layers.json"
    code = main(
        ["profile", *SMALL, "--transport", "local", "--out", str(out), "--layers_out",
         str(layers), "--json"]
    )  # fmt: skip
    assert code == 0
    data = json.loads(capsys.readouterr().out)
    assert [chunk["stage"] for chunk in data["chunks"]] == [0, 1]
    found = read_layers(layers)
    assert found.n_layers == 6
    costs = read_costs(out)
    assert costs.m_b == pytest.approx(
        (sum(found.of("m_b")[:3]), sum(found.of("m_b")[3:]))
    )
    for chunk in data["chunks"]:
        own = found.of("m_b")[3 * chunk["chunk"] :][:3]
        assert chunk["left"]["F"] == pytest.approx(sum(own), rel=0.1)
    assert isinstance(costs.f, tuple) and min(costs.f) > 0


@pytest.mark.slow
@pytest.mark.dist
def test_a_users_model_is_profiled_by_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = ["--data_parallel", "2", "--shard", "optimizer"]
    (tmp_path / "my_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    done = run(
        "profile", "--model", "my_model:build", "--out", "c.json", "--rounds", "2",
        "--layers_out", "l.json", *replicas,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "link 0-1: delay" in done.stdout and "3 layers" not in done.stderr
    costs = read_costs("c.json")
    assert isinstance(costs.comm, tuple) and costs.comm[0] > 0
    assert isinstance(costs.m_fixed, tuple) and costs.m_fixed[0] > 4 * 2 * 72
    found = read_layers("l.json")
    assert found.parameters == (288.0, 288.0, 108.0)
    both, whole = found.of("m_fixed")[0], 2 * 288.0
    own = (both - whole / 2) / 2 + whole  # what is in parts, and two that are whole
    assert costs.m_fixed[0] == pytest.approx(2 * own)
    assert min(costs.all_gather) > 0 and min(costs.reduce_scatter) > 0


def test_a_model_of_too_few_layers_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    flags = ["--out", "x.json", "--model", "my_model:build", "--stages", "4"]
    assert main(["profile", *flags]) == 2
    error = capsys.readouterr().err
    assert "has 3 layers for 4 chunks" in error and len(error.splitlines()) == 1
