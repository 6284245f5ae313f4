"""Containers keep their types through a split forward; unknown ones are refused."""

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zbpp.core import RequestError
from zbpp.runtime import SplitModule, split_forward
from zbpp.runtime.support.pytree import map_tensors, tensors_in

Pair = namedtuple("Pair", "one two")


@dataclasses.dataclass
class Output:
    loss: Tensor
    name: str = "y"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    loss: Tensor
    rest: list[Tensor] = dataclasses.field(default_factory=list, init=False)


class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """As Hugging Face's: its items are attributes, too."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Registered(ModelOutput):
    pass


pytree.register_pytree_node(
    Registered,
    lambda d: (list(d.values()), list(d)),
    lambda values, names: Registered(zip(names, values, strict=True)),
)


def default(loss: Tensor) -> Any:
    made = defaultdict(list)
    made["loss"] = loss
    return made


class Opaque:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class Slotted:
    __slots__ = ("loss",)

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


KINDS = {
    "dataclass": Output,
    "frozen dataclass": Frozen,
    "model output": lambda y: ModelOutput(loss=y),
    "registered": lambda y: Registered(loss=y),
    "ordered dict": lambda y: OrderedDict(loss=y, n=1),
    "default dict": default,
    "user dict": lambda y: UserDict(loss=y),
    "deque": lambda y: deque([y]),
    "named tuple": lambda y: Pair(y, 3),
    "return type": lambda y: torch.max(y[None], 0),
    "nested": lambda y: [Output(y), {"more": Pair(y * 2, None)}],  # type: ignore[arg-type]
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_module", [False, True])
def test_outputs_keep_their_container(kind: str, is_module: bool) -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Any:
            return KINDS[kind](self.inner(x).sum())

    module = Module()
    x = torch.randn(3, 4)
    want = module(x)
    if is_module:
        split = SplitModule(module)
        found = split(x)
        sum(y for y in tensors_in(found) if y.requires_grad).backward()
        split.dw_builder()()
    else:
        graph = split_forward(module, x)
        found = graph.outputs
        graph.backward_input()
        graph.backward_weight()
    assert type(found) is type(want)
    assert all(map(torch.equal, tensors_in(found), tensors_in(want)))
    if hasattr(want, "loss"):
        assert torch.equal(found.loss, want.loss)
    if kind == "default dict":
        assert found["new"] == []
    got, module.inner.weight.grad = module.inner.weight.grad, None
    sum(y for y in tensors_in(want) if y.requires_grad).backward()
    assert got is not None
    assert torch.equal(got, module.inner.weight.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_in_a_container_have_gradients(kind: str) -> None:
    layer = nn.Linear(4, 4)
    x = torch.randn(4, requires_grad=True)
    given = KINDS[kind](x)

    def function(thing: Any) -> Tensor:
        assert type(thing) is type(given)
        return layer(tensors_in(thing)[0].reshape(-1))

    graph = split_forward(function, given)
    dx, *_ = graph.backward_input(torch.ones(4))
    assert torch.equal(dx.reshape(-1), torch.ones(4) @ layer.weight)
    assert x.grad is None


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


def test_what_holds_no_tensor_stays_itself() -> None:
    fixed = Pair(1, "a"), slice(2), Opaque(torch.ones(1))
    assert all(map_tensors(thing, torch.clone) is thing for thing in fixed)
    assert map_tensors(torch.Size([3]), torch.clone) == torch.Size([3])
    held = {"list": [1, 2]}
    assert map_tensors(held, torch.clone)["list"] is not held["list"]
