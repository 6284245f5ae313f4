"""Measured times become a costs file; the weights that a model defers, a table."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from commands import TINY_LLAMA

from zbpp import Costs, RequestError
from zbpp.cli.commands import main
from zbpp.core import Pass, PassKind, Timeline, read_costs
from zbpp.core.measured import measured_costs
from zbpp.planning import plan
from zbpp.simulator import read_trace, simulate


def timeline(mode: str, costs: Costs) -> Timeline:
    return simulate(plan(mode, n_stages=2, n_microbatches=5), costs)


@pytest.mark.parametrize("mode", ["ZBH1", "ZBV"])
def test_the_costs_of_a_simulated_run_are_found_again(mode: str) -> None:
    n_chunks = plan(mode, n_stages=2, n_microbatches=5).placement.n_chunks
    costs = Costs(*(tuple(k + i / 8 for i in range(n_chunks)) for k in (3, 4, 2)))
    found = measured_costs([timeline(mode, costs)])
    for name in ("f", "b", "w"):
        assert getattr(found, name) == tuple(1e3 * x for x in getattr(costs, name))


def test_one_very_slow_pass_does_not_move_the_mean() -> None:
    costs = Costs(1, 1, 1)
    measured = timeline("ZBH1", costs)
    slow = Pass(PassKind.F, 0, 0)
    rows = tuple(
        tuple(replace(s, end=s.end + 99) if s.job == slow else s for s in row)
        for row in measured.rows
    )
    assert measured_costs([replace(measured, rows=rows)]).f == (1e3, 1e3)


def test_joint_passes_are_refused() -> None:
    with pytest.raises(RequestError, match="1F1B runs B and W as one pass"):
        measured_costs([timeline("1F1B", Costs())])


SMALL = [*TINY_LLAMA, "--validation_microbatches", "2", "--data", __file__]


def test_train_writes_costs_to_plan_with_and_a_trace(tmp_path: Path) -> None:
    costs, metrics = tmp_path / "costs.json", tmp_path / "metrics.jsonl"
    trace = tmp_path / "trace.json"
    code = main(
        ["train", "--steps", "2", "--stages", "2", "--transport", "local", *SMALL,
         "--costs_out", str(costs), "--metrics", str(metrics), "--trace", str(trace)]
    )  # fmt: skip
    assert code == 0
    (measured,) = read_trace(trace)
    order = plan("ZBH1", n_stages=2, n_microbatches=8).orders
    for row, jobs in zip(measured.rows, order, strict=True):
        ran = [slot.job for slot in row if isinstance(slot.job, Pass)]
        assert ran == [job for job in jobs if isinstance(job, Pass)]
    found = read_costs(costs)
    for times in (found.f, found.b, found.w):
        assert isinstance(times, tuple) and len(times) == 2
        assert all(0 < t < 1e4 for t in times)
    sizes = ["--stages", "2", "--microbatches", "4"]
    assert main(["show", "ZB", *sizes, "--costs", str(costs)]) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pipeline_schedule_mode", "1F1B"], "--costs_out: 1F1B runs B and W as one"),
        (["--costs_out", "missing/x.json"], "--costs_out missing/x.json cannot be"),
        (["--trace", "missing/x.json"], "--trace missing/x.json cannot be"),
    ],
)
def test_costs_that_cannot_be_written_are_refused_before_the_run(
    flags: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *SMALL, "--costs_out", "x.json", *flags]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and not captured.out


MODEL = """
import torch
from torch import nn

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up = nn.Embedding(10, 8), nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.idle = nn.Linear(8, 8)

    def forward(self, x):
        return self.frozen(self.up(self.embed(x))) @ self.embed.weight.t()

def build():
    return Tied(), torch.zeros(3, 4, dtype=torch.long)

def wrong():
    return Tied()

nothing = 3
"""


@pytest.fixture
def doctor(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[str], tuple[int, str, str]]:
    (tmp_path / "a_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "a_model", raising=False)
    importlib.invalidate_caches()

    def run(model: str) -> tuple[int, str, str]:
        code = main(["doctor", "--model", model])
        return code, *capsys.readouterr()

    return run


Doctor = Callable[[str], tuple[int, str, str]]


def test_doctor_tells_what_waits_and_why_the_rest_does_not(doctor: Doctor) -> None:
    code, out, error = doctor("a_model:build")
    assert code == 0, error
    rows = {}
    for line in out.splitlines():
        cells = [cell.strip() for cell in line.split("│")]
        if len(cells) > 2:
            rows[cells[1]] = cells[3]
    assert rows == {
        "embed.weight": "B: used 2 times",
        "up.weight": "W",
        "up.bias": "B: no product's weight",
        **dict.fromkeys(("frozen.weight", "frozen.bias"), "frozen"),
        **dict.fromkeys(("idle.weight", "idle.bias"), "unused"),
    }
    assert "42.1% of 152 parameters; B those of 80 (used 2 times)" in out


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("a_model", "write it as module:function"),
        ("a_model:none", "has no attribute 'none'"),
        ("no_model:build", "No module named 'no_model'"),
        ("a_model:wrong", "returns a pair: a module, and its inputs"),
        ("a_model:nothing", "returns a pair: a module, and its inputs"),
    ],
)
def test_doctor_says_what_is_wrong_with_a_model(
    model: str, message: str, doctor: Doctor
) -> None:
    code, out, error = doctor(model)
    assert code == 2 and message in error and not out
    assert len(error.splitlines()) == 1
