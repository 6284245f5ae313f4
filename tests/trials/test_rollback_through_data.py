"""A rollback restores weights that a forward has written through ``.data``."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from flat import flat_pipeline
from torch import Tensor, nn

N_STEPS = 6
SPIKES = (2, 3)  # steps that are clipped, and so rolled back


def clamp(weight: Tensor) -> None:
    weight.data.clamp_(-0.1, 0.1)


def renormalize(weight: Tensor) -> None:
    weight.data.div_(weight.data.norm())


def replace(weight: Tensor) -> None:
    weight.data = weight.data.clamp(-0.2, 0.2)


class Bounded(nn.Module):
    """Bounds its weight in every forward, before the weight is used."""

    def __init__(self, bound: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self._bound = bound

    def forward(self, x: Tensor) -> Tensor:
        self._bound(self.linear.weight)
        return self.linear(x).tanh()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def with_hook(parameters: Any) -> torch.optim.Optimizer:
    """Waits for the norm: a hook cannot be rolled back."""
    optimizer = adamw(parameters)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


WAYS: dict[str, dict[str, Any]] = {
    "deferred": {},
    "snapshot": {"snapshots": True},
    "synchronized": {"synchronizes": True},
    "with a hook": {"optimizer": with_hook},
}


def train(
    bound: Callable[[Tensor], None], *, synchronizes: bool = False, **settings: Any
) -> tuple[list[tuple[float, float]], dict[str, Tensor], list[int]]:
    torch.manual_seed(0)
    pipeline = flat_pipeline(
        [Bounded(bound) for _ in range(4)],
        loss_fn=nn.functional.mse_loss,
        n_microbatches=4,
        clip_grad_norm=2.0,
        **({"optimizer": adamw} | settings),
    )
    with pipeline:
        results = []
        for step in range(N_STEPS):
            draws = torch.Generator().manual_seed(step)
            x, y = torch.randn(2, 8, 8, generator=draws)
            results.append(pipeline.step(x, y * 50 ** (step in SPIKES)))
            if synchronizes:
                pipeline.synchronize()
        weights = {n: p.detach().clone() for n, p in pipeline.named_parameters()}
        rollbacks = [result.rollbacks for result in results]
        return [(r.loss, r.grad_norm) for r in results], weights, rollbacks


@pytest.mark.parametrize("bound", [clamp, renormalize, replace])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("schedule", ["ZBH1", "ZBV"])
def test_post_validation_leaves_the_weights_of_the_barrier(
    schedule: str, bound: Callable[[Tensor], None], way: str
) -> None:
    how: dict[str, Any] = {"schedule": schedule, "n_stages": 2} | WAYS[way]
    *expected, _ = train(bound, post_validation=False, **how)
    losses, weights, rollbacks = train(bound, post_validation=True, **how)
    assert rollbacks == [step in SPIKES for step in range(N_STEPS)]
    assert losses == expected[0]
    assert all(torch.equal(weights[name], p) for name, p in expected[1].items())
