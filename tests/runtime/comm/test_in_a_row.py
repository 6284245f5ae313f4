"""Pipelines follow each other, or stand beside each other, in the same processes."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from pool import Pool
from small_model import batch, make_pipeline, train

from zbpp.runtime import PeerError
from zbpp.runtime.comm import groups as comm_groups

pytestmark = pytest.mark.dist

N = 3
Losses = list[list[float]]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def join_by_tcp(port: int) -> None:
    """Put a group that meets at a TCPStore in the place of the pool's."""
    rank, n = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, n, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n)


def train_in_a_row(group: dist.ProcessGroup | None, *, closed: bool) -> Losses:
    found = []
    for _ in range(N):
        pipeline = make_pipeline("ZBH1", None, mesh=group, clip_grad_norm=0.3)
        found.append([pipeline.step(*batch(step)).loss for step in range(2)])
        if closed:
            pipeline.close()
    return found


def expected() -> Losses:
    losses = [loss for loss, _ in train("1F1B", 1, steps=2, clip_grad_norm=0.3)[0]]
    return [losses] * N


def run_world(port: int | None, closed: bool) -> Losses:
    if port is not None:
        join_by_tcp(port)
    found = train_in_a_row(None, closed=closed)
    dist.barrier()  # rank 0 serves the store
    return found


@pytest.mark.parametrize(
    ("store", "closed"),
    [
        pytest.param("file", False, id="dropped"),
        pytest.param("tcp", True, id="closed, tcp", marks=pytest.mark.slow),
    ],
)
def test_pipelines_in_a_row(pool: Pool, store: str, closed: bool) -> None:
    port = free_port() if store == "tcp" else None
    assert pool.run(run_world, 2, port, closed) == [expected()] * 2


def run_in_two_of_three() -> Losses:
    """Rank 1 only makes the group, as torch wants it, and then waits at the end."""
    group = dist.new_group([0, 2])
    found: Losses = []
    if dist.get_rank() != 1:
        found = train_in_a_row(group, closed=True)
    dist.barrier()
    return found


@pytest.mark.slow
def test_pipelines_in_a_row_in_a_subgroup_while_others_do_nothing(pool: Pool) -> None:
    assert pool.run(run_in_two_of_three, 3) == [expected(), [], expected()]


@contextmanager
def own_channels() -> Iterator[None]:
    """A group for each channel, as with NCCL; gloo serves them here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm_groups, "has_tags", lambda backend: False)
        yield


def run_beside_each_other() -> tuple[Losses, int]:
    """Pipelines of even and of odd ranks; their counts of groups differ."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    half = dist.get_rank() % 2
    if half:
        dist.new_group([1, 3], use_local_synchronization=True)
    with own_channels():
        found = train_in_a_row(groups[half], closed=True)
        pipeline = make_pipeline("ZBH1", None, mesh=groups[half])
        return found, len(pipeline.stages.transport._groups.opened())


@pytest.mark.slow
def test_pipelines_beside_each_other(pool: Pool) -> None:
    assert pool.run(run_beside_each_other, 4) == [(expected(), 3)] * 4


def train_v_with_own_channels() -> Losses:
    with own_channels():
        return [[loss for loss, _ in train("ZBV", None, clip_grad_norm=0.3)[0]]]


@pytest.mark.slow
def test_own_channels_in_a_chain_of_three(pool: Pool) -> None:
    plain = [[loss for loss, _ in train("1F1B", 1, clip_grad_norm=0.3)[0]]]
    assert pool.run(train_v_with_own_channels, 3) == [plain] * 3


def fail_and_build_again() -> Losses:
    """A failed step leaves the caller's group, and the processes, as they were."""
    rank = dist.get_rank()
    pipeline = make_pipeline("ZBH1", None)
    inputs, targets = batch(0)
    with pytest.raises(IndexError if rank == 0 else PeerError):
        pipeline.step(inputs + 100, targets)
    return train_in_a_row(None, closed=True)


def test_a_failed_pipeline_may_be_followed_by_another(pool: Pool) -> None:
    assert pool.run(fail_and_build_again, 2) == [expected()] * 2
