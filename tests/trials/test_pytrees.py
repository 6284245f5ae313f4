"""Containers of all kinds in batches and between layers: they keep their types."""

import importlib.util
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils import _pytree

import zbpp

M = 4


class Named(NamedTuple):
    h: Any
    a: Any


@dataclass
class Data:
    h: Any
    a: Any


@dataclass(frozen=True)
class Frozen:
    h: Any
    a: Any
    scale: float = 0.5


class Registered:
    def __init__(self, h: Any, a: Any) -> None:
        self.h, self.a = h, a


_pytree.register_pytree_node(
    Registered, lambda x: ([x.h, x.a], None), lambda children, _: Registered(*children)
)


class Heads(NamedTuple):
    """Containers in containers, with keys that are no texts."""

    data: Data
    by_number: dict[Any, Any]
    rest: deque[Any]


def model_output(h: Any, a: Any) -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPast

    return BaseModelOutputWithPast(last_hidden_state=h, past_key_values=a)


Make = Callable[[Any, Any], Any]
Read = Callable[[Any], tuple[Any, Any]]


def attributes(value: Any) -> tuple[Any, Any]:
    return value.h, value.a


def items(value: Any) -> tuple[Any, Any]:
    return value["h"], value["a"]


KINDS: dict[str, tuple[Make, Read]] = {
    "named tuple": (Named, attributes),
    "dataclass": (Data, attributes),
    "frozen": (Frozen, attributes),
    "registered": (Registered, attributes),
    "OrderedDict": (lambda h, a: OrderedDict(a=a, h=h), items),
    "dict": (lambda h, a: {"h": h, "a": a}, items),
    "ModelOutput": (
        model_output, lambda value: (value.last_hidden_state, value["past_key_values"])
    ),
    "nested": (
        lambda h, a: Heads(Data(h, None), {1: a, (2, "x"): True}, deque(["a", a])),
        lambda value: (value.data.h, value.by_number[1]),
    ),
}  # fmt: skip


class Layer(nn.Module):
    """Reads and returns a container, but for the last one, and checks its type."""

    def __init__(self, kind: tuple[Make, Read], index: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.kind, self.index = kind, index

    def forward(self, value: Any) -> Any:
        make, read = self.kind
        h, a = read(value)
        assert type(value) is type(make(h, a)), type(value)
        if isinstance(value, dict):
            assert [*value] == [*make(h, a)]
        return make(self.linear(h).tanh() + a, 0.5 * a)


def make_layers(kind: str) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Layer(KINDS[kind], index) for index in range(4)]


def loss_of(kind: str, outputs: Any, targets: Tensor) -> Tensor:
    h, a = KINDS[kind][1](outputs)
    return mse_loss(h + a, targets)


def batch(kind: str) -> tuple[Any, Tensor]:
    h, a, y = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(0))
    return KINDS[kind][0](h, a), y


Trained = tuple[list[float], Any]


def train(kind: str, mode: str, n_stages: int | None) -> Trained:
    pipeline = zbpp.Pipeline(
        make_layers(kind), mode, loss_fn=partial(loss_of, kind), n_stages=n_stages,
        n_microbatches=M, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        execution=zbpp.Execution(timeout_s=60.0),
    )  # fmt: skip
    x, y = batch(kind)
    losses = [pipeline.step(x, y).loss for _ in range(2)]
    outputs = pipeline.predict(x)
    pipeline.close()
    if outputs is None:
        return losses, None
    assert type(outputs) is type(x)
    return losses, KINDS[kind][1](outputs)


def plain(kind: str) -> Trained:
    model = nn.Sequential(*make_layers(kind))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batch(kind)
    losses = []
    for _ in range(2):
        h, a = KINDS[kind][1](x)
        parts = zip(h.chunk(M), a.chunk(M), y.chunk(M), strict=True)
        each = [
            loss_of(kind, model(KINDS[kind][0](h, a)), targets)
            for h, a, targets in parts
        ]
        (sum(each) / M).backward()
        losses.append(sum(loss.item() for loss in each) / M)
        optimizer.step()
        optimizer.zero_grad()
    return losses, tuple(z.detach() for z in KINDS[kind][1](model(x)))


def check(found: Trained, expected: Trained) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    if found[1] is not None:
        torch.testing.assert_close(found[1], expected[1])


@pytest.mark.parametrize("kind", KINDS)
def test_containers_keep_their_types(kind: str) -> None:
    if kind == "ModelOutput":
        pytest.importorskip("transformers")
    check(train(kind, "ZBV", 2), plain(kind))


def train_all(mode: str, kinds: list[str]) -> list[Trained]:
    return [train(kind, mode, None) for kind in kinds]


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["ZBH1", "ZBV"])
def test_so_they_do_between_processes(pool: Pool, mode: str) -> None:
    kinds = [kind for kind in KINDS if kind != "ModelOutput"]
    if importlib.util.find_spec("transformers") is not None:
        kinds.append("ModelOutput")
    for found in pool.run(train_all, 2, mode, kinds):
        for kind, of_kind in zip(kinds, found, strict=True):
            check(of_kind, plain(kind))


class Opaque(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return {x}


def test_what_no_pytree_knows_is_refused_by_name() -> None:
    pipeline = zbpp.Pipeline(
        [Opaque(), nn.Linear(8, 8)], "1F1B", loss_fn=mse_loss, optimizer=None,
        n_stages=2, n_microbatches=1,
    )  # fmt: skip
    words = r"layers 0 to 0\) puts out a set; .*register_pytree_node"
    with pytest.raises(zbpp.RequestError, match=words):
        pipeline.step(torch.ones(2, 8), torch.ones(2, 8))


def put_out_a_local_class() -> str:
    """Words of the rank that cannot send it."""

    @dataclass
    class Local:
        h: Tensor

    class Puts(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return Local(super().forward(x))

    class Takes(nn.Linear):
        def forward(self, x: Any) -> Tensor:
            return super().forward(x.h)

    pipeline = zbpp.Pipeline(
        [Puts(8, 8), Takes(8, 8)], "1F1B", loss_fn=mse_loss, optimizer=None,
        n_microbatches=1, n_stages=2 if not dist.is_initialized() else None,
        execution=zbpp.Execution(timeout_s=60.0),
    )  # fmt: skip
    try:
        pipeline.step(torch.ones(2, 8), torch.ones(2, 8))
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_a_class_that_only_one_process_knows_is_refused(pool: Pool) -> None:
    assert put_out_a_local_class() == ""
    for words in pool.run(put_out_a_local_class, 2):
        assert "define its class in a module" in words
