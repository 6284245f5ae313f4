"""A tied parameter that is written to between steps, and then a step that is undone."""

from collections.abc import Callable

import pytest
import torch
from flat import flat_pipeline
from torch import Tensor, nn

import zbpp

SPIKE = 2  # its gradient is clipped, so that no stage can keep its first step


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    tied: list[nn.Module] = [nn.Linear(8, 8) for _ in range(6)]
    tied[4].weight = tied[1].weight
    return tied


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
    return x * (1000 if step == SPIKE else 1), x.roll(1, 1)


def write(pipeline: zbpp.Pipeline) -> None:
    _, weight = next(iter(pipeline.named_parameters()))
    for name, p in pipeline.named_parameters():
        if name in ("layers.1.weight", "layers.4.weight"):
            weight = p
    with torch.no_grad():
        weight.mul_(0.5).mul_(2.0)


def reload(pipeline: zbpp.Pipeline) -> None:
    pipeline.load_state_dict(pipeline.state_dict())


def trained(
    mode: str, n_stages: int, between: Callable[[zbpp.Pipeline], None]
) -> list[Tensor]:
    with flat_pipeline(
        layers(),
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
        schedule=mode,
        n_stages=n_stages,
        n_microbatches=4,
        clip_grad_norm=1.0,
        post_validation=mode != "FThenB",
    ) as pipeline:
        for step in range(5):
            if step == SPIKE:
                between(pipeline)
            pipeline.step(*batch(step))
        return [p.detach().clone() for _, p in pipeline.named_parameters()]


@pytest.mark.parametrize(
    ("mode", "between"), [("1F1B", write), ("ZBH1", reload), ("ZBH2", write)]
)
def test_all_stages_have_the_same_copy_after_a_step_that_is_undone(mode, between):
    ours = trained(mode, 2, between)
    theirs = trained("FThenB", 1, between)
    assert all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))
