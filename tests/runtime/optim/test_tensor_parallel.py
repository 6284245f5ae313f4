"""Stages whose layers are cut over a mesh of their own: sharded parameters, full norms.

The pipeline is told of a group of stages, and of no mesh.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from flat import flat_pipeline
from histories import ALWAYS
from mesh_runs import (
    N_MICROBATCHES,
    adamw,
    batch,
    cut_over,
    layers,
    loss_fn,
    train_plainly,
    whole,
)
from moments import uncertain_sums
from pool import Pool
from torch.distributed.device_mesh import init_device_mesh

N_STEPS, CLIP = 6, 0.9  # as those of `train_plainly`


def train_sharded(mode: str, snapshots: bool, validated: bool) -> Any:
    """Results, and all parameters of this process, made full.

    Ranks 0 and 1 share the first stage, 2 and 3 the second one.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    with (
        uncertain_sums(0, share=0),
        flat_pipeline(
            cut_over(layers(), mesh["tp"]),
            loss_fn=loss_fn,
            optimizer=adamw,
            schedule=mode,
            n_microbatches=N_MICROBATCHES,
            clip_grad_norm=CLIP,
            patience=ALWAYS,
            snapshots=snapshots,
            post_validation=validated,
            group=mesh["pp"].get_group(),
            timeout_s=100,
        ) as pipeline,
    ):
        results = [pipeline.step(*batch(step)) for step in range(N_STEPS)]
        held = whole(pipeline)
    dist.barrier()
    return (
        [(x.loss, x.grad_norm) for x in results],
        [x.rollbacks for x in results],
        held,
    )


@pytest.mark.dist
@pytest.mark.parametrize(
    ("mode", "snapshots"),
    [("ZBH1", False), pytest.param("ZBV", True, marks=pytest.mark.slow)],
)
def test_sharded_stages(pool: Pool, mode: str, snapshots: bool) -> None:
    results, expected, _ = train_plainly(N_STEPS)
    clipped = [int(norm > CLIP) for _, norm in results]
    assert 0 < sum(clipped) < N_STEPS
    answers = pool.run(train_sharded, 4, mode, snapshots, True)
    barrier = pool.run(train_sharded, 4, mode, snapshots, False)
    for (found, rollbacks, ours), (_, none, theirs) in zip(
        answers, barrier, strict=True
    ):
        assert found == [pytest.approx(own, rel=1e-5) for own in results]
        assert rollbacks == clipped and not any(none)
        for name, value in ours.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)
            assert torch.equal(value, theirs[name]), name
