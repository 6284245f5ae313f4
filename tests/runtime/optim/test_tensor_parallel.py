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

from zbpp.runtime.optim import stage_optimizer

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


def shared_over(mesh: Any) -> list[nn.Module]:
    """The layers, dealt out over a mesh."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return [parallelize_module(layer, mesh, plan) for layer in layers()]


def train_sharded(mode: str, kind: str, snapshots: bool, validated: bool) -> Any:
    """Ranks 0 and 1 share the first stage, 2 and 3 the second one."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    model = shared_over(mesh["tp"])
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


def see_forwards(is_broken: bool) -> bool:
    """True if neighbours along ``tp`` have seen the same in all their forwards.

    Every step is clipped. One neighbour could tell by itself, as it counts the plain
    gradients, and the other one has none to count.
    """
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    model = shared_over(mesh["tp"])
    seen = []

    def look(_: nn.Module, __: tuple[Tensor], output: Tensor) -> None:
        both = torch.zeros(2)
        both[mesh["tp"].get_local_rank()] = output.detach().sum()
        dist.all_reduce(both, group=mesh["tp"].get_group())
        seen.append(bool(both[0] == both[1]))

    for layer in model:
        layer.norm.register_forward_hook(look)
        for dealt in (layer.up, layer.down):
            dealt.requires_grad_(False)
    with pytest.MonkeyPatch.context() as patch:
        if is_broken:
            patch.setattr(stage_optimizer, "_shares_layers", lambda *_: False)
        _, rollbacks, _ = train(
            model, "adamw", schedule="ZBH1", clip_grad_norm=1e-3,
            post_validation=True, timeout_s=100, mesh=mesh,
        )  # fmt: skip
    assert rollbacks == [1] * N_STEPS
    return all(seen)


@pytest.mark.dist
def test_neighbours_compute_the_same_before_a_rollback(pool: Pool) -> None:
    """A layer may choose by it what it communicates, as a router does."""
    assert all(pool.run(see_forwards, 4, False))
    assert not all(pool.run(see_forwards, 4, True))
