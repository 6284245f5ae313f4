"""Norms, clipping and steps of gradients that are complex or sparse."""

from typing import Any

import pytest
import torch
from flat import flat_pipeline
from torch import Tensor, nn

from zbpp.runtime.optim import norms

CLIP = 0.05


class Spectral(nn.Module):
    """Multiplies in the frequencies by complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = torch.fft.irfft(
            torch.fft.rfft(x) @ self.weight.mT @ self.weight, 8
        )
        return torch.tanh(mixed) + x


def layers(*, sparse: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(11, 8, sparse=sparse), nn.Linear(8, 8), Spectral(), nn.Linear(8, 3)
    )


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 11, (8, 4), generator=generator)
    return tokens, torch.randn(8, 4, 3, generator=generator)


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) ** 2).mean()


def norm_of(parameters: list[nn.Parameter]) -> float:
    """By hand: of all real numbers."""
    dense = [
        p.grad.to_dense() if p.grad.is_sparse else p.grad
        for p in parameters
        if p.grad is not None
    ]
    return float(sum(g.abs().double().square().sum() for g in dense)) ** 0.5


def plain(*, sparse: bool) -> tuple[list[float], list[Tensor]]:
    model = layers(sparse=sparse)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    norms = []
    for step in range(3):
        for x, y in zip(*(t.chunk(4) for t in batch(step)), strict=True):
            (loss_fn(model(x), y) / 4).backward()
        norms.append(norm_of(parameters))
        for p in parameters:
            assert p.grad is not None
            p.grad.mul_(min(1.0, CLIP / (norms[-1] + 1e-6)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, [p.detach() for p in parameters]


@pytest.mark.parametrize(("mode", "sparse"), [("1F1B", False), ("ZBV", True)])
def test_complex_and_sparse_gradients(mode: str, sparse: bool) -> None:
    norms, expected = plain(sparse=sparse)
    model = layers(sparse=sparse)
    settings: dict[str, Any] = {"post_validation": True, "clip_grad_norm": CLIP}
    pipeline = flat_pipeline(
        model, loss_fn=loss_fn, schedule=mode, n_microbatches=4, n_stages=2,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.5), **settings,
    )  # fmt: skip
    results = [pipeline.step(*batch(step)) for step in range(3)]
    pipeline.close()
    assert [r.grad_norm for r in results] == pytest.approx(norms, rel=1e-5)
    assert sum(r.rollbacks for r in results) == 3
    for value, other in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(value, other)


def test_norms_of_many_tensors_are_those_of_each() -> None:
    torch.manual_seed(0)
    some = [torch.randn(n) * 10 ** (n % 7) for n in (0, 1, 7, 33, 1000, 70_001)]
    some += [torch.randn(50, 70).t()[::3], torch.randn(5, 9, 11), torch.tensor(3.0)]
    every = [x.to(t) for x in some for t in (torch.float32, torch.bfloat16)]
    every += [torch.randn(777, dtype=torch.float64), torch.full((9,), torch.inf)]
    alone = [torch.linalg.vector_norm(x, dtype=torch.float64).square() for x in every]
    assert all(map(torch.equal, norms._squares(every), alone))
    gradients = [nn.Parameter(x) for x in every]
    for p, x in zip(gradients, every, strict=True):
        p.grad = x.clone()
    norms.multiply_gradients(gradients, 0.3)
    for p, x in zip(gradients, every, strict=True):
        assert p.grad is not None and torch.equal(p.grad, x.mul_(0.3))
