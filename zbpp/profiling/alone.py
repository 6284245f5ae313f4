"""Every layer of a stage as a chunk of its own, on what it reads in a step.

    chunk, in steps   F ........... B ........... W ...........
    layers, alone     F | F | F     B | B | B     W | W | W

Rounds go through all layers, so that a slow spell of the machine hits all of them.
Between layers the graph is cut, as it is between chunks, so B and W of each are its
own. Their times say how a chunk's are dealt to its layers.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from zbpp.profiling.stopwatch import Stopwatch
from zbpp.runtime.chunk import Chunk
from zbpp.runtime.driver.build import Settings
from zbpp.runtime.microbatches import MicroBatches
from zbpp.runtime.stage import Stage
from zbpp.runtime.support.devices import runs_ahead
from zbpp.runtime.support.pytree import map_tensors
from zbpp.runtime.values import Tensors, as_tensors, mapped

__all__ = ["WARM_UP", "LayerTimes", "copied", "noted_inputs", "time_layers"]

WARM_UP = 2
"""Steps, and rounds of the layers, that do not count."""
_SMALL_GRADIENT = 1e-3


@dataclass(frozen=True)
class LayerTimes:
    """Means in ms, sizes in bytes.

    Args:
        f, b, w: the passes; the last layer's F has the loss.
        loss: the loss alone.
        parts: by F and B, what they compute, communicate, compute, ...
        message: the output.
        n_learning: elements of the parameters that are trained.
    """

    f: float
    b: float
    w: float
    loss: float
    parts: Mapping[str, list[float]]
    message: int
    n_learning: int


@contextmanager
def noted_inputs(stage: Stage) -> Iterator[dict[int, Tensors]]:
    """Within this, note what each chunk of a stage reads first, by chunk.

    The calls of the first layers are replaced: a hook would be compiled with them.
    """
    inputs: dict[int, Tensors] = {}

    def note(chunk: Chunk, value: object) -> object:
        if chunk.index not in inputs:
            inputs[chunk.index] = copied(as_tensors(value))
        return chunk.call(chunk.first)(value)

    chunks = stage.chunks
    stage.chunks = {
        index: replace(chunk, calls={**chunk.calls, chunk.first: partial(note, chunk)})
        for index, chunk in chunks.items()
    }
    try:
        yield inputs
    finally:
        stage.chunks = chunks


def time_layers(
    stage: Stage,
    inputs: Mapping[int, Tensors],
    settings: Settings,
    *,
    n_layers: int,
    rounds: int,
) -> dict[int, LayerTimes]:
    """Run the layers of a stage that has taken steps; their gradients are then None.

    Args:
        stage: with the chunks, and the batch of the last step.
        inputs: of each chunk, from `noted_inputs`.
        settings: of the stage.
        n_layers: of the whole model.
        rounds: that count.
    """
    watch, last = Stopwatch(settings.device), n_layers - 1
    single = Stage(
        [
            Chunk(index, index, (layer,), calls={index: chunk.call(index)})
            for chunk in stage.chunks.values()
            for index, layer in chunk.numbered()
        ],
        n_chunks=n_layers,
        loss_fn=partial(watch.time, ("loss", last), settings.loss_fn),
        device=settings.device,
        autocast=settings.numerics.autocast,
        exact_sums=settings.numerics.exact_sums,
    )
    messages: dict[int, int] = {}
    with stage.random.restored():
        for i in range(WARM_UP + rounds):
            if i == WARM_UP:
                watch.forget()
            _begin(single, stage.batch, inputs.get(0))
            for chunk in stage.chunks.values():
                _time_chunk(single, chunk, inputs[chunk.index], watch, messages)
            if runs_ahead(settings.device):  # a round's time is its own
                torch.accelerator.synchronize(settings.device)
    for _, layer in stage.numbered():
        layer.zero_grad(set_to_none=True)
    return {
        index: LayerTimes(
            f=watch.mean(("F", index)),
            b=watch.mean(("B", index)),
            w=watch.mean(("W", index)),
            loss=watch.mean(("loss", index)),
            parts={kind: watch.parts((kind, index)) for kind in "FB"},
            message=messages[index],
            n_learning=sum(p.numel() for p in layer.parameters() if p.requires_grad),
        )
        for index, layer in stage.numbered()
    }


def _begin(single: Stage, batch: MicroBatches, first: Tensors | None) -> None:
    """Start a step of one micro-batch: copies, as layers and losses may change it."""
    targets = batch.targets and [
        map_tensors(batch.targets[0], lambda x: x.detach().to(single.device, copy=True))
    ]
    inputs = None if first is None else [copied(first)]
    single.begin(MicroBatches(1, batch.step, inputs, targets))


def _time_chunk(
    single: Stage,
    chunk: Chunk,
    inputs: Tensors,
    watch: Stopwatch,
    messages: dict[int, int],
) -> None:
    """Time F of each layer, B from the last one on, then W."""
    value, gradients = inputs, {}
    for index in chunk.indices:
        given = copied(value) if index else None  # layer 0 reads the batch
        value = watch.time_pass(
            ("F", index), single.forward, index, 0, given, is_forward=True
        )
        messages[index] = sum(y.nbytes for y in value)
        gradients[index] = tuple(
            torch.full_like(y, _SMALL_GRADIENT) for y in value if y.requires_grad
        )
    for index in reversed(chunk.indices):
        dy = gradients.pop(index)
        watch.time_pass(
            ("B", index), single.backward_input, index, 0, dy, is_forward=False
        )
    for index in reversed(chunk.indices):
        watch.time(("W", index), single.backward_weight, index, 0)


def copied(tensors: Tensors) -> Tensors:
    """Copy tensors: a layer may change in place what it reads."""
    return mapped(tensors, lambda x: x.detach().clone().requires_grad_(x.requires_grad))
