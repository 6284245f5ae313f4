"""Gradients are added in micro-batch order, whatever the order of the passes."""

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zbpp.runtime import SplitGraph
from zbpp.runtime.backward.accumulate import GradientOrder
from zbpp.runtime.parallel.progress import LayerSums

N = 5


class Fickle(nn.Module):
    """Uses its first weight once, twice or not at all, as the micro-batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, uses: int) -> Tensor:
        """(rows, 8) to the same."""
        for _ in range(uses):
            x = torch.tanh(self.first(x))
        return self.last(x)


def inputs(uses: Sequence[int]) -> list[tuple[Tensor, int]]:
    torch.manual_seed(1)
    return [(torch.randn(6, 8) * 10.0**i, n) for i, n in enumerate(uses)]


def plain(module: nn.Module, uses: Sequence[int]) -> list[Tensor]:
    for x, n in inputs(uses):
        module(x, n).sum().backward()
    return gradients(module)


def gradients(module: nn.Module) -> list[Tensor]:
    found = []
    for p in module.parameters():
        assert p.grad is not None
        found.append(p.grad)
        p.grad = None
    return found


def passes(seed: int) -> list[tuple[str, int]]:
    """B and W of all micro-batches in any order in which B is before W."""
    rng = random.Random(seed)
    order = [("B", i) for i in range(N)]
    rng.shuffle(order)
    for i in range(N):
        after = order.index(("B", i)) + 1
        order.insert(rng.randint(after, len(order)), ("W", i))
    return order


def run(
    module: nn.Module,
    uses: Sequence[int],
    seed: int,
    *,
    is_released: bool = False,
    sums: LayerSums | None = None,
) -> list[Tensor]:
    order = GradientOrder(module.parameters(), is_released=is_released)
    if sums is not None:
        order.listen(N, sums)
    graphs = []
    for x, n in inputs(uses):
        y = module(x, n)
        graphs.append(SplitGraph([y]))
    for kind, i in passes(seed):
        if kind == "B":
            order.run_b(i, graphs[i], [torch.ones(6, 8)])
        else:
            order.run_w(i, graphs[i])
    return gradients(module) if sums is None else []


class Summed(LayerSums):
    """Adds up what it takes of each layer."""

    def __init__(self, module: Fickle) -> None:
        self.totals: dict[Tensor, Tensor] = {}
        self._layers = [list(x.parameters()) for x in (module.first, module.last)]
        layer_of = {p: i for i, own in enumerate(self._layers) for p in own}
        super().__init__(layer_of, self._take, self._take_all, nullcontext)

    def _take(self, layer: int) -> None:
        for p in self._layers[layer]:
            if p.grad is not None:
                self.totals[p] = self.totals[p] + p.grad if p in self.totals else p.grad
                p.grad = None

    def _take_all(self) -> None:
        for layer in (1, 0):
            self._take(layer)


@pytest.mark.parametrize("uses", [(1,) * N, (1, 2, 1, 2, 1), (2, 1, 1, 0, 2)])
def test_sums_of_each_do_not_depend_on_the_order(uses: Sequence[int]) -> None:
    """Nor do they with a micro-batch that leaves a layer to B, and others to W."""
    module = Fickle()
    want = plain(module, uses)
    for seed in range(12):
        sums = Summed(module)
        run(module, uses, seed, sums=sums)
        for p, total in zip(module.parameters(), want, strict=True):
            assert p.grad is None
            assert torch.equal(sums.totals[p], total)


USES = [(1,) * N, (1, 2, 1, 2, 1), (2, 1, 1, 0, 2), (0, 1, 2, 2, 1), (1, 2, 2, 2, 1)]


@pytest.mark.parametrize("uses", USES)
def test_sums_do_not_depend_on_the_order(uses: Sequence[int]) -> None:
    module = Fickle()
    want = plain(module, uses)
    for seed in range(12):
        assert all(map(torch.equal, run(module, uses, seed), want)), seed


class _Calls(torch.autograd.Function):
    """The identity; the backward calls a function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return dy, None


@pytest.mark.parametrize("uses", USES)
def test_w_beside_an_unfinished_b_does_not_change_sums(uses: Sequence[int]) -> None:
    """Within each B a part of its own W, and that of the micro-batch before."""
    module = Fickle()
    want = plain(module, uses)
    order = GradientOrder(module.parameters())
    graphs: list[SplitGraph] = []
    n_parts = 0

    def within(i: int) -> None:
        nonlocal n_parts
        before = len(graphs[i]._queue.work)
        order.begin_w(i, graphs[i], 2)
        n_parts += len(graphs[i]._queue.work) < before
        if i:
            order.begin_w(i - 1, graphs[i - 1], 2)
            order.run_w(i - 1, graphs[i - 1])
            order.begin_w(i, graphs[i], 2)

    for i, (x, n) in enumerate(inputs(uses)):
        for _ in range(n):
            x = torch.tanh(module.first(x))
        y = module.last(_Calls.apply(x, partial(within, i)) if n else x)
        graphs.append(SplitGraph([y]))
    for i, graph in enumerate(graphs):
        order.run_b(i, graph, [torch.ones(6, 8)])
        if not uses[i] and i:
            order.run_w(i - 1, graphs[i - 1])
    order.run_w(N - 1, graphs[N - 1])
    assert all(map(torch.equal, gradients(module), want))
    assert n_parts or uses[0] == 0


def test_without_the_order_they_do() -> None:
    module = Fickle()
    want = plain(module, USES[1])
    found = [run(module, USES[1], seed, is_released=True) for seed in range(12)]
    assert not all(all(map(torch.equal, got, want)) for got in found)
    for got in found:
        torch.testing.assert_close(got, want)
