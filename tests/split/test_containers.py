"""Inputs and outputs in containers keep their types; unknown ones are refused.

More kinds are between the layers of pipelines, in tests/comm/test_messages.py.
"""

from collections import UserDict, defaultdict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass
from zoo import Fn, lin

from zbpp.core import RequestError
from zbpp.runtime import SplitModule, split_forward


@dataclass(frozen=True, slots=True)
class Frozen:
    loss: Any


@dataclass
class Unregistered:
    loss: Tensor


register_dataclass(Frozen)


def nested(y: Tensor) -> Any:
    return [Frozen({"y": y}), defaultdict(list, text="text")]


def test_containers_keep_their_types_on_both_sides() -> None:
    def call(m: Any, container: Any) -> Any:
        frozen, rest = container
        assert type(frozen) is Frozen and rest["new"] == []
        return nested(m.a(frozen.loss["y"]))

    module, x = Fn(call, a=lin()), torch.randn(6, requires_grad=True)
    weight = module.get_parameter("a.weight")
    wanted = torch.autograd.grad(module(nested(x))[0].loss["y"].sum(), [x, weight])
    split = SplitModule(module)
    frozen, rest = split(nested(x))
    assert type(frozen) is Frozen and type(rest) is defaultdict
    frozen.loss["y"].sum().backward()
    split.dw_builder()()
    assert all(map(torch.equal, (x.grad, weight.grad), wanted))
    x.grad = weight.grad = None
    graph = split_forward(module, value=nested(x))
    assert torch.equal(graph.outputs[0].loss["y"], frozen.loss["y"])
    graph.backward_input([torch.ones(6)])
    graph.backward_weight()
    assert torch.equal(weight.grad, wanted[1]) and x.grad is None


@pytest.mark.parametrize("kind", [Unregistered, lambda y: {y}, lambda y: UserDict(y=y)])
def test_an_unknown_container_is_refused_by_name(kind: Any) -> None:
    layer = nn.Linear(4, 4)
    x = torch.randn(4, requires_grad=True)
    name = type(kind(x)).__name__
    for call in (
        lambda: split_forward(lambda box: layer(x), kind(x)),
        lambda: split_forward(lambda x: [1, {"y": kind(layer(x))}], x),
    ):
        with pytest.raises(RequestError, match=f"a {name} contains tensors"):
            call()
    split_forward(lambda box: layer(x), kind(torch.ones(4)))
    split_forward(lambda box: layer(x), kind(layer.weight))  # a parameter is no input
