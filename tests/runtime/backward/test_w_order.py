"""W goes through its products in one order, however B has found them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zbpp.runtime.backward import graph as graphs
from zbpp.runtime.backward.plan_cache import SplitPlanCache
from zbpp.runtime.backward.queue import WeightQueue
from zbpp.runtime.backward.split import SplitGraph


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
        edges = [work.roots[0][0] for work in queue._work]
        found.append([names[id(_leaf(node))] for node in edges])
    return found


def _leaf(node: Any) -> Tensor:
    while not hasattr(node, "variable"):
        node = node.next_functions[0][0]
    leaf: Tensor = node.variable
    return leaf


def test_the_order_is_that_of_autograds_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = orders()
    assert first == second == [4, 2, 0], "down, up, gate"

    def unsorted(*args: Any) -> Any:
        plan = sort(*args)
        return plan._replace(products=plan.products[::-1])

    sort = graphs.plan_split
    monkeypatch.setattr("zbpp.runtime.backward.plan_cache.plan_split", unsorted)
    first, second = orders()
    assert first != second, "the negative control"
