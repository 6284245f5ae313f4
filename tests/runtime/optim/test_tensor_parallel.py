"""Stages whose layers are tensor-parallel: sharded parameters, full norms."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from flat import flat_pipeline
from histories import ALWAYS
from moments import uncertain_sums
from pool import Pool
from torch import Tensor, nn

WIDTH, N_LAYERS, N_STEPS, CLIP = 16, 4, 4, 2.0


class Feed(nn.Module):
    """Two matrices, the second one's product summed over its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 32)
        self.down = nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return result


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Feed() for _ in range(N_LAYERS)]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, WIDTH, generator=generator)
    return x * (30.0 if step == 2 else 1.0), x.roll(1, 1)


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) ** 2).mean()


def optimizer(kind: str) -> Any:
    def make(parameters: list[nn.Parameter]) -> Any:
        if kind == "several":
            matrices = [p for p in parameters if p.dim() > 1]
            rest = [p for p in parameters if p.dim() < 2]
            return [torch.optim.SGD(matrices, lr=0.1), torch.optim.AdamW(rest, lr=0.01)]
        return torch.optim.AdamW(parameters, lr=0.01)

    return make


def train(model: list[nn.Module], kind: str, **more: Any) -> tuple[Any, ...]:
    """Norms, rollbacks, and all parameters of this process, made full."""
    settings: dict[str, Any] = {"clip_grad_norm": CLIP, "patience": ALWAYS}
    with uncertain_sums(0, share=0):
        pipeline = flat_pipeline(
            model, loss_fn=loss_fn, optimizer=optimizer(kind), n_microbatches=4,
            **(settings | more),
        )  # fmt: skip
        results = [pipeline.step(*batch(step)) for step in range(N_STEPS)]
        held = {}
        for name, p in pipeline.named_parameters():
            full = getattr(p, "full_tensor", p.detach)
            held[name] = full().detach().clone()
        pipeline.close()
    return [r.grad_norm for r in results], [r.rollbacks for r in results], held


def train_sharded(mode: str, kind: str, snapshots: bool, validated: bool) -> Any:
    """Ranks 0 and 1 share the first stage, 2 and 3 the second one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    model = layers()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for layer in model:
        parallelize_module(layer, mesh["tp"], plan)
    found = train(
        model, kind, schedule=mode, snapshots=snapshots, post_validation=validated,
        group=mesh["pp"].get_group(), timeout_s=100,
    )  # fmt: skip
    dist.barrier()
    return found


CASES = [
    ("1F1B", "adamw", False, False),
    ("ZBH1", "adamw", False, True),
    ("ZBV", "several", True, True),
]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("mode", "kind", "snapshots", "validated"),
    [*CASES[:-1], pytest.param(*CASES[-1], marks=pytest.mark.slow)],
)
def test_sharded_stages(
    pool: Pool, mode: str, kind: str, snapshots: bool, validated: bool
) -> None:
    norms, _, expected = train(
        layers(), kind, schedule="1F1B", n_stages=2, post_validation=False
    )
    answers = pool.run(train_sharded, 4, mode, kind, snapshots, validated)
    for found, rollbacks, parameters in answers:
        assert found == pytest.approx(norms, rel=1e-5)
        clipped = [int(norm > CLIP) for norm in norms]
        assert rollbacks == (clipped if validated else [0] * N_STEPS)
        assert 0 < sum(clipped) < N_STEPS
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)
    if validated:
        barrier = pool.run(train_sharded, 4, mode, kind, snapshots, False)
        for (_, _, ours), (_, _, theirs) in zip(answers, barrier, strict=True):
            for name, value in ours.items():
                assert torch.equal(value, theirs[name]), name
