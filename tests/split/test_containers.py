"""Inputs and outputs in containers keep their types; unknown ones are refused.

More kinds are between the layers of the pipelines in tests/bits.
"""

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass
from zoo import Fn, lin

from zbpp.core import RequestError
from zbpp.runtime import SplitModule, split_forward

Pair = namedtuple("Pair", "one two")


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    loss: Tensor


@dataclasses.dataclass
class Unregistered:
    loss: Tensor


class Opaque:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class Slotted:
    __slots__ = ("loss",)

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


register_dataclass(Frozen)
Read = Callable[[Any], Tensor]
KINDS: dict[str, tuple[Callable[[Tensor], Any], Read]] = {
    "frozen dataclass": (Frozen, lambda c: c.loss),
    "default dict": (
        lambda y: defaultdict(list, loss=y),
        lambda c: c["loss"] if c["new"] == [] else None,
    ),
    "return type": (lambda y: torch.max(y[None], 0), lambda c: c.values),
    "nested": (
        lambda y: [Frozen(y), OrderedDict(more=Pair(y * 2, None), text="text")],
        lambda c: c[0].loss + c[1]["more"].one,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_container_keeps_its_type_on_both_sides(kind: str) -> None:
    make, read = KINDS[kind]

    def call(m: Any, container: Any) -> Any:
        assert type(container) is type(make(x))
        return make(m.a(read(container).reshape(6)))

    module, x = Fn(call, a=lin()), torch.randn(6, requires_grad=True)
    weight = module.get_parameter("a.weight")
    wanted = torch.autograd.grad(read(module(make(x))).sum(), [x, weight])
    split = SplitModule(module)
    outputs = split(make(x))
    assert type(outputs) is type(make(x))
    read(outputs).sum().backward()
    split.dw_builder()()
    assert all(map(torch.equal, (x.grad, weight.grad), wanted))
    x.grad = weight.grad = None
    graph = split_forward(module, value=make(x))
    assert torch.equal(read(graph.outputs), read(outputs))
    graph.backward_input([torch.ones(6)] * (2 if kind == "nested" else 1))
    graph.backward_weight()
    assert torch.equal(weight.grad, wanted[1]) and x.grad is None


UNKNOWN = [Opaque, Slotted, Unregistered, lambda y: {y}, lambda y: UserDict(y=y)]


@pytest.mark.parametrize("kind", UNKNOWN)
def test_an_unknown_container_is_refused_by_name(kind: Any) -> None:
    layer = nn.Linear(4, 4)
    x = torch.randn(4, requires_grad=True)
    name = type(kind(x)).__name__
    for call in (
        lambda: split_forward(lambda box: layer(x), kind(x)),
        lambda: split_forward(lambda x: [1, {"y": kind(layer(x))}], x),
    ):
        with pytest.raises(RequestError, match=f"a {name} holds tensors"):
            call()
    split_forward(lambda box: layer(x), kind(torch.ones(4)))
    split_forward(lambda box: layer(x), kind(layer.weight))  # a parameter is no input
    split_forward(lambda m: m(x), layer)  # nor is a module
