"""Values of any kind come to the next chunk as they were sent, or are refused."""

import gc
import weakref
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import small
import torch
from pool import Pool
from torch import Tensor, nn
from torch.utils._pytree import (
    register_dataclass,
    register_pytree_node,
    tree_leaves,
    tree_map,
)

from zbpp.runtime import PeerError, ShapeError

WIDTH, M = 4, 3
Make = Callable[[Tensor], Any]


class Named(NamedTuple):
    """A named tuple."""

    one: Any
    two: Any


@dataclass
class Data:
    """A registered dataclass."""

    one: Any
    two: Any


@dataclass(frozen=True)
class Frozen:
    """A frozen one, with a field that is no tensor."""

    one: Any
    scale: float = 0.5


class Registered(UserDict[str, Any]):
    """A class that torch's pytree knows by its registration."""


register_dataclass(Data)
register_dataclass(Frozen)
register_pytree_node(
    Registered,
    lambda x: ([*x.values()], [*x]),
    lambda values, names: Registered(zip(names, values, strict=True)),
)

VALUES: dict[str, Make] = {
    "tensor": lambda x: x,
    "no sample": lambda x: (x, x[:0], torch.zeros(0, 3)),
    "dtypes": lambda x: [
        *(x.to(dtype) for dtype in (torch.float64, torch.bfloat16, torch.float16)),
        *(x.detach().to(dtype) for dtype in (torch.bool, torch.uint16, torch.int64)),
        torch.view_as_complex(x.reshape(-1, 2)),
    ],
    "no tensors": lambda x: {
        "x": x,
        "text": 'a "quoted" \u2603',
        "none": None,
        "rate": float("inf"),
        "yes": True,
        "empty": ((), [], {}),
    },
    "nested": lambda x: [x, (torch.tensor(True), [x[:, 0], {"mask": x.detach() > 0}])],
    "named tuple": lambda x: Named(x, 2 * x),
    "dataclass": lambda x: Data(x, None),
    "frozen dataclass": lambda x: Frozen([x, x.detach()]),
    "registered class": lambda x: Registered(one=x, two=x[:, 0]),
    "ordered dict": lambda x: OrderedDict(two=x, one=2 * x),
    "containers": lambda x: Named(Data(x, 1), {1: x, (2, "x"): deque(["a", x[:1]])}),
    "strided": lambda x: (x.t(), x.expand(3, *x.shape), x.detach()[:, ::2]),
    "twice": lambda x: {"x": x, "again": x, "view": x.t()},
    "many": lambda x: {f"layer {i}": x[:, : i % WIDTH] + i for i in range(300)},
}


class Makes(nn.Module):
    """Puts out a value of its bias: what comes in is the same number everywhere."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.make = VALUES[name]
        self.bias = nn.Parameter(torch.arange(1.0, WIDTH + 1))

    def forward(self, x: Tensor) -> Any:
        return self.make(x * 0 + self.bias)


class Checks(nn.Module):
    """Compares a value with what it must be, and returns it, or its sum."""

    def __init__(self, name: str, *, is_last: bool) -> None:
        super().__init__()
        self.make, self.is_last = VALUES[name], is_last

    def forward(self, value: Any) -> Any:
        bias = torch.arange(1.0, WIDTH + 1, requires_grad=True)
        expected = self.make(torch.zeros(2, WIDTH) + bias)
        assert looks(value) == looks(expected)
        return total(value) if self.is_last else value


def total(value: Any, targets: Any = None) -> Tensor:
    """Sum of all its numbers."""
    return torch.stack(
        [(x.abs() if x.is_complex() else x).float().sum() for x in tensors_of(value)]
    ).sum()


def tensors_of(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def looks(value: Any) -> str:
    """Containers, and kind and numbers of each tensor."""

    def look(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.dtype, [*x.shape], x.requires_grad, x.tolist()

    return repr(tree_map(look, value))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.125)


def arrive(n_stages: int | None) -> dict[str, Any]:
    """The bias and the loss after a step, by the name of the value."""
    found = {}
    for name in VALUES:
        middle = [Checks(name, is_last=False) for _ in range(2)]
        layers = [Makes(name), *middle, Checks(name, is_last=True)]
        how = {"n_stages": n_stages, "n_microbatches": 2, "optimizer": sgd}
        with small.make(layers, "ZBV", loss_fn=total, **how) as pipeline:
            x = torch.ones(4, WIDTH)
            losses = [pipeline.evaluate(x, x), pipeline.step(x, x).loss]
            bias = dict(pipeline.named_parameters()).get("layers.0.bias")
            found[name] = losses, bias if bias is None else bias.tolist()
    return found


def arrive_plainly() -> dict[str, Any]:
    found = {}
    for name, make in VALUES.items():
        bias = nn.Parameter(torch.arange(1.0, WIDTH + 1))
        loss = total(make(torch.zeros(2, WIDTH) + bias))
        loss.backward()
        sgd([bias]).step()
        found[name] = [loss.item()] * 2, bias.tolist()
    return found


def test_a_value_arrives_as_it_was_sent() -> None:
    assert arrive(2) == arrive_plainly()


@pytest.mark.dist
def test_a_value_arrives_at_another_process(pool: Pool) -> None:
    first, second = pool.run(arrive, 2, None)
    expected = arrive_plainly()
    assert first == expected
    assert second == {name: (losses, None) for name, (losses, _) in expected.items()}


class Forks(nn.Linear):
    """Puts out a pair of which the next layer reads only the first."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y, 2 * y


class First(nn.Linear):
    def __init__(self, *, detaches: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.detaches = detaches

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        first = pair[0].detach() if self.detaches else pair[0]
        return super().forward(first)


def fork(n_stages: int | None, detaches: bool) -> dict[str, Any]:
    """Gradients of two layers behind a cut that one tensor, or none, passes back."""
    torch.manual_seed(0)
    layers = [Forks(), First(detaches=detaches)]
    x = torch.ones(4, WIDTH)
    if not n_stages:
        (total(layers[1](layers[0](x))) / 2).backward()
        return {n: p.grad for n, p in nn.Sequential(*layers).named_parameters()}
    with small.make(
        layers, loss_fn=total, n_microbatches=2, optimizer=None
    ) as pipeline:
        pipeline.step(x, x)
        return {
            name.removeprefix("layers."): p.grad
            for name, p in pipeline.named_parameters()
        }


@pytest.mark.parametrize("detaches", [False, True])
def test_an_input_without_influence_gets_zeros(detaches: bool) -> None:
    """Whether the loss depends on another tensor of the value, or on none."""
    expected, gradients = fork(0, detaches), fork(2, detaches)
    for name, gradient in gradients.items():
        plain = expected[name]
        if plain is None:
            plain = torch.zeros_like(gradient)
        torch.testing.assert_close(gradient, plain)


class Depends(nn.Module):
    """Puts out something else once its inputs are below zero."""

    def __init__(self, usual: Make, other: Make) -> None:
        super().__init__()
        self.linear, self.ways = nn.Linear(WIDTH, WIDTH), (usual, other)

    def forward(self, x: Tensor) -> Any:
        return self.ways[bool((x < 0).all())](self.linear(x))


class Takes(nn.Module):
    def forward(self, value: Any) -> Tensor:
        return total(value)


REFUSED: dict[str, tuple[Make, Make, str]] = {
    "a shape by the data": (
        lambda x: x,
        lambda x: x[:, :1],
        "is float32[2, 1], but with inputs of the same shapes it was float32[2, 4]",
    ),
    "a dtype by the data": (
        lambda x: x,
        lambda x: x.double(),
        "is float64[2, 4], but with inputs of the same shapes it was float32[2, 4]",
    ),
    "a container by the data": (
        lambda x: {"x": x},
        lambda x: {"x": x, "mask": None},
        "is {'x': 'float32[2, 4]', 'mask': None}, but with",
    ),
    "sparse": (lambda x: x, lambda x: x.to_sparse(), "layout sparse_coo cannot be"),
}


def send(name: str, after_a_step: bool) -> str:
    usual, other, _ = REFUSED[name]
    layers = [Depends(usual, other), Takes()]
    pipeline = small.make(layers, "1F1B", loss_fn=total, n_microbatches=2)
    x = torch.ones(4, WIDTH)
    if after_a_step:
        pipeline.step(x, x)
        pipeline.evaluate(-x if "by the data" in name else x, x)
    try:
        pipeline.step(-x, x)
    except (ShapeError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return "sent"


@pytest.mark.dist
@pytest.mark.parametrize("name", REFUSED)
def test_values_that_cannot_be_sent_are_refused(pool: Pool, name: str) -> None:
    sender, receiver = pool.run(send, 2, name, "by the data" in name)
    words = REFUSED[name][2]
    assert sender.startswith("ShapeError: ") and words in sender
    assert "rank 0 failed first" in receiver and words in receiver


class InNumpy(torch.autograd.Function):
    """The identity, in memory whose end is seen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alive: list[Any]) -> Tensor:
        memory = x.detach().numpy().copy()
        alive.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Watched(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.alive: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        return InNumpy.apply(super().forward(x), self.alive)


def count_messages_left(mode: str) -> list[int]:
    """Outputs of this process that are there once a call is over."""
    layers = [Watched() for _ in range(4)]
    pipeline = small.make(layers, mode, n_microbatches=M, clip_grad_norm=1.0)
    x, counts = torch.ones(2 * M, WIDTH), []
    for call in ("step", "step", "evaluate", "predict"):
        getattr(pipeline, call)(*[x, x][: 1 if call == "predict" else 2])
        pipeline.synchronize()
        gc.collect()
        alive = [one() is not None for layer in layers for one in layer.alive]
        assert len(alive) >= M
        counts.append(sum(alive))
    return counts


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["1F1B", "VPP"])
def test_no_message_outlives_its_call(pool: Pool, mode: str) -> None:
    assert pool.run(count_messages_left, 2, mode) == [[0] * 4] * 2
