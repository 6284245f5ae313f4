"""Plans of graphs that were seen before: used where all is alike, and only there."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from zbpp.runtime import SplitGraph, WeightQueue
from zbpp.runtime.backward import plan_cache
from zbpp.runtime.backward.plan_cache import SplitPlanCache
from zbpp.runtime.support.autograd_internals import leaves_behind


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each graph that was planned anew."""
    found: list[int] = []

    def plan(*args: Any) -> Any:
        found.append(1)
        return original(*args)

    original = plan_cache.plan_split
    monkeypatch.setattr(plan_cache, "plan_split", plan)
    return found


class Net(nn.Module):
    """Two products of one shape, in an order that may change."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm, self.other_norm = nn.LayerNorm(4), nn.LayerNorm(4)
        self.way: Callable[[Net, Tensor], Tensor] = plain
        self.fired: list[str] = []
        self.hooked: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def plain(net: Net, x: Tensor) -> Tensor:
    return net.norm(net.b(net.a(x).tanh()))


def swapped(net: Net, x: Tensor) -> Tensor:
    return net.norm(net.a(net.b(x).tanh()))


def another_norm(net: Net, x: Tensor) -> Tensor:
    return net.other_norm(net.b(net.a(x).tanh()))


def used_twice(net: Net, x: Tensor) -> Tensor:
    return net.norm(linear(net.b(x).tanh(), net.b.weight, net.a.bias))


def through_a_clone(net: Net, x: Tensor) -> Tensor:
    weight = net.a.weight + 0
    return net.norm(net.b(linear(x, weight, net.a.bias).tanh()))


def packed(net: Net, x: Tensor) -> Tensor:
    with save_on_cpu():
        return plain(net, x)


def checkpointed(net: Net, x: Tensor) -> Tensor:
    return checkpoint(plain, net, x, use_reentrant=False)


def frozen(net: Net, x: Tensor) -> Tensor:
    y = plain(net, x)
    net.a.weight.requires_grad_(False)
    net.norm.weight.requires_grad_(False)
    return y


def hooked(net: Net, x: Tensor) -> Tensor:
    if net.hooked is None:
        net.hooked = net.a.weight.register_hook(lambda gradient: gradient * 3)
    return plain(net, x)


def run(net: Net, x: Tensor, plans: SplitPlanCache | None) -> Tensor | None:
    x = x.clone().requires_grad_()
    with WeightQueue() as queue:
        y = net(x)
    if plans is None:
        y.backward(torch.ones_like(y))
        return x.grad
    graph = SplitGraph([y], [x], queue, plans=plans)
    (dx,) = graph.backward_input(torch.ones_like(y))
    graph.backward_weight()
    return dx


def same(net: Net, other: Net) -> bool:
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    return all(
        (p.grad is None and q.grad is None)
        or (
            p.grad is not None
            and q.grad is not None
            and torch.equal(p.grad, q.grad)
            and p.grad.stride() == q.grad.stride()
        )
        for p, q in pairs
    )


@pytest.mark.parametrize(
    ("way", "n_planned"),
    [
        (plain, 1),
        (checkpointed, 1),
        (hooked, 1),
        *((way, 2) for way in (swapped, another_norm, used_twice, through_a_clone)),
        *((way, 2) for way in (packed, frozen)),
    ],
)
def test_a_plan_serves_where_all_is_alike(
    planned: list[int], way: Any, n_planned: int
) -> None:
    torch.manual_seed(0)
    net = Net()
    other, plans = copy.deepcopy(net), SplitPlanCache()
    for turn in range(5):
        net.way = other.way = plain if turn < 2 else way
        x = torch.randn(3, 4)
        dx, other_dx = run(net, x, plans), run(other, x, None)
        assert dx is not None and other_dx is not None and torch.equal(dx, other_dx)
        assert same(net, other) and net.fired == other.fired
        assert turn > 2 or len(planned) == (1 if turn < 2 else n_planned)


def test_a_function_of_python_s_is_left_to_hooks() -> None:
    """It may run a backward of its own, or ask which kind of backward it is in."""

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            return dy

    net, plans = Net(), SplitPlanCache()
    run(net, torch.randn(3, 4), plans)
    net.way = lambda net, x: plain(net, Identity.apply(x))  # type: ignore[no-untyped-call]
    run(net, torch.randn(3, 4), plans)
    assert [one._captures for one in plans._plans.values()] == [True, False]


def leaves_node(leaf: Tensor) -> Any:
    """The node that adds a leaf's gradients; made anew once nothing keeps it."""
    ((node, _),) = leaf.view_as(leaf).grad_fn.next_functions  # type: ignore[union-attr]
    return node


@pytest.mark.parametrize("plans", (False, True))
def test_a_report_keeps_no_node_of_a_leaf_and_a_plan_does(plans: bool) -> None:
    net, memory = Net(), SplitPlanCache()
    x = torch.randn(2, 4, requires_grad=True)
    graph = SplitGraph([net(x)], [x], plans=memory)
    assert "W" in graph.report().values()
    if plans:
        graph.in_b()
    leaves_node(net.a.weight).metadata["seen"] = True
    graph.backward(torch.ones(2, 4))
    del graph
    assert ("seen" in leaves_node(net.a.weight).metadata) is plans


class Routed(nn.Module):
    """The gate's product comes first, and its node is nearest to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        return gate.sigmoid() * self.down(self.up(x).relu())


def orders() -> list[list[int]]:
    """Of two graphs that are alike: B follows the plan of the second one."""
    torch.manual_seed(0)
    layer, plans, found = Routed(), SplitPlanCache(), []
    names = {id(p): i for i, p in enumerate(layer.parameters())}
    for _ in range(2):
        x = torch.randn(4, 8, requires_grad=True)
        queue = WeightQueue()
        graph = SplitGraph([layer(x)], [x], queue, plans=plans)
        graph.backward_input(torch.ones(4, 8))
        leaves = [leaves_behind(work.roots[0])[0] for work in queue.work]
        found.append([names[id(leaf)] for leaf in leaves])
    return found


def test_the_order_is_that_of_autograds_engine() -> None:
    first, second = orders()
    assert first == second == [4, 2, 0], "down, up, gate"
