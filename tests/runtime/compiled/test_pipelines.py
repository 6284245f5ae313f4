"""Pipelines of compiled layers: the same bits under all modes, and W as without."""

import copy
from typing import Any

import pytest
import torch
from flat import flat_pipeline
from torch import Tensor, fx, nn
from torch.nn import functional as f

from zbpp.runtime.support.random_state import seed_torch

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method"),  # both of torch
]
Graphs = list[fx.GraphModule]
State = tuple[list[float], dict[str, Tensor]]


class Dropping(nn.Module):
    """A block with dropout, and a weight that the last layer has too."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(f.dropout(self.a(x).relu(), self.rate))


def dropping(rate: float = 0.0, *, is_tied: bool = True) -> list[nn.Module]:
    torch.manual_seed(1)
    layers = [Dropping(rate) for _ in range(4)]
    if is_tied:
        layers[3].b.weight = layers[0].b.weight
    return list(layers)


def trained(
    layers: Any, mode: str, batches: Any, loss_fn: Any, **how: Any
) -> tuple[State, int]:
    """Losses, parameters, and how many of these W has computed."""
    with flat_pipeline(
        layers,
        loss_fn=loss_fn,
        optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-2),
        schedule=mode,
        n_stages=2,
        n_microbatches=4,
        **how,
    ) as pipeline:
        losses = [float(pipeline.step(x, y).loss) for x, y in batches]
        pipeline.synchronize()
        stages = [one.stage for one in pipeline.stages.executors.values()]
        where = [t for s in stages for own in s.where.values() for t in own.values()]
        named = {n: p.detach().clone() for n, p in pipeline.named_parameters()}
    return (losses, named), where.count("W")


def same(left: State, right: State) -> bool:
    assert left[1].keys() == right[1].keys()
    return left[0] == right[0] and all(
        torch.equal(left[1][name], right[1][name]) for name in left[1]
    )


def numbers(steps: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(2)
    return [(torch.randn(8, 6), torch.randn(8, 6))] * steps


def test_modes_agree_on_tied_and_recomputed_blocks(plain_kernels: Graphs) -> None:
    layers = dropping()
    how: dict[str, Any] = {"seed": 3, "compile": "blocks", "clip_grad_norm": 0.1}
    given = numbers(2), f.mse_loss  # clipped, so that steps are rolled back
    full, w_full = trained(copy.deepcopy(layers), "1F1B", *given, **how)
    n_graphs = len(plain_kernels)
    for mode, more in (("ZBH1", {"recompute": "all"}), ("ZBV", {})):
        split, w = trained(copy.deepcopy(layers), mode, *given, **more, **how)
        assert same(split, full)
        assert w == w_full == 8
        assert len(plain_kernels) == n_graphs == 4  # with a gradient of x, and without


@pytest.mark.slow
def test_dropping_blocks_train_as_a_stock_compiled_loop_does() -> None:
    layers = dropping(0.3, is_tied=False)[:2]
    batches = numbers(2)
    wanted = stock_loop(copy.deepcopy(layers), batches, seed=3)
    how: dict[str, Any] = {"compile": "blocks", "seed": 3, "recompute": "all"}
    found, w = trained(layers, "ZBH1", batches, f.mse_loss, **how)
    assert same(found, wanted) and w == 4


def stock_loop(layers: list[nn.Module], batches: Any, seed: int) -> State:
    """One process, `torch.compile` as it is, and one backward a micro-batch."""
    calls = [torch.compile(layer) for layer in layers]
    parameters = [p for layer in layers for p in layer.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    losses = []
    for step, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        total = 0.0
        for i, (value, target) in enumerate(zip(x.chunk(4), y.chunk(4), strict=True)):
            for place, call in enumerate(calls):
                seed_torch(hash((seed, step, place, i)), torch.device("cpu"))
                value = call(value)
            loss = f.mse_loss(value, target)
            (loss / 4).backward()
            total += float(loss.detach()) / 4
        optimizer.step()
        losses.append(total)
    own = ((i, pair) for i, x in enumerate(layers) for pair in x.named_parameters())
    return losses, {f"layers.{i}.{name}": p for i, (name, p) in own}
