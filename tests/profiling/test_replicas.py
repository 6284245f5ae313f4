"""A profile of replicas: the times of their collectives, and what they tell a plan."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from mesh_runs import N_LAYERS, adamw, batch, layers, loss_fn
from pool import Pool

import zbpp
from zbpp.core import Placement
from zbpp.planning.replicas import with_replicas

LATE_MS = 30.0


def profile_replicas() -> dict[str, Any]:
    """Profiles with nothing in parts and with something; gathers are late."""
    mesh = zbpp.mesh(stages=2, data_parallel=2)
    pipeline = zbpp.Pipeline(
        layers(), loss_fn=loss_fn, optimizer=adamw, schedule="ZBH1", n_microbatches=2,
        mesh=mesh,
    )  # fmt: skip
    operation = dist.all_gather_into_tensor

    def slow(*args: Any, **more: Any) -> Any:
        time.sleep(LATE_MS / 1e3)
        return operation(*args, **more)

    x, y = batch(0, 4)
    before = pipeline.step(x, y).loss
    dist.all_gather_into_tensor = slow
    try:
        found = {
            shard: pipeline.profile(x, y, rounds=1, most_s=1, shard=shard)
            for shard in ("none", "parameters")
        }
    finally:
        dist.all_gather_into_tensor = operation
    after = pipeline.step(x, y).loss
    pipeline.close()
    return {**found, "trains on": after < before}


@pytest.mark.dist
def test_gathers_and_sums_are_measured(pool: Pool) -> None:
    for answer in pool.run(profile_replicas, 4):
        assert answer["trains on"]
        whole, parts = answer["none"], answer["parameters"]
        assert not any(whole.collectives["all_gather"])
        assert all(whole.collectives["reduce_scatter"])
        gathers, sums = (parts.collectives[k] for k in ("all_gather", "reduce_scatter"))
        assert len(gathers) == len(sums) == N_LAYERS
        assert all(one >= LATE_MS for one in gathers) and all(sums)
        costs = parts.costs(Placement.single(2), (3, 5))
        assert costs.all_gather == pytest.approx((sum(gathers[:3]), sum(gathers[3:])))
        told = replace(parts.layers, parameters=1e3, replica_bandwidth=1e3)
        assert all(with_replicas(told, 4, "optimizer").of("all_gather"))
