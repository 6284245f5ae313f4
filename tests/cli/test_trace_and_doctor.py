"""The trace that a training run writes, and the doctor's table of what W holds."""

from pathlib import Path

import pytest
from commands import TINY_LLAMA

from zbpp.cli import main
from zbpp.core import Pass
from zbpp.planning import plan
from zbpp.simulator import read_trace

SMALL = [*TINY_LLAMA, "--data", __file__]


@pytest.mark.slow
@pytest.mark.needs("torch")
def test_train_writes_a_trace_of_the_jobs_of_its_plan(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    flags = ["--steps", "2", "--stages", "2", "--trace", str(trace)]
    assert main(["train", *flags, *SMALL]) == 0
    (measured,) = read_trace(trace)
    order = plan("ZBH1", n_stages=2, n_microbatches=8).orders
    for row, jobs in zip(measured.rows, order, strict=True):
        ran = [slot.job for slot in row if isinstance(slot.job, Pass)]
        assert ran == [job for job in jobs if isinstance(job, Pass)]


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
"""


@pytest.mark.needs("torch")
def test_doctor_tells_what_waits_and_why_the_rest_does_not(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "tied_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["doctor", "--model", "tied_model:build"]) == 0
    out = capsys.readouterr().out
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
