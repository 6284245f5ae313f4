"""Estimates against the allocator's own events, and what makes them wrong."""

import pytest
import torch
from allocator import Parts, worst
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from zbpp.runtime.backward import graph

WIDTH = 128


class Block(nn.Module):
    """Norm, a product whose input is a view, an activation, and a residual."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Unflatten(-1, (2, WIDTH // 2)),
            nn.Linear(WIDTH // 2, WIDTH),
            nn.GELU(),
            nn.Linear(WIDTH, WIDTH // 2),
            nn.Flatten(-2),
        )
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        if self.again:
            y: Tensor = checkpoint(self.body, x, use_reentrant=False)
            return x + y
        return x + self.body(x)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits, targets)


def language(*, again: bool = False) -> Parts:
    tokens = torch.randint(0, 512, (512,))
    ends = nn.Embedding(512, WIDTH), nn.Linear(WIDTH, 512)
    layers = [ends[0], *(Block(again=again) for _ in range(4)), ends[1]]
    return layers, (tokens, tokens), loss


def test_passes_take_what_the_allocator_says() -> None:
    assert worst(language(), range(1, 3))[0] < 0.02


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")  # torch's own
@pytest.mark.parametrize(
    ("own", "again", "autocast"),
    [
        (range(6), False, torch.bfloat16),
        (range(6), True, None),
        (range(3, 6), False, None),
        (range(3, 6), True, torch.bfloat16),
    ],
)
def test_passes_of_all_kinds_do(
    own: range, again: bool, autocast: torch.dtype | None
) -> None:
    with torch.backends.mkldnn.flags(enabled=False):  # its scratch differs by CPU
        error, _ = worst(language(again=again), own, autocast)
    assert error < 0.05


def test_fakes_that_are_not_admitted_split_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graph, "is_fake", lambda tensor: False)
    error, chunk = worst(language(), range(1, 3))
    assert error > 0.02 and chunk.gradients_in_w == 0
