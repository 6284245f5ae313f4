"""Optimizers in host memory: the bits of those on the device; 16-bit parameters."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case, Shown, difference, merged, on_ranks, reference, run
from meshes import MeshCase
from pool import Pool
from small import batch, linears, make, refusal
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import zbpp

MODES = ("1F1B", "ZBH1", "ZBV")
adamw = partial(torch.optim.AdamW, lr=1e-2, fused=True)
ROWS: dict[str, dict[str, Any]] = {
    "fused": {"optimizer": "AdamW fused"},
    "rolled back": {"clip": 0.1, "post_validation": True, "steps": 4},
    "rolled back, snapshots": {"clip": 0.1, "post_validation": True, "snapshots": True},
    "waits for the norm": {"clip": 0.1, "post_validation": False},
    "hooked": {"clip": 0.2, "post_validation": True, "optimizer": "hooked"},
    "tied": {"model": "lm tied", "clip": 0.3},
    "sparse": {"model": "lm sparse", "optimizer": "plain sgd", "clip": 0.3},
    "scaled": {"model": "norms", "loss_scale": 8.0, "clip": 0.3},
    "in calls": {"calls": 2, "optimizer": "several"},
    "resumed": {"resume": ("1F1B", 2), "steps": 4},
    "frozen": {"model": "frozen", "optimizer": "groups"},
}


CASES = {
    f"{row}, {mode}, {n_stages}": Case(mode=mode, n_stages=n_stages, **ROWS[row])
    for row in ROWS
    for mode in MODES
    for n_stages in (1, 2)
    if row in ("rolled back", "resumed") or (mode, n_stages) == ("ZBV", 2)
}


@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_the_device(name: str) -> None:
    case, n_stages = CASES[name], CASES[name].n_stages
    found = run(replace(case, offload_optimizer=True))
    assert difference(found, reference(case), rounding=case.rounding) is None
    if case.post_validation and n_stages > 1:
        assert found["rollbacks"] > 0


def test_parts_of_passes_change_no_bit() -> None:
    case = Case(mode="ZBV", model="exchange", parts=True, offload_optimizer=True)
    assert difference(run(case), reference(case)) is None


@pytest.mark.dist
def test_processes_change_no_bit(pool: Pool) -> None:
    case = Case(mode="ZBV", clip=0.1, post_validation=True, offload_optimizer=True)
    assert difference(on_ranks(pool, case, 2), reference(case)) is None


def run_all(cases: list[MeshCase]) -> list[Shown]:
    return [run(case) | {"each": None} for case in cases]


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["dp", "optimizer", "gradients", "parameters", "tp"])
def test_replicas_and_shards_change_no_bit(pool: Pool, kind: str) -> None:
    case = MeshCase(kind=kind, n_stages=1, mode="ZBH1", clip=2.7, post_validation=None)
    goes_on = {"halfway": "resume", "offload_optimizer": True}
    cases = [case, replace(case, **goes_on)]
    ranks = zip(*pool.run(run_all, 2, cases), strict=True)
    on_device, on_host = (merged(shown) for shown in ranks)
    assert difference(on_host, on_device) is None


class Norms(torch.optim.SGD):
    """Mixes the elements of a parameter."""


def refuse_shards() -> str:
    mesh = zbpp.mesh(stages=1, data_parallel=2)
    sharded = zbpp.DataParallel(mesh=mesh, shard="parameters")
    optimizer = partial(Norms, lr=0.1)
    how = {"mesh": sharded, "n_stages": None, "offload_optimizer": True}
    return refusal(make, optimizer=optimizer, **how)


@pytest.mark.dist
def test_optimizers_of_whole_parameters_on_shards_are_refused(pool: Pool) -> None:
    for text in pool.run(refuse_shards, 2):
        assert "an optimizer of shards needs whole parameters" in text


def test_offload_without_an_optimizer_is_refused() -> None:
    text = refusal(make, optimizer=None, offload_optimizer=True)
    assert "offload_optimizer is on, but optimizer is None" in text


# ---- 16 bits.


def narrow() -> nn.Sequential:
    return linears().to(torch.bfloat16)


def narrow_batch(step: int) -> tuple[Tensor, Tensor]:
    x, y = batch(step=step)
    return x.bfloat16(), y.bfloat16()


def plain_loop(n_steps: int) -> list[Tensor]:
    """bf16 parameters are rounded masters, which fused AdamW steps."""
    model = narrow()
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = adamw(masters)
    for step in range(n_steps):
        model.zero_grad()
        x, y = narrow_batch(step)
        for inputs, targets in zip(x.chunk(4), y.chunk(4), strict=True):
            (mse_loss(model(inputs), targets) / 4).backward()
        for p, master in zip(model.parameters(), masters, strict=True):
            assert p.grad is not None
            master.grad = p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)
    return [p.detach() for _, p in sorted(model.named_parameters())]


def trained(pipeline: zbpp.Pipeline, steps: range) -> list[Tensor]:
    for step in steps:
        pipeline.step(*narrow_batch(step))
    return [p.detach() for _, p in sorted(pipeline.named_parameters())]


@pytest.mark.parametrize("mode", MODES)
def test_bf16_parameters_have_fp32_masters(mode: str, tmp_path: Path) -> None:
    """They are saved and loaded; without them small steps would be lost."""
    how: dict[str, Any] = {"optimizer": adamw, "post_validation": True}
    first = make(narrow(), mode, offload_optimizer=True, **how)
    trained(first, range(3))
    first.save(tmp_path, wait=True)
    expected = plain_loop(6)
    assert all(map(torch.equal, trained(first, range(3, 6)), expected))
    second = make(narrow(), mode, n_stages=1, offload_optimizer=True, optimizer=adamw)
    second.load(tmp_path)
    assert all(map(torch.equal, trained(second, range(3, 6)), expected))
    on_device = make(narrow(), mode, **how)
    words = refusal(on_device.load, tmp_path)
    assert "saved with offload_optimizer on, and it is off here" in words
    assert not all(map(torch.equal, trained(on_device, range(6)), expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writes_after_synchronize_count(dtype: torch.dtype) -> None:
    """As those to parameters of 32 bits on the device do."""
    pipeline = make(linears().to(dtype), optimizer=adamw, offload_optimizer=True)
    x, y = (value.to(dtype) for value in batch())
    for _ in range(2):
        pipeline.step(x, y)
    named = dict(pipeline.named_parameters())
    for p in named.values():
        p.data.zero_()
    pipeline.step(x, y)
    pipeline.synchronize()
    # AdamW moves by at most some learning rates from what was written
    assert all(p.abs().max() < 0.05 for p in named.values())
