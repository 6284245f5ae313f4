"""Contenders on one model: the first step compared, then steps timed in turns."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run
from pool import Pool
from schemas import mistakes
from torch import nn

from zbpp.bench.request import BenchRequest, planned
from zbpp.bench.run import run_bench
from zbpp.core import RequestError
from zbpp.training.user_model import UserModel

pytestmark = [pytest.mark.dist, pytest.mark.slow]

N_LAYERS, DIM = 4, 4
CONTENDERS = ("zbpp:ZBV", "torch:1F1B", "torch:ZBVZeroBubble")


class Layer(nn.Sequential):
    def __init__(self, dropout: float) -> None:
        super().__init__(nn.Linear(DIM, DIM), nn.Tanh(), nn.Dropout(dropout))


def load(dropout: float = 0.0) -> UserModel:
    layers = [Layer(dropout) for _ in range(N_LAYERS)]
    x = torch.randn(2, DIM, generator=torch.Generator().manual_seed(9))
    return UserModel(layers, x, x.flip(1), nn.functional.mse_loss, N_LAYERS)


def load_with_dropout() -> UserModel:
    return load(0.5)


def request(folder: str, *contenders: str, **more: Any) -> BenchRequest:
    sizes = {"microbatches": 4, "warmup": 1, "steps": 2, "rounds": 1, "load": load}
    return planned(
        BenchRequest(
            contenders=contenders,
            stages=2,
            out=Path(folder),
            command="zbpp bench --stages 2",
            **sizes | more,
        )
    )


def bench_all(good: str, bad: str) -> tuple[int, int, str]:
    """Exit codes with the same losses and with others, by dropout; a refusal."""
    codes = (
        run_bench(request(good, *CONTENDERS, clip_grad_norm=100.0)),
        run_bench(request(bad, *CONTENDERS[:2], load=load_with_dropout)),
    )
    try:
        run_bench(request(bad, "torch:DualPipeV", microbatches=3))
    except RequestError as error:
        return *codes, str(error)
    return *codes, ""


def test_contenders_are_compared_and_timed(pool: Pool, tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    answers = pool.run(bench_all, 2, str(good), str(bad))
    assert {answer[:2] for answer in answers} == {(0, 1)}
    data = json.loads((good / "results.json").read_text())
    assert not mistakes("results", data)
    assert [one["name"] for one in data["contenders"]] == [*CONTENDERS]
    assert data["command"] == "zbpp bench --stages 2" and "torch" in data["versions"]
    for one in data["contenders"]:
        assert one["same_loss"] and len(one["steps_s"]) == len(one["peak_bytes"]) == 2
        low, high = one["quartiles_s"]
        assert 0 < low <= one["step_s"] <= high and one["host_us_per_job"] > 0
        assert one["samples_per_s"] == pytest.approx(8 / one["step_s"])
        assert one["tokens_per_s"] is None
    ours = data["contenders"][0]
    assert ours["predicted_step_s"] > 0 and 0 <= ours["bubble_measured"] < 1
    trace = json.loads((good / "trace.json").read_text())["traceEvents"]
    names = [e["args"]["name"] for e in trace if e["name"] == "process_name"]
    assert [name.partition(",")[0] for name in names] == ["ZBV"]
    jobs = Counter(e["name"].rstrip("0123456789") for e in trace if e["ph"] == "X")
    assert all(jobs[f"{i}F"] == jobs[f"{i}W"] + jobs[f"{i}BW"] == 4 for i in range(4))
    page = (good / "index.html").read_text()
    assert CONTENDERS[2] in page and "zbpp bench --stages 2" in page
    assert f"<td>{ours['bubble_measured']:.2%}</td>" in page and data["date"] in page
    refused = json.loads((bad / "results.json").read_text())
    assert not mistakes("results", refused)
    first, other = refused["contenders"]
    assert first["same_loss"] and first["step_s"] > 0
    assert not other["same_loss"] and "step_s" not in other
    assert other["reason"].startswith("refused: loss ")
    for *_, refusal in answers:
        assert refusal.startswith("torch:DualPipeV cannot run with 2 stages and 3 ")


DICTS = """
import torch
from torch import nn

class Layer(nn.Linear):
    def forward(self, value):
        return {"x": super().forward(value["x"])}

def build():
    layers = [Layer(4, 4), Layer(4, 4)]
    x = torch.ones(2, 4)
    return layers, ({"x": x}, x), lambda out, y: (out["x"] - y).square().mean()
"""


def test_a_model_that_torch_cannot_take_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "dicts.py").write_text(DICTS)
    words = ["--stages", "2", "--microbatches", "2", "--peers", "torch:1F1B"]
    words += ["--modes", "none", "--model", "dicts:build", "--out", "report"]
    done = run("bench", *words, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "torch:1F1B cannot run this model: torch says: " in done.stderr
    assert "leave it out of --peers" in done.stderr and "Traceback" not in done.stderr


def bench_sleeping(folder: str, costs: str) -> int:
    file = Path(costs)
    return run_bench(request(folder, "zbpp:1F1B", "zbpp:ZBH1", emulate=file, steps=1))


def test_layers_sleep_in_place_of_computing(pool: Pool, tmp_path: Path) -> None:
    """A step takes no less than its jobs, and no job less than it sleeps."""
    costs, out = tmp_path / "costs.json", tmp_path / "report"
    costs.write_text(json.dumps({"f": 4, "b": 4, "w": 4}))
    assert pool.run(bench_sleeping, 2, str(out), str(costs)) == [0, 0]
    data = json.loads((out / "results.json").read_text())
    first, second = data["contenders"]
    assert data["emulated"] and first["step_s"] >= 0.06 and second["step_s"] >= 0.052
    predicted = [one["predicted_step_s"] for one in data["contenders"]]
    assert predicted == [pytest.approx(0.06), pytest.approx(0.052)]  # 5 times 12 ms
    assert all(one["same_loss"] is None for one in data["contenders"])
    busy: Counter[tuple[int, int]] = Counter()
    for job in json.loads((out / "trace.json").read_text())["traceEvents"]:
        if job["ph"] == "X" and job["cat"] in ("F", "B", "W", "BW"):
            busy[job["pid"], job["tid"]] += job["dur"]
    assert len(busy) == 4 and min(busy.values()) >= 48e3
