"""A process's shards of DTensors are stepped, and rolled back, as torch steps them."""

from typing import Any

import pytest
import torch
from histories import bytes_of
from pool import Pool
from torch import Tensor, nn

from zbpp.runtime.optim.rollback import DeferredStep
from zbpp.runtime.support import sharded
from zbpp.runtime.testing import small_buckets

SHAPES = ((64, 64), (7, 5), (200, 3), (1, 3), (1,), (2,), (130,), (96, 24))
"""Even and uneven shards, and two that rank 1 has nothing of. What rank 1 has of (2,)
has the shape of the whole before it."""
MAKERS: dict[str, tuple[str, dict[str, Any]]] = {
    "fused": ("AdamW", {"fused": True, "weight_decay": 0.1}),
    "AdamW": ("AdamW", {}),
    "SGD": ("SGD", {"momentum": 0.9}),
    "NAdam": ("NAdam", {}),
    "no state": ("SGD", {}),
}


def draw(step: int, *, plain: bool) -> list[Tensor]:
    """Numbers of all shapes; with ``plain`` the last one is not sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(step)
    found = [torch.randn(s, generator=generator) for s in SHAPES]
    n_sharded = len(found) - plain
    return [
        distribute_tensor(t, mesh, [Shard(0)]) if i < n_sharded else t
        for i, t in enumerate(found)
    ]


def bits(optimizer: torch.optim.Optimizer) -> list[Any]:
    found: list[Any] = []
    for p in optimizer.param_groups[0]["params"]:
        found.append(bytes_of(sharded.own_shard(p)))
        for name, value in sorted(optimizer.state[p].items()):
            found.append((name, type(value).__name__, value.shape))
            found.append(bytes_of(sharded.own_shard(value)))
    return found


def step_and_compare(kind: str) -> list[bool]:
    """Six steps, every third one rolled back."""
    with small_buckets():
        return _step_and_compare(kind)


def _step_and_compare(kind: str) -> list[bool]:
    name, values = MAKERS[kind]
    plain = kind in ("AdamW", "SGD", "NAdam", "no state")  # no fused step takes both
    theirs, ours = (
        getattr(torch.optim, name)(
            [nn.Parameter(t) for t in draw(0, plain=plain)], lr=0.01, **values
        )
        for _ in range(2)
    )
    rollback = DeferredStep(ours)
    same = []
    for step in range(1, 7):
        for each in (theirs, ours):
            gradients = draw(step, plain=plain)
            for p, g in zip(each.param_groups[0]["params"], gradients, strict=True):
                p.grad = g
        before = bits(ours)
        rollback.take()
        if step % 3 == 0:
            rollback.undo()
            same.append(bits(ours) == before)
        else:
            theirs.step()
            rollback.commit()
            same.append(bits(ours) == bits(theirs))
    return same


@pytest.mark.dist
@pytest.mark.parametrize("kind", MAKERS)
def test_shards_are_stepped_as_torch_steps_them(pool: Pool, kind: str) -> None:
    for same in pool.run(step_and_compare, 2, kind):
        assert all(same)
