"""W of a whole region: what may happen between its B and its W."""

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zbpp.runtime.backward.plan_cache import SplitPlanCache
from zbpp.runtime.backward.split import SplitGraph
from zbpp.runtime.compiled import backend

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"  # of torch by torch
)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6)
        self.fired = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())

    def note(self, dw: Tensor) -> Tensor:
        self.fired += 1
        return 2 * dw


class Heard:
    """A progress that wants to hear of every piece."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def begin(self, edges: Sequence[Sequence[Any]]) -> None:
        self.told.append(-len(edges))

    def done(self, n: int) -> int:
        self.told.append(n)
        return n + 1


def nothing(net: Two) -> None:
    """Between B and W."""


def a_hook(net: Two) -> None:
    net.a.weight.register_hook(net.note)


def frozen(net: Two) -> None:
    net.b.weight.requires_grad_(False)


def no_sum(net: Two) -> None:
    net.b.weight.grad = None


def train(
    net: Two, between: Callable[[Two], None], xs: Sequence[Tensor], **how: Any
) -> Heard:
    """Two micro-batches; then something happens between B and W of a third."""
    call: Any = torch.compile(net, backend=backend.zbpp)
    plans, heard = SplitPlanCache(), Heard()
    for turn, x in enumerate(xs):
        y = call(x)
        graph = SplitGraph([y], [x], plans=plans, **how)
        graph.backward_input(torch.ones_like(y))
        assert graph.defers() and graph.held_bytes() > 0
        if turn == len(xs) - 1:
            between(net)
        graph.backward_weight(heard if turn == 1 else None)
    return heard


def expected(net: Two, between: Callable[[Two], None], xs: Sequence[Tensor]) -> None:
    """The same by whole backwards; biases come from B, before it happens."""
    call: Any = torch.compile(net, backend=backend.zbpp)
    for turn, x in enumerate(xs):
        y = call(x)
        if turn == len(xs) - 1:
            between(net)
        torch.autograd.backward(y, torch.ones_like(y))


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, 6, requires_grad=True) for _ in range(3)]


def same(one: Two, other: Two) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(p.grad, q.grad) for p, q in pairs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("between", "is_exact"),
    [
        (nothing, True),
        (nothing, False),
        (a_hook, True),
        *(pytest.param(x, True, marks=pytest.mark.slow) for x in (frozen, no_sum)),
    ],
)
def test_w_adds_what_a_whole_backward_adds(
    plain_kernels: None, between: Callable[[Two], None], is_exact: bool
) -> None:
    net = Two()
    other = copy.deepcopy(net)
    heard = train(net, between, inputs(), is_exact=is_exact)
    expected(other, between, inputs())
    assert heard.told == [-2, 0, 1, 2]
    assert net.fired == other.fired == (between is a_hook)
    if is_exact:
        assert same(net, other)
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_a_plan_keeps_nothing_of_its_first_graph(plain_kernels: None) -> None:
    net, plans = Two(), SplitPlanCache()
    x = torch.randn(4, 6, requires_grad=True)
    y = torch.compile(net, backend=backend.zbpp)(x)
    graph = SplitGraph([y], [x], plans=plans)
    graph.backward_input(torch.ones_like(y))
    graph.backward_weight()
    held = weakref.ref(x)
    del x, y, graph
    gc.collect()
    assert held() is None


def test_a_region_below_which_no_gradient_is_wanted_leaves_its_work(
    plain_kernels: None,
) -> None:
    """The lower region has no bias and no input to give a gradient to."""
    parts = nn.Linear(6, 8, bias=False), nn.Linear(8, 6)
    lower, upper = (torch.compile(part, backend=backend.zbpp) for part in parts)
    plans = SplitPlanCache()
    for x in inputs()[:2]:
        y = upper(lower(x.detach()))
        graph = SplitGraph([y], plans=plans)
        graph.backward_input(torch.ones_like(y))
        graph.backward_weight()
    sums = [p.grad for part in parts for p in part.parameters()]
    nn.Module.zero_grad(nn.Sequential(*parts))
    for x in inputs()[:2]:
        upper(lower(x.detach())).sum().backward()
    whole = [p.grad for part in parts for p in part.parameters()]
    assert all(map(torch.equal, sums, whole))


@pytest.mark.parametrize("n", [3, 2], ids=["as one", "piece by piece"])
def test_an_operand_that_was_changed_is_an_error(plain_kernels: None, n: int) -> None:
    net, xs = Two(), inputs()[:n]

    def change(_: Two) -> None:
        with torch.no_grad():
            xs[-1].add_(1)

    with pytest.raises(RuntimeError, match="changed in place after B"):
        train(net, change, xs)
