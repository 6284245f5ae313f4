"""Parameters that come into layers between steps are named, or trained."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbpp

WIDTH = 4


class Grows(nn.Module):
    """A Linear, and a second one if it was given one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.more: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x if self.more is None else self.more(x)


def pipeline_of(layers: list[Grows]) -> zbpp.Pipeline:
    return zbpp.Pipeline(
        layers,
        loss_fn=nn.functional.mse_loss,
        optimizer=torch.optim.SGD,
        schedule="ZBH1",
        n_stages=2,
        n_microbatches=2,
        clip_grad_norm=1.0,
    )


def replace(layer: Grows) -> None:
    layer.linear.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))


def assign(layer: Grows) -> None:
    state = {name: p.detach().clone() for name, p in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)


def add(layer: Grows) -> None:
    layer.more = nn.Linear(WIDTH, WIDTH)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (replace, r"layers\.1\.linear\.weight was"),
        (assign, r"layers\.1\.linear\.weight, layers\.1\.linear\.bias was"),
        (add, r"layers\.1\.more\.weight, layers\.1\.more\.bias was"),
    ],
)
def test_what_nobody_would_train_is_named(
    change: Callable[[Grows], None], name: str
) -> None:
    layers = [Grows() for _ in range(4)]
    x = torch.randn(4, WIDTH)
    with pipeline_of(layers) as pipeline:
        pipeline.step(x, x)
        pipeline.synchronize()
        change(layers[1])
        with pytest.raises(zbpp.RequestError, match=f"{name} put into its layer"):
            pipeline.step(x, x)


def frozen(layer: Grows, _: zbpp.Pipeline) -> None:
    weight = layer.linear.weight.detach().clone()
    layer.linear.weight = nn.Parameter(weight, requires_grad=False)


def written(layer: Grows, _: zbpp.Pipeline) -> None:
    with torch.no_grad():
        layer.linear.weight.copy_(torch.ones(WIDTH, WIDTH))


def given_to_the_optimizer(layer: Grows, pipeline: zbpp.Pipeline) -> None:
    add(layer)
    assert layer.more is not None
    pipeline.optimizers[0].add_param_group({"params": layer.more.parameters()})


@pytest.mark.parametrize("change", [frozen, written, given_to_the_optimizer])
def test_what_is_trained_or_frozen_is_no_error(change: Callable[..., Any]) -> None:
    layers = [Grows() for _ in range(4)]
    x = torch.randn(4, WIDTH)
    with pipeline_of(layers) as pipeline:
        pipeline.step(x, x)
        pipeline.synchronize()
        change(layers[1], pipeline)
        before = [p.detach().clone() for p in layers[1].parameters()]
        for _ in range(2):
            pipeline.step(x, x)
        pipeline.synchronize()
        for p, old in zip(layers[1].parameters(), before, strict=True):
            assert torch.equal(p, old) == (not p.requires_grad)
