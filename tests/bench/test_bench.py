"""Contenders run beside each other: gradients compared, then steps timed in turns."""

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from schemas import mistakes
from torch import Tensor, nn

from zbpp.bench.gradients import compare
from zbpp.bench.peers import Peer
from zbpp.bench.request import BenchRequest, planned
from zbpp.bench.run import run_bench
from zbpp.core import RequestError
from zbpp.training.user_model import UserModel

pytestmark = pytest.mark.dist

N_LAYERS, DIM = 4, 4
OURS = ("zbpp:ZBV",)
PEERS = ("torch:ZBVZeroBubble",)


class Layer(nn.Module):
    """Hands on what torch's stages cannot: a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, value: Any) -> dict[str, Any]:
        if isinstance(value, Tensor):
            value = {"h": value, "mask": None}
        return {"h": torch.tanh(self.inner(value["h"])), "mask": value["mask"]}


def loss(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs["h"], targets)


def load() -> UserModel:
    layers = [Layer() for _ in range(N_LAYERS)]
    x = torch.randn(2, DIM, generator=torch.Generator().manual_seed(9))
    return UserModel(layers, x, x.flip(1), loss, N_LAYERS)


def request(folder: str, contenders: tuple[str, ...], **more: Any) -> BenchRequest:
    return planned(
        BenchRequest(
            contenders=contenders,
            stages=2,
            load=load,
            out=Path(folder) / "report",
            command="zbpp bench --stages 2",
            **{"microbatches": 4, "warmup": 1, "steps": 2, "rounds": 1, **more},
        )
    )


def bench_all(folder: str, wrong: str) -> tuple[int, int, str]:
    """Exit codes with and without a peer whose gradients are wrong; a refusal."""
    code = run_bench(request(folder, OURS + PEERS, reference="plain"))
    with pytest.MonkeyPatch.context() as patch:
        right = Peer.gradients
        patch.setattr(
            Peer, "gradients", lambda s: {k: 1.001 * g for k, g in right(s).items()}
        )
        bad = run_bench(request(wrong, ("zbpp:1F1B", "torch:GPipe"), steps=1))
    try:
        run_bench(request(wrong, ("torch:DualPipeV",), microbatches=3))
    except RequestError as error:
        return code, bad, str(error)
    return code, bad, ""


@pytest.mark.slow
def test_contenders_are_compared_and_timed(pool: Pool, tmp_path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    answers = pool.run(bench_all, 2, str(good), str(bad))
    assert {answer[:2] for answer in answers} == {(0, 1)}
    data = json.loads((good / "report" / "results.json").read_text())
    assert not mistakes("results", data)
    assert [one["name"] for one in data["contenders"]] == [*OURS, *PEERS]
    assert data["reference"] == "a plain loop"
    assert data["command"] == "zbpp bench --stages 2" and "torch" in data["versions"]
    for one in data["contenders"]:
        assert one["same_gradients"] and one["gradient_difference"] < 1e-6
        assert len(one["steps_s"]) == 2 and len(one["peak_bytes"]) == 2
        low, high = one["quartiles_s"]
        assert 0 < low <= one["step_s"] <= high and one["host_us_per_job"] > 0
        assert one["samples_per_s"] == pytest.approx(8 / one["step_s"])
        assert one["tokens_per_s"] is None
    v = data["contenders"][0]
    assert v["gradient_difference"] == 0 and v["predicted_step_s"] > 0
    for one in data["contenders"]:
        assert len(one["bubble_by_stage"]) == 2 and 0 <= one["bubble_measured"] < 1
    trace = json.loads((good / "report" / "trace.json").read_text())["traceEvents"]
    names = [e["args"]["name"] for e in trace if e["name"] == "process_name"]
    assert [name.partition(",")[0] for name in names] == ["ZBV", "ZBV", *PEERS]
    jobs = Counter(e["name"].rstrip("0123456789") for e in trace if e["pid"] == 2)
    assert all(jobs[f"{i}F"] == jobs[f"{i}W"] + jobs[f"{i}BW"] == 4 for i in range(4))
    assert jobs["O"] == 2 and all(jobs[f"{i}B"] == jobs[f"{i}W"] > 0 for i in (1, 2, 3))
    assert set(v["measured_over_simulated"]) >= {"F", "B", "W"}
    page = (good / "report" / "index.html").read_text()
    assert "torch:ZBVZeroBubble" in page and "zbpp bench --stages 2" in page
    for one in data["contenders"]:  # the page shows the medians of the table
        assert f"<td>{one['bubble_measured']:.2%}</td>" in page
    assert data["date"] in page and "gap: span" not in page
    # The control: gradients that are off by a thousandth.
    refused = json.loads((bad / "report" / "results.json").read_text())
    assert not mistakes("results", refused)
    plain, peer = refused["contenders"]
    assert plain["same_gradients"] and plain["step_s"] > 0
    assert not peer["same_gradients"] and "step_s" not in peer
    assert peer["reason"].startswith("refused: off by 1.0e-03")
    for *_, refusal in answers:
        assert refusal.startswith("torch:DualPipeV cannot run with 2 stages and 3 ")


def bench_sleeping(folder: str) -> int:
    file = Path(folder) / "costs.json"
    names = ("zbpp:1F1B", "zbpp:ZBH1", "torch:1F1B", "torch:InterleavedZeroBubble")
    return run_bench(request(folder, names, emulate=file, steps=1))


@pytest.mark.slow
def test_layers_sleep_for_all_contenders(pool: Pool, tmp_path) -> None:
    """A step takes no less than its jobs; the control is an order without bubbles."""
    (tmp_path / "costs.json").write_text(json.dumps({"f": 4, "b": 4, "w": 4}))
    assert pool.run(bench_sleeping, 2, str(tmp_path)) == [0, 0]
    data = json.loads((tmp_path / "report" / "results.json").read_text())
    steps = [one["step_s"] for one in data["contenders"]]
    assert data["emulated"] and steps[0] >= 0.06 and steps[2] >= 0.06  # 5 x 12 ms
    assert steps[1] >= 0.052 and steps[3] >= 0.048
    # No job is shorter than it sleeps, torch's F with its loss and its W with the rest.
    trace = json.loads((tmp_path / "report" / "trace.json").read_text())["traceEvents"]
    busy: Counter[tuple[int, int]] = Counter()
    for job in trace:
        if job["ph"] == "X" and job["cat"] in ("F", "B", "W", "BW"):
            busy[job["pid"], job["tid"]] += job["dur"]
    assert len(busy) == 12 and min(busy.values()) >= 48e3
    predicted = [one.get("predicted_step_s") for one in data["contenders"]]
    assert predicted == [pytest.approx(0.06), pytest.approx(0.052), None, None]
    assert all(one["same_gradients"] is None for one in data["contenders"])


def compare_all() -> list[float]:
    """Two processes hold each other's layers; one gradient is changed at a time."""
    rank = torch.distributed.get_rank()
    whole = {f"layers.{i}.{n}": torch.full((3,), 2.0 + i) for i in (0, 1) for n in "ab"}

    def part(keep: int, **changed: Tensor | None) -> dict[str, Tensor]:
        new = whole | {f"layers.{k[1]}.{k[0]}": g for k, g in changed.items()}
        kept = {k: g for k, g in new.items() if k.startswith(f"layers.{keep}")}
        return {k: g for k, g in kept.items() if g is not None}

    first, swapped = part(rank), partial(part, 1 - rank)
    return [
        compare(first, swapped()),
        compare(first, swapped(a1=torch.tensor([3.0, 3.0, 3.3]))),
        compare(first, swapped(b0=None)),
        compare(part(rank, a0=None), swapped(a0=torch.full((3,), 1e-3))),
        compare(first, swapped(b1=torch.tensor([3.0, float("nan"), 3.0]))),
        compare(first, swapped(b1=torch.full((2,), 3.0))),
    ]


@pytest.mark.slow
def test_gradients_are_compared_wherever_they_are(pool: Pool) -> None:
    inf = float("inf")
    wanted = [0.0, pytest.approx(0.1), 1.0, pytest.approx(5e-4), inf, inf]
    assert pool.run(compare_all, 2) == [wanted, wanted]
