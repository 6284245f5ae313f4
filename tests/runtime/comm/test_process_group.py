"""The device of a process, the backend of all, and who has not come."""

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from flat import flat_pipeline

import zbpp
from zbpp.core import RequestError
from zbpp.pipeline import Pipeline
from zbpp.runtime import PeerError
from zbpp.runtime.comm.process_group import backend_for, call_roll
from zbpp.runtime.support.devices import own_device


def play_gpus(monkeypatch: pytest.MonkeyPatch, module: Any, n: int) -> None:
    kind = torch.device(module.__name__.removeprefix("torch."))
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: kind)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: n)
    monkeypatch.setattr(module, "is_initialized", lambda: False)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Two GPUs that nobody has used yet."""
    play_gpus(monkeypatch, torch.cuda, 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    return monkeypatch


@pytest.mark.parametrize(
    ("asked", "device"),
    [
        ("cuda", "cuda:1"),
        (torch.device("cuda"), "cuda:1"),
        (None, "cuda:1"),
        ("cuda:0", "cuda:0"),
        ("cpu", "cpu"),
    ],
)
def test_cuda_without_a_number_is_the_gpu_of_the_process(
    gpus: pytest.MonkeyPatch, asked: Any, device: str
) -> None:
    assert str(own_device(asked)) == device


def test_a_process_that_sees_its_own_gpu_alone_uses_it(
    gpus: pytest.MonkeyPatch,
) -> None:
    """As CUDA_VISIBLE_DEVICES is set under Slurm and Ray: no CPU, and no GPU 3."""
    gpus.setattr("torch.accelerator.device_count", lambda: 1)
    gpus.setenv("LOCAL_RANK", "3")
    assert str(own_device()) == "cuda:0"


def test_a_gpu_that_the_script_has_made_current_is_used(
    gpus: pytest.MonkeyPatch,
) -> None:
    gpus.delenv("LOCAL_RANK")
    gpus.setattr("torch.cuda.is_initialized", lambda: True)
    gpus.setattr("torch.accelerator.current_device_index", lambda: 1)
    assert str(own_device("cuda")) == "cuda:1"


def test_without_a_gpu_it_is_the_cpu_unless_one_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    assert str(own_device()) == "cpu"
    for kind in ("cuda", "xpu"):
        with pytest.raises(RequestError, match=f"device {kind}: torch finds none"):
            own_device(kind)
    with pytest.raises(RequestError, match="torch finds none"):
        Pipeline([torch.nn.Linear(2, 2)], optimizer=None, device="cuda")


def test_any_accelerator_is_taken_under_its_own_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play_gpus(monkeypatch, torch.xpu, 2)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert str(own_device()) == str(own_device("xpu")) == "xpu:1"
    with pytest.raises(RequestError, match="device cuda: torch finds none"):
        own_device("cuda")
    assert backend_for(["a", "b"], "xpu") == "xccl"


def test_processes_that_share_a_gpu_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert backend_for(["a", "b"], "cuda") == "nccl" and not caplog.records
    assert backend_for(["a", "", "c"], "cuda") == "gloo" and not caplog.records
    assert backend_for(["a", "b", "a"], "cuda") == "gloo"
    assert "3 processes share 2 GPUs" in caplog.text


def test_processes_that_do_not_come_are_named() -> None:
    store = dist.HashStore()
    store.set("gpu_of_1", "")
    with pytest.raises(PeerError, match=r"rank 0 .* ranks 2, 3: no answer in 0.01 s"):
        call_roll(store, 0, 4, "", timeout_s=0.01)


def test_all_that_come_learn_of_all() -> None:
    store, found = dist.HashStore(), {}

    def come(rank: int) -> None:
        found[rank] = call_roll(store, rank, 3, f"gpu {rank}", timeout_s=100.0)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(found.values()) == [["gpu 0", "gpu 1", "gpu 2"]] * 3


@pytest.mark.parametrize(
    ("more", "first_s", "then_s"),
    [
        ({}, 600.0, 600.0),
        ({"timeout_s": 8.0}, 8.0, 8.0),
        ({"timeout_s": 8.0, "first_timeout_s": 90.0}, 90.0, 8.0),
    ],
)
def test_a_stage_waits_as_long_as_it_was_told_from_the_start_on(
    monkeypatch: pytest.MonkeyPatch,
    more: dict[str, Any],
    first_s: float,
    then_s: float,
) -> None:
    """Ten minutes unless it is told, as NCCL: also for what comes behind step 1."""
    limits: dict[str, Any] = {}

    class Reached(Exception):
        pass

    def make(*_: object, execution: zbpp.Execution, **__: object) -> None:
        limits["then"] = execution.timeout_s
        limits["first"] = execution.start_timeout_s
        raise Reached

    monkeypatch.setattr(
        "zbpp.pipeline.arguments.initialise",
        lambda *_, timeout_s: limits.update(start=timeout_s),
    )
    monkeypatch.setattr("zbpp.pipeline.pipeline.make_transports", make)
    layers = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    with pytest.raises(Reached):
        flat_pipeline(
            layers,
            optimizer=None,
            loss_fn=torch.nn.functional.mse_loss,
            n_stages=2,
            n_microbatches=2,
            **more,
        )
    assert limits == {"start": first_s, "first": first_s, "then": then_s}
