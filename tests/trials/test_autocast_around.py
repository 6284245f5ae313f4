"""``torch.autocast`` around steps is ``Numerics(autocast=)``, wherever it begins.

Within one context torch casts each weight once. A step and a rollback change weights:
what was cast before must not be used after them.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import zbpp

N_STEPS, DIM = 4, 32


def train(where: str, clip: float, mode: str = "ZBH1") -> tuple[list[float], int]:
    """Losses, and the number of rollbacks."""
    torch.manual_seed(0)
    dtype = torch.bfloat16
    pipeline = zbpp.Pipeline(
        [nn.Linear(DIM, DIM) for _ in range(4)],
        mode,
        loss_fn=lambda y, t: nn.functional.mse_loss(y.float(), t),
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.5),
        n_stages=2 if mode == "ZBV" else 4,
        n_microbatches=4,
        clip_grad_norm=clip,
        numerics=zbpp.Numerics(autocast=dtype if where == "inside" else None),
        step=zbpp.StepPolicy(post_validation=mode != "1F1B"),
    )
    generator = torch.Generator().manual_seed(1)
    results = []
    with torch.autocast("cpu", dtype) if where == "loop" else nullcontext():
        for _ in range(N_STEPS):
            x, y = torch.randn((2, 8, DIM), generator=generator)
            with torch.autocast("cpu", dtype) if where == "step" else nullcontext():
                results.append(pipeline.step(x, y))
    return [x.loss for x in results], sum(x.rollbacks for x in results)


@pytest.mark.parametrize("mode", ["1F1B", "ZBH1", "ZBV"])
@pytest.mark.parametrize("where", ["step", "loop"])
@pytest.mark.parametrize(("clip", "rolls_back"), [(0.3, True), (9.0, False)])
def test_it_does_not_matter_where_autocast_begins(
    where: str, mode: str, clip: float, rolls_back: bool
) -> None:
    expected, n = train("inside", clip, mode)
    assert mode == "1F1B" or (n > 0) == rolls_back
    assert train(where, clip, mode) == (expected, n)
