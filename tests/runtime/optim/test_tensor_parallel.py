"""Stages whose layers are cut over a mesh of their own: sharded parameters, full norms.

The pipeline is told of a group of stages, and of no mesh.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from flat import flat_pipeline
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
from pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

N_STEPS, CLIP = 6, 0.9  # as those of `train_plainly`


def train_sharded(mode: str, snapshots: bool, validated: bool) -> Any:
    """Results, and all parameters of this process, made full.

    Ranks 0 and 1 share the first stage, 2 and 3 the second one.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    with (
        flat_pipeline(
            cut_over(layers(), mesh["tp"]),
            loss_fn=loss_fn,
            optimizer=adamw,
            schedule=mode,
            n_microbatches=N_MICROBATCHES,
            clip_grad_norm=CLIP,
            snapshots=snapshots,
            post_validation=validated,
            mesh=mesh["pp"].get_group(),
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


def see_forwards() -> bool:
    """True if neighbours along ``tp`` have seen the same in all their forwards.

    Every step is clipped. One neighbour could tell by itself, as it counts the plain
    gradients, and the other one has none to count.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    seen = []

    def look(_: nn.Module, __: tuple[Tensor], output: Tensor) -> None:
        both = torch.zeros(2)
        both[mesh["tp"].get_local_rank()] = output.detach().sum()
        dist.all_reduce(both, group=mesh["tp"].get_group())
        seen.append(bool(both[0] == both[1]))

    *blocks, last = cut_over(layers(), mesh["tp"])
    for block in blocks:
        block.norm.register_forward_hook(look)
        for dealt in (block.up, block.down):
            dealt.requires_grad_(False)
    with flat_pipeline(
        [*blocks, last],
        loss_fn=loss_fn,
        optimizer=adamw,
        schedule="ZBH1",
        n_microbatches=N_MICROBATCHES,
        clip_grad_norm=1e-3,
        post_validation=True,
        mesh=mesh,
        timeout_s=100,
    ) as pipeline:
        results = [pipeline.step(*batch(step)) for step in range(4)]
        assert [x.rollbacks for x in results] == [1] * 4
    return all(seen)


@pytest.mark.dist
def test_neighbours_compute_the_same_before_a_rollback(pool: Pool) -> None:
    """A layer may choose by it what it communicates, as a router does."""
    assert all(pool.run(see_forwards, 4))
