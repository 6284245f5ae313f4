"""Pipelines in processes: their devices, who takes part, one after another, the end."""

import gc
import os
import time
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from faulty_training import batch, make
from pool import Pool
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zbpp
from zbpp.core import RequestError
from zbpp.runtime import PeerError

Losses = list[float]


def losses_of(n_stages: int | None, mode: str = "ZBH1", **more: Any) -> Losses:
    with make(mode, n_stages, **more) as pipeline:
        return [pipeline.step(*batch(step)).loss for step in range(2)]


def train_in_groups() -> list[Losses]:
    """Two pipelines at the same time, then one while the others do nothing."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    half = dist.get_rank() % 2
    mesh = DeviceMesh.from_group(groups[half], "cpu", mesh_dim_names=("pp",))
    found = [losses_of(None, mesh=mesh)]
    if half:
        found.append(losses_of(None, "ZBV", mesh=mesh))
    dist.barrier()
    return found


@pytest.mark.dist
def test_two_pipelines_train_in_separate_groups(pool: Pool) -> None:
    first, second, *_ = pool.run(train_in_groups, 4)
    assert first == [losses_of(1)] and second == [losses_of(1)] * 2


def fail_and_go_on() -> Losses:
    """A failed step leaves the caller's group, and the processes, as they were."""
    pipeline = make("ZBH1", None)
    x, y = batch(0)
    with pytest.raises(RuntimeError if pipeline.rank == 0 else PeerError):
        pipeline.step(x[..., 1:], y)
    return losses_of(None)


@pytest.mark.dist
def test_a_failed_pipeline_may_be_followed_by_another(pool: Pool) -> None:
    assert pool.run(fail_and_go_on, 2) == [losses_of(1)] * 2


def n_threads() -> int:
    gc.collect()
    return psutil.Process().num_threads()


def count_threads(closes: bool) -> list[tuple[int, int]]:
    """Threads of this process with a pipeline and after it, three times."""
    counts: list[tuple[int, int]] = []
    for _ in range(3):
        pipeline = make("ZBV", None)
        pipeline.step(*batch(0))
        pipeline.synchronize()
        during = n_threads()
        if closes:
            pipeline.close()
        del pipeline
        until = time.monotonic() + 5
        while n_threads() >= during and time.monotonic() < until:
            time.sleep(0.01)
        counts.append((during, n_threads()))
    return counts


@pytest.mark.dist
@pytest.mark.parametrize("closes", [True, False])
def test_a_deleted_pipeline_leaves_no_thread(pool: Pool, closes: bool) -> None:
    """One that lets go of a tensor while Python ends aborts the process."""
    for (_, first), *_, (during, last) in pool.run(count_threads, 2, closes):
        assert last <= first < during


def needs() -> tuple[bool, bool, float]:
    pipeline = make("ZBV", None)
    x, y = batch(0)
    result = pipeline.step(
        x if pipeline.needs_inputs else None, y if pipeline.needs_targets else None
    )
    return pipeline.needs_inputs, pipeline.needs_targets, result.loss


@pytest.mark.dist
def test_only_stages_that_need_a_batch_read_it(pool: Pool) -> None:
    loss = losses_of(1)[0]  # a V turns back to rank 0
    assert pool.run(needs, 2) == [(True, True, loss), (False, False, loss)]


class Moved(Exception):
    pass


class Asks(nn.Linear):
    """Records the device to which it is moved."""

    def to(self, device: Any, *_: Any, **__: Any) -> Any:
        raise Moved(str(device))

    _apply = to


def device_of(asked: Any) -> str:
    with pytest.raises((Moved, RequestError)) as chosen:
        zbpp.Pipeline(
            [Asks(2, 2)], "1F1B", loss_fn=nn.MSELoss(), optimizer=None,
            n_stages=1, n_microbatches=1, device=asked,
        )  # fmt: skip
    return str(chosen.value)


@pytest.mark.parametrize(
    ("kind", "n", "current", "local_rank", "asked", "device"),
    [
        ("cuda", 2, None, "1", "cuda", "cuda:1"),
        ("cuda", 2, None, "1", None, "cuda:1"),
        ("cuda", 2, None, "1", "cuda:0", "cuda:0"),
        ("cuda", 2, None, "1", "cpu", "cpu"),
        # each process sees its device alone, as under Slurm and Ray
        ("cuda", 1, None, "3", None, "cuda:0"),
        # the script has made one current
        ("cuda", 2, 1, "", "cuda", "cuda:1"),
        ("xpu", 2, None, "3", "cuda", "device cuda: torch finds none here"),
        ("cuda", 0, None, "", None, "cpu"),
        ("cuda", 0, None, "", "cuda", "device cuda: torch finds none here"),
    ],
)
def test_each_process_chooses_its_device(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    n: int,
    current: int | None,
    local_rank: str,
    asked: Any,
    device: str,
) -> None:
    accelerator = {
        "current_accelerator": lambda: torch.device(kind),
        "is_available": lambda: n > 0,
        "device_count": lambda: n,
        "current_device_index": lambda: current,
        "set_device_index": lambda index: None,
    }
    for name, function in accelerator.items():
        monkeypatch.setattr(torch.accelerator, name, function)
    monkeypatch.setattr(
        torch.get_device_module(kind), "is_initialized", lambda: current is not None
    )
    monkeypatch.setitem(os.environ, "LOCAL_RANK", local_rank or "0")
    assert device_of(asked).startswith(device)


def test_a_pipeline_and_its_result_can_be_printed() -> None:
    with make("ZBH1", 2) as pipeline:
        result = pipeline.step(*batch(0))
        assert repr(pipeline) == (
            "<zbpp.Pipeline: ZBH1, 8 layers, 2 stages (here 0, 1), 4 micro-batches, "
            "1 steps done>"
        )
    assert str(result) == (
        f"StepResult(loss={result.loss:.6g}, grad_norm={result.grad_norm:.6g}, "
        "skipped=False, rollbacks=0)"
    )
