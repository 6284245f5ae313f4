"""The backend of a device, and whose an error is that comes out of a job."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool

from zbpp.core import RequestError
from zbpp.runtime.support.collectives import (
    BrokenCollective,
    backend_of,
    is_broken,
    noting_broken,
)


class Backend:
    def __init__(self, name: str) -> None:
        self._name = name

    def name(self) -> str:
        return self._name


class Group:
    """A process group with a backend for each kind of device, as `init_device_mesh`
    and ``init_process_group("cpu:gloo,cuda:nccl")`` make it."""

    def __init__(self, **backends: str) -> None:
        self._backends = backends

    def _get_backend(self, device: torch.device) -> Backend:
        if device.type not in self._backends:
            raise RuntimeError(f"No backend type associated with {device.type}")
        return Backend(self._backends[device.type])


def test_a_group_of_two_backends_is_asked_for_that_of_the_device() -> None:
    both: Any = Group(cpu="gloo", cuda="nccl", xpu="xccl")
    assert backend_of(both, torch.device("cuda", 1)) == "nccl"
    assert backend_of(both, torch.device("xpu", 0)) == "xccl"
    assert backend_of(both, torch.device("cpu")) == "gloo"
    shared: Any = Group(cpu="gloo", cuda="gloo")
    assert backend_of(shared, torch.device("cuda", 1)) == "gloo"
    of_others: Any = Group(cpu="mpi", cuda="ucc")
    assert backend_of(of_others, torch.device("cuda", 1)) == "gloo"
    assert backend_of(of_others, torch.device("cpu")) == "gloo"


def test_a_group_without_a_backend_for_the_device_is_refused() -> None:
    on_gpus: Any = Group(cuda="nccl")
    with pytest.raises(RequestError, match=r"tensors of cpu: .*init_process_group"):
        backend_of(on_gpus, torch.device("cpu"))


def error_of(action: Callable[[], object]) -> RuntimeError:
    try:
        action()
    except RuntimeError as error:
        return error
    raise AssertionError("no error")


def fail_like_gloo() -> None:
    raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")


def test_an_error_of_a_layer_stays_its_own_whatever_it_says() -> None:
    assert not is_broken(error_of(fail_like_gloo))
    assert not is_broken(RuntimeError("Operation timed out!"))
    assert not is_broken(error_of(lambda: torch.ones(2) @ torch.ones(3)))


def test_an_error_of_a_wait_for_a_collective_is_one() -> None:
    def wait() -> None:
        with noting_broken():
            raise RuntimeError("the words do not matter")

    error = error_of(wait)
    assert isinstance(error, BrokenCollective) and is_broken(error)


def wait_for_a_peer_that_does_not_come() -> list[tuple[str, bool]]:
    """By torch's own call, by a functional collective, and by a handle."""
    import torch.distributed._functional_collectives as functional

    group = dist.new_group(timeout=timedelta(seconds=0.3))
    errors = []
    if dist.get_rank() == 0:
        x = torch.ones(2)

        def by_a_handle() -> None:
            work = dist.all_reduce(x, group=group, async_op=True)
            with noting_broken():
                work.wait()

        calls: list[Callable[[], object]] = [
            lambda: dist.all_reduce(x, group=group),
            lambda: functional.all_reduce(x, "sum", group) + 1,
            by_a_handle,
        ]
        found = [error_of(call) for call in calls]
        errors = [(str(error), is_broken(error)) for error in found]
    dist.barrier()
    return errors


@pytest.mark.dist
def test_a_collective_that_a_peer_does_not_end_is_broken(pool: Pool) -> None:
    errors, _ = pool.run(wait_for_a_peer_that_does_not_come, 2)
    assert len(errors) == 3
    assert all(broken for _, broken in errors), errors
