"""Tensor parallelism inside stages, two-level sharding, 16-bit parameters, requests."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from mesh_runs import Found, layers, loss_fn, train_all, train_plainly
from pool import Pool
from small_model import refusal
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zbpp
from zbpp.runtime.comm.stage_group import StageGroup

pytestmark = pytest.mark.dist


def assert_close(
    runs: list[list[Found]], steps: int, *, tolerance: float = 1e-5
) -> None:
    """Every run on every rank is the plain loop's, and all runs have the same bits."""
    results, plain, _ = train_plainly(steps)
    first: dict[str, torch.Tensor] = {}
    for at_rank in runs:
        for found in at_rank:
            for own, (loss, norm) in zip(found.results, results, strict=True):
                assert own == pytest.approx((loss, norm), rel=tolerance)
            for name, value in found.parameters.items():
                torch.testing.assert_close(
                    value.float(), plain[name], rtol=tolerance, atol=tolerance
                )
                assert torch.equal(value, first.setdefault(name, value)), name


def test_a_mesh_of_one_process_needs_no_launcher() -> None:
    assert not dist.is_initialized()
    try:
        assert zbpp.mesh(stages=1).size() == 1
    finally:
        dist.destroy_process_group()


def test_layers_wrapped_over_one_process(pool: Pool) -> None:
    """Nothing is sharded, and still `fully_shard` hands the gradients on."""
    more = {"data_parallel": 1, "steps": 3}
    hows = ("bare", "kept", "resharded", "replicate")
    runs = pool.run(train_all, 2, [("ZBV", how, more) for how in hows])
    assert_close(runs, 3)
    assert len({str(found.results) for at_rank in runs for found in at_rank}) == 1


@pytest.mark.slow
def test_two_by_two_by_two(pool: Pool) -> None:
    more = {"tensor_parallel": 2, "steps": 3}
    cases = [(mode, "kept", more) for mode in ("1F1B", "ZBH1", "ZBV")]
    runs = pool.run(train_all, 8, cases)
    assert_close(runs, 3)
    assert len({str(found.results) for at_rank in runs for found in at_rank}) == 1


@pytest.mark.slow
def test_tied_weights_of_replicas(pool: Pool) -> None:
    cases = [(mode, "bare", {"tied": True, "steps": 3}) for mode in ("ZBH1", "ZBV")]
    results, plain, _ = train_plainly(3, tied=True)
    for at_rank in pool.run(train_all, 4, cases):
        for found in at_rank:
            assert found.results == [pytest.approx(own, rel=1e-5) for own in results]
            for name, value in found.parameters.items():
                own = plain.get(name, plain["layers.0.weight"])
                torch.testing.assert_close(value, own, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_shards_within_groups_of_replicas(pool: Pool) -> None:
    more: dict[str, Any] = {"stages": 1, "data_parallel": 4, "replicate": 2, "steps": 3}
    cases = [("1F1B", "kept", more), ("ZBH1", "kept", more), ("ZBH1", "bare", more)]
    runs = pool.run(train_all, 4, cases)
    assert_close([found[:2] for found in runs], 3)
    assert_close([found[2:] for found in runs], 3)  # summed in another order


@pytest.mark.slow
def test_parameters_of_16_bits_whose_sums_have_32(pool: Pool) -> None:
    """Every micro-batch is widened before the next one is added, under every mode."""
    more = {"bf16": True, "steps": 3}
    cases = [(mode, "resharded", more) for mode in ("ZBV", "1F1B")]
    runs = pool.run(train_all, 4, [*cases, ("VPP", "kept", more)])
    assert_close(runs, 3, tolerance=5e-2)


def requests() -> dict[str, str]:
    """Refusals of what cannot run on 2 x 2 processes."""
    how: dict[str, Any] = {"loss_fn": loss_fn, "optimizer": None, "n_microbatches": 4}
    mesh = zbpp.mesh(stages=2, data_parallel=2)
    said = {"size": refusal(zbpp.mesh, stages=3)}
    said["stages"] = refusal(zbpp.Pipeline, layers(), mesh=mesh, n_stages=4, **how)
    every = zbpp.DataParallel(mesh=mesh, shard="all")
    said["shard"] = refusal(zbpp.Pipeline, layers(), mesh=every, **how)
    ddp = [
        DistributedDataParallel(x, process_group=mesh.get_group("dp")) for x in layers()
    ]
    said["ddp"] = refusal(zbpp.Pipeline, ddp, mesh=mesh, **how)
    for name, wrap in {"fully_shard": fully_shard, "replicate": replicate}.items():
        made = [wrap(x, mesh=mesh["dp"]) for x in layers()]
        said[name] = refusal(zbpp.Pipeline, made, n_stages=4, **how)
    odd = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "xp"))
    said["names"] = refusal(zbpp.Pipeline, layers(), mesh=odd, **how)
    return said


def test_requests_are_refused_with_a_way_out(pool: Pool) -> None:
    every = pool.run(requests, 4)
    for name, words in {
        "size": "there are 4; start as many",
        "stages": "give it a dimension 'pp' of 4",
        "shard": "choose one of 'none', 'optimizer'",
        "ddp": "wrap them by `replicate`",
        "fully_shard": "mesh=mesh",
        "replicate": "mesh=mesh",
        "names": "a pipeline knows ('pp', 'dp'",
    }.items():
        assert all(words in said[name] for said in every), name


def test_parts_are_counted_by_one_of_those_that_hold_them() -> None:
    place = {"dp_replicate": 0, "dp_shard": 1, "tp": 1}
    peers = StageGroup(3, 8, (0, 2, 4, 6), (0, 2, 4, 6), place)
    assert peers.owns(("dp_shard", "tp"))
    assert not peers.owns(("dp_shard",)) and not peers.owns(())
    assert peers.has_dims(("tp",)) and not peers.has_dims(("ep",))
    table = peers.scatter_into_table(torch.ones(2)).view(8, 2)
    assert table.sum(1).tolist() == [0, 0, 0, 2, 0, 0, 0, 0]
