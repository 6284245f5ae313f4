"""Contenders on one model: the first step compared, then interleaved steps timed.

Wrong requests are in tests/cli/test_wrong_command_lines.py.
"""

import json
import os
import re
import sys
from collections import Counter

import pytest
from ranks import end_of

from zbpp.cli import main

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.needs("torch")]

MODELS = """
import torch
from torch import nn
from torch.nn.functional import mse_loss

def batch():
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(9))
    return x, x.flip(1)

def layers(dropout):
    return [
        nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(dropout))
        for _ in range(4)
    ]

def plain():
    return layers(0.0), batch(), mse_loss

def dropped():
    return layers(0.5), batch(), mse_loss

def not_a_number():
    return layers(0.0), batch(), lambda y, t: mse_loss(y, t) * float("nan")

class OfDicts(nn.Linear):
    def forward(self, value):
        return {"x": super().forward(value["x"])}

def dicts():
    x, y = batch()
    loss_fn = lambda out, target: mse_loss(out["x"], target)
    return [OfDicts(4, 4), OfDicts(4, 4)], ({"x": x}, y), loss_fn
"""
CONTENDERS = ["zbpp:ZBV", "torch:1F1B", "torch:ZBVZeroBubble"]


def run(folder, words):
    """Run the command on a rank, as torchrun would."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.exit(main(words))


@pytest.fixture
def bench(tmp_path):
    """Run a bench of two processes; gives its results, and what rank 0 printed."""
    (tmp_path / "models.py").write_text(MODELS)

    def start(flags, *, code=0):
        sizes = "--stages 2 --microbatches 4 --warmup 1 --out report"
        words = ["bench", *sizes.split(), *flags.split()]
        ended, *_ = end_of(run, 2, str(tmp_path), words)
        assert ended.code == code, ended.words
        results = tmp_path / "report" / "results.json"
        return json.loads(results.read_text()) if results.exists() else {}, ended.words

    return start


def jobs_in(path):
    events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


def test_contenders_are_compared_and_timed(bench, tmp_path):
    from pages import mistakes

    flags = "--modes zb-v,ZBV --peers torch:1f1b,torch:ZBVZeroBubble --steps 2"
    data, _ = bench(f"{flags} --model models:plain")
    assert not mistakes("results", data)
    assert [one["name"] for one in data["contenders"]] == CONTENDERS
    assert "zbpp bench " in data["command"] and "torch" in data["versions"]
    for one in data["contenders"]:
        assert one["same_loss"] and len(one["steps_s"]) == len(one["peak_bytes"]) == 2
        low, high = one["quartiles_s"]
        assert 0 < low <= one["step_s"] <= high and one["host_us_per_job"] > 0
        assert one["samples_per_s"] == pytest.approx(8 / one["step_s"])
        assert one["tokens_per_s"] is None
    ours = data["contenders"][0]
    assert ours["predicted_step_s"] > 0 and 0 <= ours["bubble_measured"] < 1
    names = (
        e["name"].rstrip("0123456789") for e in jobs_in(tmp_path / "report/trace.json")
    )
    jobs = Counter(names)
    assert all(jobs[f"{i}F"] == jobs[f"{i}W"] + jobs[f"{i}BW"] == 4 for i in range(4))
    page = (tmp_path / "report" / "index.html").read_text()
    assert CONTENDERS[2] in page and data["date"] in page
    assert f"<td>{ours['bubble_measured']:.1%}</td>" in page


@pytest.mark.parametrize(
    ("flags", "same"),
    [
        ("--modes 1F1B,ZBH1 --model models:not_a_number", [False, False]),
        pytest.param(
            "--modes ZBV --peers torch:1F1B --model models:dropped",
            [True, False],
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_contender_with_another_loss_is_refused_and_not_timed(bench, flags, same):
    from pages import mistakes

    data, _ = bench(f"{flags} --steps 2", code=1)
    assert not mistakes("results", data)
    assert [one["same_loss"] for one in data["contenders"]] == same
    for one in data["contenders"]:
        assert one["same_loss"] == ("step_s" in one)
        assert one["same_loss"] or one["reason"].startswith("refused: loss ")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "flags",
    [
        "--modes none --peers torch:1F1B --model models:dicts",
        "--modes none --peers torch:DualPipeV --model models:plain -m 3",
    ],
)
def test_a_contender_that_cannot_run_is_one_line(bench, flags):
    _, printed = bench(flags, code=2)
    (name,) = re.findall("torch:[^ ]+", flags)
    assert f"{name} cannot run: torch raises " in printed
    assert "Traceback" not in printed


@pytest.mark.nightly
def test_layers_sleep_in_place_of_computing(bench, tmp_path):
    """A step takes no less than its jobs, and no job less than it sleeps."""
    (tmp_path / "costs.json").write_text('{"f": 4, "b": 4, "w": 4}')
    data, _ = bench("--modes 1F1B,ZBH1 --emulate costs.json --steps 1")
    first, second = data["contenders"]
    assert data["emulated"] and first["step_s"] >= 0.06 and second["step_s"] >= 0.052
    predicted = [one["predicted_step_s"] for one in data["contenders"]]
    assert predicted == [pytest.approx(0.06), pytest.approx(0.052)]  # 5 times 12 ms
    assert all(one["same_loss"] is None for one in data["contenders"])
    busy = Counter()
    for job in jobs_in(tmp_path / "report" / "trace.json"):
        if job["cat"] in ("F", "B", "W", "BW"):
            busy[job["pid"], job["tid"]] += job["dur"]
    assert len(busy) == 4 and min(busy.values()) >= 48e3
