"""Every layer of a stage as a separate chunk, on its inputs of a step.

    chunk, in steps   F ........... B ........... W ...........
    layers, alone     F | F | F     B | B | B     W | W | W

Rounds go through all layers, so that a slow spell of the machine hits all of them.
Between layers the graph is cut, as it is between chunks, so B and W of each are
separate. Their times give each layer's share of the times of a chunk.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch

from zbpp.profiling.means import robust_mean
from zbpp.runtime.chunk import Chunk
from zbpp.runtime.driver.build import Settings
from zbpp.runtime.job_times import JobTimes
from zbpp.runtime.microbatches import MicroBatches
from zbpp.runtime.overlap import marked
from zbpp.runtime.stage import Stage
from zbpp.runtime.support.devices import runs_ahead
from zbpp.runtime.support.pytree import map_tensors
from zbpp.runtime.values import Tensors, as_tensors, mapped

WARM_UP = 2
"""Steps, and rounds of the layers, that do not count."""
_SMALL_GRADIENT = 1e-3
_MS = 1e3

_T = TypeVar("_T")


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


class _Stopwatch:
    """Notes when pieces of work run, by name; on GPUs with events, read at the end."""

    def __init__(self, device: torch.device) -> None:
        self._times = JobTimes(device)
        self._marks: dict[Hashable, list[tuple[Any, ...]]] = defaultdict(list)

    def time(self, name: Hashable, action: Callable[..., _T], *args: Any) -> _T:
        """Call something, and note its time."""
        start = self._times.now()
        result = action(*args)
        self._marks[name].append((start, self._times.now()))
        return result

    def time_pass(
        self, name: Hashable, action: Callable[..., _T], *args: Any, is_forward: bool
    ) -> _T:
        """Call an F or a B; note also when it communicates, see `parts`."""
        now = self._times.now
        start = now()
        with marked(now, is_forward=is_forward) as points:
            result = action(*args)
        self._marks[name].append((start, *points, now()))
        return result

    def forget(self) -> None:
        """Discard the times so far: they were the warm-up."""
        self._marks.clear()

    def mean(self, name: Hashable) -> float:
        """Robust mean of the times of one piece of work, in ms."""
        return robust_mean([_ms(marks[0], marks[-1]) for marks in self._marks[name]])

    def parts(self, name: Hashable) -> list[float]:
        """Mean times, in ms, of a pass's parts: computes, communicates, computes, ...

        One alone where it communicates nothing, or not equally often in all calls.
        """
        calls = self._marks[name]
        if len(set(map(len, calls))) != 1:
            return [self.mean(name)]
        columns = zip(*calls, strict=True)
        return [
            robust_mean([*map(_ms, starts, ends)]) for starts, ends in pairwise(columns)
        ]


def _ms(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return _MS * (float(end) - start)
    end.synchronize()
    return float(start.elapsed_time(end))


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
    watch, last = _Stopwatch(settings.device), n_layers - 1
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
            if runs_ahead(settings.device):  # a round's time includes no other's
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
    watch: _Stopwatch,
    messages: dict[int, int],
) -> None:
    """Time F of each layer, B from the last one on, then W."""
    value, gradients = inputs, {}
    for index in chunk.indices:
        layer_inputs = copied(value) if index else None  # layer 0 reads the batch
        value = watch.time_pass(
            ("F", index), single.forward, index, 0, layer_inputs, is_forward=True
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
    """Copy tensors: a layer may write to its inputs."""
    return mapped(tensors, lambda x: x.detach().clone().requires_grad_(x.requires_grad))
