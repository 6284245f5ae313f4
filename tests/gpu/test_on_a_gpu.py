"""Tests that need a GPU; all are left out where there is none."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import talking
import torch
from commands import torchrun
from gpu_waits import waits_are_errors
from small_model import adamw, assert_same, batch, make_pipeline
from trained_modes import MODES

from zbpp import diagnostics
from zbpp.core import Pass, PassKind
from zbpp.pipeline import Pipeline
from zbpp.runtime.support.streams import HostCopy, sent_ahead

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


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def pipeline_on_gpu(mode: str, n_stages: int, **more: object) -> Pipeline:
    settings: dict[str, object] = {
        "optimizer": fused,
        "device": GPU,
        "clip_grad_norm": 0.5,
        "post_validation": True,
    }
    return make_pipeline(mode, n_stages, **(settings | more))


def trained(mode: str, n_stages: int, **more: object) -> tuple[Any, dict[str, Any]]:
    pipeline = pipeline_on_gpu(mode, n_stages, **more)
    results = [pipeline.step(*batch(step)) for step in range(5)]
    losses = [(one.loss, one.grad_norm) for one in results]
    return losses, {n: p.detach().cpu() for n, p in pipeline.named_parameters()}


def test_pairs_in_turns_have_the_bits_of_pairs_in_a_row() -> None:
    """What communicates runs on a stream of its own, and nothing else does."""

    def run(*, overlap: bool) -> Any:
        model = talking.talking(4, dropout=0.3)
        pipeline = talking.make(model, device=GPU, overlap=overlap)
        return talking.train(pipeline, steps=5)

    (numbers, state), in_a_row = run(overlap=True), run(overlap=False)
    assert numbers == in_a_row[0]
    assert_same(state, in_a_row[1])


@pytest.fixture(scope="module")
def reference() -> tuple[Any, dict[str, Any]]:
    return trained("FThenB", 1)


@pytest.mark.parametrize("mode", MODES)
def test_modes_agree_to_the_last_bit(
    mode: str, reference: tuple[Any, dict[str, Any]]
) -> None:
    losses, parameters = trained(mode, 2)
    assert losses == reference[0]
    assert_same(parameters, reference[1])


def test_processes_that_share_the_gpu_agree_too(
    tmp_path: Path,
) -> None:
    file = tmp_path / "rank"
    command, environment = torchrun("gpu_run.py", str(file), "ZBV", "cuda")
    subprocess.run(command, env=environment, check=True, timeout=200)
    parts = [torch.load(f"{file}{rank}") for rank in range(2)]
    plain = trained("FThenB", 1, optimizer=adamw)
    assert all(losses == [loss for loss, _ in plain[0]] for losses, _ in parts)
    assert_same(parts[0][1] | parts[1][1], plain[1])


@pytest.mark.parametrize("post_validation", [False, True])
@pytest.mark.parametrize("mode", ["1F1B", "ZBH1", "ZBV"])
def test_no_step_waits_for_the_gpu(mode: str, post_validation: bool) -> None:
    pipeline = pipeline_on_gpu(mode, 2, loss_scale=8.0, post_validation=post_validation)
    for step in range(3):  # the first learns which buffers change
        pipeline.step(*batch(step))
    with waits_are_errors():
        for step in range(3, 6):
            pipeline.step(*batch(step))
        with pytest.raises(RuntimeError, match="synchronizing"):
            torch.ones(1, device=GPU).item()  # the control


@of_kernels
def test_jobs_take_the_time_of_their_kernels() -> None:
    from gpu.clock import spin_cycles_per_s
    from gpu.pipelines import SpinningLayer

    spin_cycles_per_s(GPU)
    job_s = 5e-3
    pipeline = Pipeline(
        [SpinningLayer(job_s) for _ in range(2)],
        loss_fn=torch.nn.functional.mse_loss,
        optimizer=None,
        schedule="ZBH1",
        n_stages=2,
        n_microbatches=4,
        device=GPU,
    )
    x = torch.ones(4, 1)
    for _ in range(3):
        pipeline.step(x, x)
    slots = [slot for row in diagnostics.timeline(pipeline).rows for slot in row]
    for kind in (PassKind.F, PassKind.B, PassKind.W):
        own = [
            slot.duration
            for slot in slots
            if isinstance(slot.job, Pass) and slot.job.kind is kind
        ]
        assert len(own) == 8
        assert sorted(own)[4] == pytest.approx(job_s, rel=0.1), kind


@of_kernels
def test_nobody_waits_for_a_micro_batch_that_may_be_changed_at_once() -> None:
    from gpu.clock import spin

    spin(GPU, 0.2)
    source = torch.full((2**20,), 1.0)
    with waits_are_errors():
        x = sent_ahead(source, GPU)
    source.zero_()
    assert float(HostCopy(x.sum()).read()) == 2**20


@of_kernels
def test_estimates_of_memory_are_within_5_per_cent() -> None:
    from gpu.memory import errors
    from gpu.sizes import Sizes

    found = errors(Sizes(GPU))
    assert found and max(map(abs, found.values())) < 0.05, found
