"""Tensor-parallel layers: local shards count, and passes are those of real shards."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from mesh_runs import Block, cut_over
from pool import Pool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

WIDTH, ROWS, N_LAYERS = 128, 256, 4


def whole_layers() -> list[nn.Module]:
    return [Block(WIDTH, 4 * WIDTH, checkpointed=False) for _ in range(N_LAYERS)]


def compared() -> dict[str, Any]:
    """In each of two processes: errors of the passes; estimated and real bytes."""
    from allocator import worst
    from memory_events import measure_step

    from zbpp.memory.layers import model_memory
    from zbpp.memory.model import default_optimizer

    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    layers = cut_over(whole_layers(), mesh)
    x = torch.randn(ROWS, WIDTH)
    parts: Any = layers, (x, x), nn.functional.mse_loss
    memory, own = model_memory(*parts), range(N_LAYERS)
    step = memory.optimizer(own, default_optimizer)
    compiled = {"compile": "blocks", "small": 2**11, "runs": 3}
    errors = [
        worst(parts, own, runs=3)[0],
        worst(parts, range(1, 3), **compiled)[0],
    ]
    state, _, peak = measure_step(layers, deferred=False)
    _, copies, deferred = measure_step(layers, deferred=True)
    held: Any = [p for layer in layers for p in layer.parameters()]
    shards = sum(getattr(p, "to_local", p.detach)().nbytes for p in held)
    dist.barrier()
    return {
        "passes": errors,
        "parameters": (memory.bytes_of(memory.parameters(own)), shards),
        "gradients": (sum(memory.gradients(own).values()), shards),
        "state": (step.state, state),
        "step": (step.peak + step.state, peak + state),
        "copies": (step.rollback, copies),
        "speculative step": (step.speculative_peak, deferred),
    }


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.dist
def test_shards_take_what_the_allocator_says(pool: Pool) -> None:
    for found in pool.run(compared, 2):
        whole = sum(p.nbytes for layer in whole_layers() for p in layer.parameters())
        assert found["parameters"][0] < 0.51 * whole
        errors = found.pop("passes")
        assert max(*errors, *(abs(a / b - 1) for a, b in found.values())) < 0.03
