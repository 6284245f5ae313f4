"""Inputs and outputs in containers keep their types; unknown ones are refused."""

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zbpp.core import RequestError
from zbpp.runtime import SplitModule, split_forward

Pair = namedtuple("Pair", "one two")


@dataclasses.dataclass
class Output:
    loss: Any
    name: str = "y"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    loss: Tensor
    rest: list[Tensor] = dataclasses.field(default_factory=list, init=False)


class ModelOutput(OrderedDict[str, Any]):
    """Like those of Hugging Face: its items are attributes, too."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Registered(ModelOutput):
    pass


pytree.register_pytree_node(
    Registered,
    lambda d: (list(d.values()), list(d)),
    lambda values, names: Registered(zip(names, values, strict=True)),
)


class Opaque:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class Slotted:
    __slots__ = ("loss",)

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


Read = Callable[[Any], Tensor]
KINDS: dict[str, tuple[Callable[[Tensor], Any], Read]] = {
    "dataclass": (Output, lambda c: c.loss),
    "frozen dataclass": (Frozen, lambda c: c.loss),
    "model output": (lambda y: ModelOutput(loss=y), lambda c: c.loss),
    "registered": (lambda y: Registered(loss=y), lambda c: c.loss),
    "ordered dict": (lambda y: OrderedDict(loss=y, n=1), lambda c: c["loss"]),
    "default dict": (
        lambda y: defaultdict(list, loss=y),
        lambda c: c["loss"] if c["new"] == [] else None,
    ),
    "user dict": (lambda y: UserDict(loss=y), lambda c: c["loss"]),
    "deque": (lambda y: deque([y]), lambda c: c[0]),
    "named tuple": (lambda y: Pair(y, 3), lambda c: c.one),
    "return type": (lambda y: torch.max(y[None], 0), lambda c: c.values),
    "nested": (
        lambda y: [Output(y), {"more": Pair(y * 2, None)}],
        lambda c: c[0].loss + c[1]["more"].one,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_container_keeps_its_type_on_both_sides(kind: str) -> None:
    make, read = KINDS[kind]
    layer = nn.Linear(4, 4)
    x = torch.randn(4, requires_grad=True)

    def function(container: Any) -> Any:
        assert type(container) is type(make(x))
        return make(layer(read(container).reshape(4)))

    loss = read(function(make(x))).sum()
    wanted = torch.autograd.grad(loss, [x, layer.weight])
    split: Any = SplitModule(nn.Identity())
    split.module.forward = function
    outputs = split(make(x))
    assert type(outputs) is type(make(x))
    read(outputs).sum().backward()
    split.dw_builder()()
    found = x.grad, layer.weight.grad
    assert all(map(torch.equal, found, wanted))
    x.grad = layer.weight.grad = None
    graph = split_forward(function, make(x))
    assert type(graph.outputs) is type(outputs)
    assert torch.equal(read(graph.outputs), read(outputs))
    dy = [torch.ones(4)] * (2 if kind == "nested" else 1)
    if kind == "return type":
        dy = [torch.ones(4)]
    graph.backward_input(dy)
    graph.backward_weight()
    assert torch.equal(layer.weight.grad, wanted[1]) and x.grad is None


def test_arguments_may_be_nested_and_named() -> None:
    def function(x: Tensor, pair: Any, *, scale: float, more: Any) -> Any:
        y = layer(x + pair[1]) * scale
        return {"y": y, "rest": [more["z"] * 2, "text", None], "n": len(pair)}

    layer = nn.Linear(4, 4)
    x, p, z = (torch.randn(2, 4, requires_grad=True) for _ in range(3))
    constant = torch.randn(2, 4)
    graph = split_forward(function, x, (constant, p), scale=0.5, more={"z": z, "m": 3})
    outputs = graph.outputs
    assert outputs["n"] == 2 and outputs["rest"][1:] == ["text", None]
    assert outputs["y"].requires_grad and outputs["y"].is_leaf
    dy = torch.randn(2, 4)
    dx, dp, dz = graph.backward_input([dy, dy])
    assert torch.equal(dz, dy * 2) and torch.equal(dx, dp)
    assert x.grad is None and layer.weight.grad is None
    graph.backward_weight()
    (wanted,) = torch.autograd.grad(layer(x + p) * 0.5, layer.weight, dy)
    assert torch.equal(layer.weight.grad, wanted)


@pytest.mark.parametrize("kind", [Opaque, Slotted, lambda y: {y}])
def test_an_unknown_container_is_refused_by_name(kind: Any) -> None:
    layer = nn.Linear(4, 4)
    x = torch.randn(4, requires_grad=True)
    name = type(kind(x)).__name__
    for call in (
        lambda: split_forward(lambda box: layer(x), kind(x)),
        lambda: split_forward(lambda x: kind(layer(x)), x),
        lambda: split_forward(lambda x: [1, {"y": kind(layer(x))}], x),
    ):
        with pytest.raises(RequestError, match=f"a {name} holds tensors"):
            call()
    split_forward(lambda box: layer(x), kind(torch.ones(4)))
    split_forward(lambda box: layer(x), kind(layer.weight))  # a parameter is no input


def test_a_module_may_be_an_argument() -> None:
    layer = nn.Linear(4, 4)
    graph = split_forward(lambda m, x: m(x).sum(), layer, torch.ones(4))
    graph.backward_input()
    graph.backward_weight()
    assert layer.weight.grad is not None
