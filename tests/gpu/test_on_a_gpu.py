"""Tests that need a GPU; all are left out where there is none."""

import os
import statistics
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case, difference, make, on_ranks, run
from gpu_waits import waits_are_errors
from pool import Pool
from torch import nn

import zbpp.memory
from zbpp import diagnostics
from zbpp.checkpoint import load
from zbpp.core import Pass, PassKind
from zbpp.pipeline import Pipeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
GPU = torch.device("cuda", 0)
of_kernels = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_name().startswith("simulated"),
    reason="needs the kernels and times of a GPU, not of a simulated one",
)
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # same bits on all streams


MODES = ("FThenB", "1F1B", "VPP", "ZBH1", "ZBH2", "ZBV")


def on_gpu(mode: str, **more: Any) -> Case:
    settings = {"clip": 0.5, "post_validation": True, "optimizer": "AdamW fused"} | more
    return Case(mode=mode, device="cuda", **settings)


@cache
def reference(**more: Any) -> Any:
    return run(on_gpu("FThenB", n_stages=1, **more))


def test_interleaved_pairs_have_the_bits_of_sequential_pairs() -> None:
    """Communication runs on a separate stream, and nothing else does."""
    case = on_gpu("DualPipeV", model="exchange, dropout", n_stages=1)
    in_a_row = run(replace(case, overlap=False))
    assert difference(run(case), in_a_row) is None


@pytest.mark.parametrize("mode", MODES)
def test_modes_give_equal_bits(mode: str) -> None:
    assert difference(run(on_gpu(mode)), reference()) is None


def test_processes_that_share_the_gpu_give_equal_bits() -> None:
    """By gloo, through the host's memory."""
    pool = Pool()
    found = on_ranks(pool, on_gpu("ZBV", optimizer="adamw"), 2)
    pool.close()
    assert difference(found, reference(optimizer="adamw")) is None


@pytest.mark.parametrize("post_validation", [False, True])
@pytest.mark.parametrize("mode", ["1F1B", "ZBH1", "ZBV"])
def test_no_step_waits_for_the_gpu(mode: str, post_validation: bool) -> None:
    case = on_gpu(mode, loss_scale=8.0, post_validation=post_validation)
    pipeline = make(case)
    for step in range(3):  # the first learns which buffers change
        pipeline.step(*case.batch(step))
    with waits_are_errors():
        for step in range(3, 6):
            pipeline.step(*case.batch(step))
        with pytest.raises(RuntimeError, match="synchronizing"):
            torch.ones(1, device=GPU).item()  # the control


def spin(seconds: float) -> None:
    """Occupy the current stream, and one multiprocessor."""
    torch.cuda._sleep(int(seconds * cycles_per_s()))


@cache
def cycles_per_s() -> float:
    """Cycles of a spinning kernel; the median of several."""
    rates = []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(10**7)
        end.record()
        end.synchronize()
        rates.append(10**7 / (start.elapsed_time(end) / 1e3))
    return statistics.median(rates[1:])


class Spinning(torch.nn.Linear):
    """A product whose F, B and W take as long as a kernel before it spins."""

    job_s = 5e-3

    def __init__(self) -> None:
        super().__init__(8, 8, device=GPU)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Spin.apply(super().forward(x), self.job_s)
        return y


class Spin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        spin(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        spin(ctx.seconds)
        return dy.clone(), None


@of_kernels
def test_jobs_take_the_time_of_their_kernels() -> None:
    cycles_per_s()
    pipeline = Pipeline(
        [Spinning() for _ in range(2)],
        loss_fn=torch.nn.functional.mse_loss,
        optimizer=None,
        schedule="ZBH1",
        n_stages=2,
        n_microbatches=4,
        device=GPU,
    )
    x = torch.ones(4, 8)
    for _ in range(3):
        pipeline.step(x, x)
    slots = [slot for row in diagnostics.timeline(pipeline).rows for slot in row]
    for kind in (PassKind.F, PassKind.B):
        times = [
            slot.duration
            for slot in slots
            if isinstance(slot.job, Pass) and slot.job.kind is kind
        ]
        assert len(times) == 8
        assert sorted(times)[4] == pytest.approx(Spinning.job_s, rel=0.1), kind


@of_kernels
def test_a_micro_batch_may_be_overwritten_right_after_the_step_call() -> None:
    case = on_gpu("ZBH1")
    pipeline, plain = make(case), make(case)
    for step in range(3):
        pipeline.step(*case.batch(step))
    x, y = case.batch(3)
    spin(0.2)
    with waits_are_errors():
        result = pipeline.step(x, y)
    x.zero_()
    y.zero_()
    losses = [plain.step(*case.batch(step)).loss for step in range(4)]
    assert result.loss == losses[3]


@of_kernels
@pytest.mark.parametrize("mode", ["FThenB", "1F1B", "ZBH1"])
def test_estimates_of_memory_are_within_5_per_cent(mode: str) -> None:
    nn = torch.nn
    x = torch.randn(8, 512, 1024)
    blocks = [
        nn.TransformerEncoderLayer(1024, 16, 4096, 0.0, batch_first=True)
        for _ in range(4)
    ]
    layers = nn.Sequential(*blocks, nn.Linear(1024, 1024))
    how: dict[str, Any] = {
        "loss_fn": nn.functional.mse_loss,
        "n_stages": 1,
        "n_microbatches": 4,
        "optimizer": torch.optim.AdamW,
    }
    microbatch = x[:2], x[:2]
    estimate = zbpp.memory.estimate(
        layers, microbatch, modes=[mode], device="cuda", **how
    )
    before = torch.cuda.memory_allocated()
    pipeline = Pipeline(layers, schedule=mode, device=GPU, **how)
    batch_on_gpu = x.to(GPU)
    for _ in range(4):
        torch.cuda.reset_peak_memory_stats()
        pipeline.step(batch_on_gpu, batch_on_gpu)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    assert estimate.peak(mode) == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize("fused", [True, False])
def test_a_fused_optimizer_has_its_counters_on_the_gpu(
    fused: bool, tmp_path: Path
) -> None:
    """After a load; others count on the host."""
    with Pipeline(
        [nn.Linear(4, 4)], "1F1B", loss_fn=nn.functional.mse_loss,
        optimizer=torch.optim.AdamW, n_stages=1, n_microbatches=1, device="cpu",
    ) as pipeline:  # fmt: skip
        pipeline.step(torch.ones(1, 4), torch.ones(1, 4))
        pipeline.save(tmp_path, wait=True)
    layer = nn.Linear(4, 4, device=GPU)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=fused)
    model = nn.ModuleDict({"layers": nn.Sequential(layer)})
    load(tmp_path, model, optimizers=[optimizer])
    devices = {"step": GPU if fused else torch.device("cpu"), "exp_avg": GPU}
    for state in optimizer.state.values():
        assert {key: state[key].device for key in devices} == devices
