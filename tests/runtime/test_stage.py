"""Values keep their kind between the chunks of a stage, and no data without need."""

import weakref
from typing import Any

import pytest
import torch
from flat import flat_pipeline
from pool import Pool
from torch import Tensor, nn

from zbpp.core import RequestError, Value, What
from zbpp.runtime.chunk import Chunk
from zbpp.runtime.comm.shapes import spec_of
from zbpp.runtime.microbatches import split_inputs
from zbpp.runtime.stage import Stage
from zbpp.runtime.values import Nested


class InTuple(nn.Module):
    """Takes a tuple of one and hands on another; a bare tensor gives other numbers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(4, 4)

    def forward(self, value: Any) -> Any:
        assert type(value) is tuple and len(value) == 1
        return (self.inner(value[0]).tanh(),)


class Bare(InTuple):
    """The same for a bare tensor."""

    def forward(self, value: Any) -> Any:
        assert isinstance(value, Tensor)
        return self.inner(value).tanh()


class Between(nn.Module):
    """Takes a tuple of one out of it."""

    def forward(self, value: tuple[Tensor]) -> Tensor:
        (x,) = value
        return x


def layers(indices: range) -> list[nn.Module]:
    every = [InTuple(0), InTuple(1), InTuple(2), Between(), Bare(3), Bare(4)]
    return [every[index] for index in indices]


def train(n_stages: int | None, mode: str, **more: Any) -> list[float]:
    pipeline = flat_pipeline(
        layers, n_layers=6, loss_fn=lambda y, t: (y - t).square().mean(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1), n_microbatches=4,
        schedule=mode, n_stages=n_stages, **more,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    x, t = torch.randn(2, 8, 4, generator=generator)
    losses = [pipeline.step((x,), t).loss for _ in range(3)]
    losses.append(pipeline.evaluate((x,), t))
    pipeline.close()
    return losses


@pytest.mark.parametrize("recompute", ["none", "all"])
@pytest.mark.parametrize(("mode", "n_stages"), [("ZBH1", 3), ("ZBV", 2)])
def test_tuples_of_one_stay_tuples(mode: str, n_stages: int, recompute: Any) -> None:
    alone = train(1, "1F1B")
    assert train(n_stages, mode, recompute=recompute) == alone
    assert alone[0] > alone[-1]


@pytest.mark.dist
def test_tuples_of_one_stay_tuples_between_processes(pool: Pool) -> None:
    for losses in pool.run(train, 2, None, "ZBV"):
        assert losses == train(1, "1F1B")


def test_a_batch_is_cut_as_it_is_given() -> None:
    x = torch.ones(4, 2)
    assert all(type(piece) is tuple for piece in split_inputs(x, 2))
    assert all(type(piece) is Nested for piece in split_inputs((x,), 2))
    assert all(type(piece) is tuple for piece in split_inputs((x, x.clone()), 2))
    both = split_inputs([x, (x,)], 2)
    assert [type(piece) for piece in both] == [tuple, Nested]
    value = Value(What.ACTIVATION, 0, 0)
    assert str(spec_of(value, both[0])) == "float32[4, 2]"
    assert str(spec_of(value, both[1])) == "(float32[4, 2],)"


def stage(*parts: nn.Module, chunk: int = 0, n_chunks: int = 3) -> Stage:
    return Stage(
        [Chunk(chunk, 5, parts)], n_chunks=n_chunks, loss_fn=lambda y, t: y.sum() - t,
        device=torch.device("cpu"),
    )  # fmt: skip


class Puts(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return self.kind(x)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (lambda x: {"x": {x}}, "a set"),
        (lambda x: [x, 1j], "a complex"),
    ],
)
def test_a_wrong_kind_is_refused_by_name(kind: Any, name: str) -> None:
    x = torch.ones(2)
    held = stage(Puts(kind))
    held.begin(step=0, inputs=[(x,)], targets=None, n_microbatches=1)
    with pytest.raises(RequestError, match=f"layers 5 to 5. puts out {name}; it must"):
        held.forward(0, 0, None)
    with pytest.raises(RequestError, match=f"input of micro-batch 0 is {name}; it"):
        split_inputs([kind(x)], 1)


def test_outputs_are_let_go_once_handed_on() -> None:
    made: list[weakref.ref[Tensor]] = []

    def note(module: nn.Module, args: Any, y: Tensor) -> None:
        made.append(weakref.ref(y))

    layer = nn.Linear(4, 4)
    layer.register_forward_hook(note)
    held = stage(layer)
    held.begin(step=0, inputs=[(torch.ones(2, 4),)] * 2, targets=None, n_microbatches=2)
    for microbatch in range(2):
        held.forward(0, microbatch, None)
    assert [ref() for ref in made] == [None, None]
    for microbatch in range(2):
        held.backward_input(0, microbatch, (torch.ones(2, 4),))
        held.backward_weight(0, microbatch)
    held.assert_empty()
    assert torch.equal(layer.weight.grad, torch.full((4, 4), 4.0))


def test_the_loss_stays() -> None:
    held = stage(nn.Linear(4, 1), chunk=2)
    held.begin(step=0, inputs=None, targets=[torch.ones(())], n_microbatches=1)
    x = torch.ones(2, 4, requires_grad=True)
    (loss,) = held.forward(2, 0, (x,))
    assert (
        torch.equal(held.loss.values[0], loss) and not held.loss.values[0].requires_grad
    )
    held.loss_scale = 8.0  # read in B, not in F
    held.backward_input(2, 0, None)
    held.backward_weight(2, 0)
    assert torch.equal(held.loss.values[0], loss)
    (layer,) = held.chunks[2].layers
    assert torch.equal(layer.weight.grad, torch.full((1, 4), 16.0))


def test_a_chunk_may_begin_in_place() -> None:
    relu, layer = nn.ReLU(inplace=True), nn.Linear(4, 4)
    held = stage(nn.Sequential(relu, layer), chunk=1)
    held.begin(step=0, inputs=None, targets=None, n_microbatches=1)
    start = torch.randn(2, 4)
    held.forward(1, 0, (start.clone().requires_grad_(),))
    (dx,) = held.backward_input(1, 0, (torch.ones(2, 4),))
    held.backward_weight(1, 0)
    x = start.requires_grad_()
    want = layer.weight.grad
    layer.zero_grad()
    layer(x.relu()).sum().backward()
    assert torch.equal(dx, x.grad) and torch.equal(want, layer.weight.grad)
