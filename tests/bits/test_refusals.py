"""What a pipeline refuses while it runs: what, where, and the way out."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import small
import torch
from cases import Case, make
from pool import Pool
from small import linears
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass

import zbpp
from zbpp import RequestError
from zbpp.runtime import PeerError, ShapeError

VECTORS = Case(model="vectors")
LM = Case(model="lm", weigh="tokens")
X, Y = VECTORS.batch(0)


pipeline_of = partial(small.make, schedule="1F1B", optimizer=None)


# ---- Batches.


def test_labels_without_counted_tokens_are_refused() -> None:
    inputs, targets = LM.batch(0)
    labels = [{"answers": x} for x in targets.split(2)]
    pipeline = make(LM)
    with pytest.raises(RequestError, match="no tokens can be counted"):
        pipeline.step(inputs, labels)
    pipeline.step(*LM.batch(0))  # it harms nothing


def test_negative_weights_are_refused() -> None:
    weigh = zbpp.Numerics(weigh=lambda targets: -1.0)
    with pytest.raises(RequestError, match="give 0 or more"):
        make(VECTORS, numerics=weigh).step(X, Y)


def tolerant(outputs: Tensor, targets: Tensor) -> Tensor:
    """Take targets of any number, as losses that broadcast do."""
    return outputs.mean() + targets.float().mean()


def misfit(call: str) -> str:
    """Words of this rank."""
    pipeline = make(VECTORS, "1F1B", loss_fn=tolerant)
    try:
        with pipeline:
            getattr(pipeline, call)(X, Y[:6])
    except (RequestError, PeerError) as error:
        return str(error)
    return ""


@pytest.mark.dist
@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_unequal_inputs_and_targets_are_refused_on_all_ranks(
    pool: Pool, call: str
) -> None:
    for text in pool.run(misfit, 2, call):
        assert "inputs has 8 samples and targets 6" in text


# ---- Layers and losses.


@dataclass
class Unregistered:
    """A dataclass that torch's pytree does not know."""

    h: Tensor


class Puts(nn.Module):
    """Puts out what a function makes of its input."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.linear(x))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: {x}, r"layers 0 to 1\) puts out a set; .*register_pytree_node"),
        (lambda x: [x, 1j], r"layers 0 to 1\) puts out a complex; it must"),
        (lambda x: {"x": {x}}, r"layers 0 to 1\) puts out a set"),
        (Unregistered, r"puts out a Unregistered; .*dataclass with .*register_datac"),
    ],
)
def test_a_value_of_an_unregistered_class_is_refused(
    function: Callable[[Tensor], Any], words: str
) -> None:
    pipeline = pipeline_of([nn.Identity(), Puts(function), *linears(2)])
    with pytest.raises(RequestError, match=words):
        pipeline.step(X, Y)


class Writes(nn.Module):
    """Begins to write to its input in some forward."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.linear, self.first, self.count = nn.Linear(8, 8), first, 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.linear(x.add_(1.0) if self.count > self.first else x)


class Reuses(nn.Module):
    """The last layer, which returns one memory for all micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.memory = nn.Linear(8, 8), torch.zeros(2, 3, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.memory = self.memory.detach_().copy_(self.linear(x))
        return self.memory


@pytest.mark.parametrize(
    ("layers", "mode", "words", "notes"),
    [
        (lambda: [*linears(1), Writes(2)], "1F1B", "in-place",
         ["layers.1 (layer 1)", "let it write to x.clone()"]),
        (lambda: [*linears(3), Reuses()], "FThenB", "inplace",
         ["in chunk 1, layers 2 to 3"]),
    ],
    ids=["late", "reused"],
)  # fmt: skip
def test_writing_to_saved_memory_raises_and_names_the_layer(
    layers: Any, mode: str, words: str, notes: list[str]
) -> None:
    with pytest.raises(RuntimeError, match=words) as caught:
        pipeline_of(layers(), schedule=mode).step(X, Y)
    text = "".join(caught.value.__notes__)
    assert all(note in text for note in notes), text


def test_a_recomputed_layer_that_writes_to_its_input_is_refused() -> None:
    schedule = zbpp.plan("1F1B", n_stages=2, n_microbatches=4)
    pipeline_of([*linears(1), Writes(0)], schedule=schedule).step(X, Y)
    again = replace(schedule, recompute=(True, True))
    pipeline = pipeline_of([*linears(1), Writes(0)], schedule=again)
    with pytest.raises(RequestError, match=r"layers\.1 .* writes to its input"):
        pipeline.step(X, Y)


def test_an_error_names_the_job_and_ends_the_pipeline() -> None:
    pipeline = make(LM)
    pipeline.step(*LM.batch(0))
    inputs, targets = LM.batch(1)
    with pytest.raises(IndexError, match="out of range") as caught:
        pipeline.step(inputs + 100, targets)
    assert "in 0F0" in caught.value.__notes__
    with pytest.raises(RuntimeError, match=r"step 1 failed .*IndexError"):
        pipeline.step(*LM.batch(1))


def put_out_a_local_class() -> str:
    """Words of the rank that cannot send it."""

    @dataclass
    class Local:
        h: Tensor

    class Takes(nn.Linear):
        def forward(self, x: Any) -> Tensor:
            return super().forward(x.h)

    register_dataclass(Local)

    try:
        pipeline_of([Puts(Local), Takes(8, 8)]).step(X, Y)
    except (RequestError, PeerError) as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_an_output_of_a_local_class_is_refused_between_processes(pool: Pool) -> None:
    assert put_out_a_local_class() == ""
    for words in pool.run(put_out_a_local_class, 2):
        assert "define its class in a module" in words


def freeze_between_steps() -> str:
    """Words of the rank that finds it."""
    layers = [*linears(4)]
    layers[2] = Puts(lambda y: y.detach())
    pipeline = pipeline_of(layers, timeout_s=20.0)
    for _ in range(2):
        pipeline.step(X, Y)
    for layer in layers[:2]:
        layer.requires_grad_(False)
    try:
        pipeline.step(X, Y)
    except (ShapeError, PeerError) as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_freezing_parameters_between_steps_is_an_error(pool: Pool) -> None:
    words, _ = pool.run(freeze_between_steps, 2)
    assert "parameters were frozen or thawed" in words


# ---- Recomputation.


@pytest.mark.parametrize(
    ("recompute", "expected"),
    [("all", (True, True)), ("none", None), ((1, 2, 7), ((1, 2), (3,)))],
)
def test_recompute_is_stored_in_the_schedule(recompute: Any, expected: Any) -> None:
    assert make(replace(VECTORS, recompute=recompute)).schedule.recompute == expected
