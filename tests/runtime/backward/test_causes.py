"""The reasons of gradients in B are true, and said where they make a split useless."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from zbpp import Pipeline
from zbpp.runtime import split_forward


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return gradient @ w, gradient.t() @ x


class OfFunction(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.weight) + self.bias


class Masked(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * 0.5, self.bias)


class Recurrent(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x.unsqueeze(0))[0].squeeze(0)


class Reentrant(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(4), nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return (q @ k.t()) @ v


def linear(_: int = 4) -> nn.Module:
    return nn.Linear(4, 4)


CASES = {
    "function": (lambda: OfFunction(4, 4), "B: inside Product, an autograd.Function"),
    "weight_norm": (
        lambda: parametrizations.weight_norm(linear()),
        "B: a product's weight is computed from it",
    ),
    "spectral_norm": (
        lambda: parametrizations.spectral_norm(linear()),
        "B: a product's weight is computed from it",
    ),
    "masked": (lambda: Masked(4, 4), "B: a product's weight is computed from it"),
    "lstm": (
        lambda: Recurrent(4, 4),
        "B: inside a fused kernel of a recurrent layer",
    ),
    "reentrant": (lambda: Reentrant(4, 4), "B: reentrant checkpoint"),
}


def report(module: nn.Module, x: Tensor) -> dict[str, str]:
    where = split_forward(module, x).report(module.parameters())
    return {name: where[p] for name, p in module.named_parameters()}


@pytest.mark.parametrize("case", CASES)
def test_the_reason_of_the_largest_weight_is_true(case: str) -> None:
    make, reason = CASES[case]
    module = make()
    found = report(module, torch.ones(2, 4, requires_grad=True))
    largest = max(module.named_parameters(), key=lambda pair: pair[1].numel())[0]
    assert found[largest] == reason


@pytest.mark.parametrize("learns", [False, True])
def test_norms_and_embeddings_below_products_are_nobodys_weight(learns: bool) -> None:
    module = nn.Sequential(Attention(), nn.LayerNorm(4), linear())
    found = report(module, torch.ones(2, 4, requires_grad=learns))
    assert found["0.qkv.weight"] == found["2.weight"] == "W"
    others = {text for name, text in found.items() if found[name] != "W"}
    assert others == {"B: no product's weight"}
    embedded = nn.Sequential(nn.Embedding(5, 4), Masked(4, 4))
    assert report(embedded, torch.tensor([1, 2]))["0.weight"] == (
        "B: no product's weight"
    )


def pipeline_of(layers: list[nn.Module], schedule: str) -> Pipeline:
    return Pipeline(
        layers,
        loss_fn=nn.functional.mse_loss,
        optimizer=torch.optim.SGD,
        schedule=schedule,
        n_stages=2,
        n_microbatches=2,
    )


def test_a_split_that_does_not_split_is_warned_of_once() -> None:
    batch = torch.ones(4, 4), torch.zeros(4, 4)
    pipeline = pipeline_of([linear(), *(OfFunction(4, 4) for _ in range(3))], "ZBH1")
    with pytest.warns(UserWarning, match="ZBH1 gains little here.*inside Product"):
        pipeline.step(*batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline.step(*batch)
        # where most waits, or nothing is split, there is nothing to say
        pipeline_of([OfFunction(4, 4), *map(linear, range(3))], "ZBH1").step(*batch)
        pipeline_of([OfFunction(4, 4) for _ in range(4)], "1F1B").step(*batch)
