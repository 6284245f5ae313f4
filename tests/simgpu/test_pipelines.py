"""Pipelines of one process on the simulated device: same bits, no race, no wait.

The reference of a case is FThenB on one stage of the same device: its kernels may
differ from the CPU's, as a GPU's do. Processes: `test_processes.py`.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from gpu_waits import waits_are_errors
from small_model import N_LAYERS, adamw, assert_same, batch, build, make_pipeline
from torch import Tensor, nn
from zoo import Checkpointed

import simgpu
from simgpu.jobs import name_jobs
from zbpp import plan

name_jobs()

MODES = ("1F1B", "ZBH1", "ZBH2", "ZBV", "VPP", "VHalf")
Outcome = tuple[list[float], dict[str, Tensor]]


class In16Bits(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            result: Tensor = self.inner(x)
        return result.float()


class Buffered(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.norm = inner, nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.inner(x))
        return result


def with_blocks(change: Callable[[nn.Module], nn.Module]) -> Callable[..., Any]:
    """The small model, its middle layers changed."""

    def built(layers: range) -> list[nn.Module]:
        return [
            change(layer) if 0 < index < N_LAYERS - 1 else layer
            for index, layer in zip(layers, build(layers), strict=True)
        ]

    return built


def with_dropout(layers: range) -> list[nn.Module]:
    return build(layers, dropout=0.3)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, fused=True)


CASES: dict[str, dict[str, Any]] = {
    "rolled back": {"clip_grad_norm": 0.5, "post_validation": True},
    "barrier": {"clip_grad_norm": 0.5, "post_validation": False},
    "fused, scaled": {"optimizer": fused, "loss_scale": 8.0},
    "snapshot": {
        "clip_grad_norm": 0.5,
        "post_validation": True,
        "snapshots": True,
    },
    "checkpoint": {"model": with_blocks(Checkpointed)},
    "autocast": {"model": with_blocks(In16Bits)},
    "all in 16 bits": {"autocast": torch.bfloat16},
    "recompute": {"recompute": "all"},
    "buffers": {"model": with_blocks(Buffered)},
    "dropout": {"model": with_dropout, "seed": 3},
    "tied ends": {"ties": [((0, "weight"), (N_LAYERS - 1, "weight"))]},
    "tokens": {"weigh": "tokens"},
}


def trained(mode: str, n_stages: int, folder: Any = None, **more: Any) -> Outcome:
    """Six steps in two pipelines, the second of which loads; losses and parameters."""
    settings = {"optimizer": adamw, "device": simgpu.DEVICE} | more
    pipeline = make_pipeline(mode, n_stages, **settings)
    results = [pipeline.step(*batch(step)) for step in range(4)]
    numbers = [x for one in results for x in (one.loss, one.grad_norm)]
    numbers.append(pipeline.evaluate(*batch(99, samples=7), n_microbatches=3))
    numbers.append(float(pipeline.predict(batch(98)[0]).sum()))
    if folder is not None:
        pipeline.save(folder / mode)
        pipeline.close()
        pipeline = make_pipeline(mode, n_stages, **settings)
        pipeline.load(folder / mode)
    for step in (4, 5):
        result = pipeline.step(*batch(step))
        numbers += [result.loss, result.grad_norm]
    parameters = {n: p.detach().cpu() for n, p in pipeline.named_parameters()}
    pipeline.close()
    return numbers, parameters


@cache
def reference(case: str) -> Outcome:
    simgpu.begin("eager")
    outcome = trained("FThenB", 1, **CASES[case])
    assert simgpu.reports() == []
    return outcome


def check(case: str, mode: str, policy: str, seed: int, **how: Any) -> None:
    numbers, parameters = reference(case)
    simgpu.begin(policy, seed)
    found = trained(mode, 2, **(CASES[case] | how))
    where = (case, mode, how, policy, seed)
    assert simgpu.reports() == [], where
    assert found[0] == numbers, where
    assert_same(found[1], parameters)


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_one_stage(case: str, turn: int) -> None:
    """Each case with half of the modes; `test_many_seeds` has the others."""
    mode = MODES[2 * turn + list(CASES).index(case) % 2]
    check(case, mode, "random", 1)


@pytest.mark.parametrize("mode", ["1F1B", "ZBV"])
def test_a_pipeline_that_loads_goes_on(mode: str, tmp_path: Any) -> None:
    numbers, parameters = reference("rolled back")
    simgpu.begin("random", 4)
    found = trained(mode, 2, tmp_path, **CASES["rolled back"])
    assert found[0] == numbers and simgpu.reports() == []
    assert_same(found[1], parameters)


def test_a_switch_changes_no_bit() -> None:
    def run(switches: bool) -> list[float]:
        simgpu.begin("random", 5)
        pipeline = make_pipeline(
            "ZBH1", 2, optimizer=adamw, device=simgpu.DEVICE,
            clip_grad_norm=0.5, post_validation=True,
        )  # fmt: skip
        losses = [pipeline.step(*batch(0)).loss]
        if switches:
            pipeline.switch(plan("1F1B", n_stages=2, n_microbatches=6))
        losses += [pipeline.step(*batch(step)).loss for step in (1, 2)]
        assert simgpu.reports() == []
        return losses

    assert run(True) == run(False)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # torch's wait
@pytest.mark.parametrize("mode", ["1F1B", "ZBH1", "ZBV"])
def test_each_step_may_be_called_under_another_stream(mode: str) -> None:
    """As long as the caller orders them, as for every other work of torch's."""

    def run(changes: bool) -> list[float]:
        simgpu.begin("random", 8)
        pipeline = make_pipeline(
            mode, 2, optimizer=adamw, device=simgpu.DEVICE, clip_grad_norm=0.5,
            post_validation=True,
        )  # fmt: skip
        losses, here = [], torch.cuda.current_stream()
        for step in range(4):
            stream = torch.cuda.Stream() if changes else here
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                losses.append(pipeline.step(*batch(step)).loss)
            here = stream
        torch.cuda.current_stream().wait_stream(here)
        parameters = [p.detach() for _, p in pipeline.named_parameters()]
        losses.append(float(sum(p.sum() for p in parameters)))
        assert simgpu.reports() == []
        with torch.cuda.stream(here):
            pipeline.step(*batch(4))
        with torch.cuda.stream(torch.cuda.Stream()):
            sum(p.sum() for p in parameters)
        assert simgpu.reports(), "the control: nothing orders these two streams"
        return losses

    assert run(True) == run(False)


@pytest.mark.parametrize("how", [{}, {"recompute": "all"}], ids=str)
@pytest.mark.parametrize("mode", ["1F1B", "ZBH1", "VPP"])
def test_the_host_waits_for_the_sum_of_the_norms_only(
    mode: str, how: dict[str, Any]
) -> None:
    simgpu.begin("random", 6)
    pipeline = make_pipeline(
        mode, 2, optimizer=fused, device=simgpu.DEVICE, clip_grad_norm=0.5, **how
    )
    for step in range(3):
        pipeline.step(*batch(step))
    before = simgpu.waits()
    with waits_are_errors():
        for step in range(3, 6):
            pipeline.step(*batch(step))
    waits = simgpu.waits_since(before)
    jobs = {job.split()[0] for _, job, _ in waits}
    lines = {line.split()[-1] for _, _, line in waits}
    assert jobs <= {"O", "V"} and lines <= {"read"}, waits
    assert simgpu.reports() == []
    pipeline.close()


def test_a_layer_that_waits_is_seen() -> None:
    """The control of the test above."""

    class Waiting(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            x.sum().item()
            result: Tensor = self.inner(x)
            return result

    simgpu.begin()
    pipeline = make_pipeline(
        "1F1B", 2, optimizer=adamw, device=simgpu.DEVICE, model=with_blocks(Waiting)
    )
    pipeline.step(*batch(0))
    assert any(what == "item" and "F0" in job for what, job, _ in simgpu.waits())
    with (
        waits_are_errors(),
        pytest.raises(RuntimeError, match="synchronizing"),
    ):
        pipeline.step(*batch(1))


@pytest.mark.parametrize("mode", ["1F1B", "ZBV"])
def test_steps_leave_nothing_behind(mode: str) -> None:
    simgpu.begin("random", 7)
    pipeline = make_pipeline(mode, 2, optimizer=adamw, device=simgpu.DEVICE)
    sizes = []
    for step in range(6):
        pipeline.step(*batch(step))
        pipeline.synchronize()
        torch.cuda.synchronize()
        sizes.append(len(simgpu.live()))
    assert sizes[3:] == [sizes[2]] * 3, sizes
    pipeline.close()


@pytest.mark.parametrize("mode", ["1F1B", "ZBV"])
def test_one_seed_gives_one_run(mode: str) -> None:
    def run(seed: int) -> int:
        simgpu.begin("random", seed)
        trained(mode, 2, **CASES["rolled back"])
        return simgpu.digest()

    run(1)  # what is done once in a process, such as finding what a call returns
    assert run(1) == run(1)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_many_seeds(mode: str) -> None:
    """The cases take turns, so that each meets every mode, and seeds of its own."""
    for seed, case in enumerate([*CASES][(MODES.index(mode) + 1) % 2 :: 2]):
        check(case, mode, "random", seed)
    check("rolled back", mode, "eager", 0)
