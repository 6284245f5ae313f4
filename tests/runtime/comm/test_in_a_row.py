"""Pipelines follow each other, or stand beside each other, in the same processes."""

import socket

import pytest
import torch.distributed as dist
from pool import Pool
from small_model import batch, make_pipeline, train

from zbpp.runtime.comm import groups as comm_groups
from zbpp.runtime.comm.groups import has_tags
from zbpp.runtime.support.errors import PeerError

pytestmark = pytest.mark.dist

N = 6
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
        pipeline = make_pipeline("ZBH1", None, group=group, clip_grad_norm=0.3)
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


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "dropped"])
@pytest.mark.parametrize("store", ["file", pytest.param("tcp", marks=pytest.mark.slow)])
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


def run_beside_each_other(own_channels: bool) -> tuple[Losses, int]:
    """Pipelines of even and of odd ranks; their counts of groups differ.

    With channels of their own, as with NCCL; gloo serves them here.
    """
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    half = dist.get_rank() % 2
    if half:
        dist.new_group([1, 3], use_local_synchronization=True)
    if own_channels:
        comm_groups.has_tags = lambda backend: False
    try:
        found = train_in_a_row(groups[half], closed=True)
        pipeline = make_pipeline("ZBH1", None, group=groups[half])
        (executor,) = pipeline.stages.executors.values()
        return found, len(executor.transport._groups.opened())
    finally:
        comm_groups.has_tags = has_tags


@pytest.mark.parametrize(
    ("own_channels", "n_groups"),
    [pytest.param(*x, marks=pytest.mark.slow) for x in ((False, 1), (True, 3))],
)
def test_pipelines_beside_each_other(
    pool: Pool, own_channels: bool, n_groups: int
) -> None:
    results = pool.run(run_beside_each_other, 4, own_channels)
    assert results == [(expected(), n_groups)] * 4


def train_v_with_own_channels() -> Losses:
    comm_groups.has_tags = lambda backend: False
    try:
        return [[loss for loss, _ in train("ZBV", None, clip_grad_norm=0.3)[0]]]
    finally:
        comm_groups.has_tags = has_tags


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
    plain = [loss for loss, _ in train("1F1B", 1, steps=2, clip_grad_norm=0.3)[0]]
    assert pool.run(fail_and_build_again, 2) == [[plain] * N] * 2
