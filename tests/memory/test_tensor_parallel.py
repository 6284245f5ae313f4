"""Tensor-parallel layers: local shards count, and passes are those of real shards."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn

WIDTH, ROWS, N_LAYERS = 128, 256, 4


class Feed(nn.Module):
    """Two matrices, the second one's product summed over its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return result


def sharded_layers() -> list[nn.Module]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    layers: list[nn.Module] = [Feed() for _ in range(N_LAYERS)]
    for layer in layers:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer, mesh, plan)
    return layers


def compared() -> dict[str, Any]:
    """In each of two processes: errors of the passes; estimated and real bytes."""
    from allocator import worst
    from parts.memory_events import measure_step

    from zbpp.memory.layers import model_memory
    from zbpp.memory.model import default_optimizer

    torch.set_num_threads(1)
    layers = sharded_layers()
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
        whole = sum(p.nbytes for _ in range(N_LAYERS) for p in Feed().parameters())
        assert found["parameters"][0] < 0.51 * whole
        errors = found.pop("passes")
        assert max(*errors, *(abs(a / b - 1) for a, b in found.values())) < 0.03
