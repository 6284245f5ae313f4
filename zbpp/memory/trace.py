"""Run the runtime's own stage on fake tensors, and count what each pass takes.

The split of the backward, checkpoints and the order of releases are then those of a
run. A first micro-batch makes the gradients; a second one finds them there.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.utils.checkpoint import checkpoint

from zbpp.memory.passes import ChunkPasses, LayerPasses, Messages
from zbpp.memory.recorder import Recorder, WatchedLayer
from zbpp.memory.tracker import Span, StorageTracker
from zbpp.runtime.chunk import Chunk
from zbpp.runtime.layer_random import LayerRandom
from zbpp.runtime.microbatches import MicroBatches
from zbpp.runtime.stage import LossFn, Stage
from zbpp.runtime.support.devices import runs_ahead
from zbpp.runtime.support.pytree import tensors_in
from zbpp.runtime.values import Tensors, as_tensors, with_tensors

__all__ = [
    "UNKNOWN",
    "ChunkInputs",
    "TraceOptions",
    "Traced",
    "UnknownNumbers",
    "granularity_of",
    "tensors_of",
    "trace_chunk",
]

UNKNOWN = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
_GPU_BLOCK = 512  # bytes; torch's allocators for CUDA and XPU round up to it


@dataclass(frozen=True)
class TraceOptions:
    """Settings of the stages, as of `zbpp.Pipeline`."""

    device: torch.device
    loss_fn: LossFn | None = None
    autocast: torch.dtype | None = None
    exact_sums: bool = True


@dataclass(frozen=True)
class ChunkInputs:
    """Inputs of a chunk.

    Args:
        inputs: a micro-batch of the first chunk; None on the others.
        sent: `Spec`s as a value travels, what another chunk gets from the one before.
        targets: a micro-batch of the loss.
        is_last: the chunk ends the model.
    """

    inputs: Any = None
    sent: Any = None
    targets: Any = None
    is_last: bool = False


class UnknownNumbers(Exception):
    """A layer that decides by numbers which fake tensors do not have.

    Args:
        place: of the layer among those traced.
        operator: whose result depends on numbers.
    """

    def __init__(self, place: int, operator: str) -> None:
        super().__init__(operator)
        self.place = place


def granularity_of(device: torch.device) -> int:
    """Bytes that an allocation is a multiple of."""
    return _GPU_BLOCK if runs_ahead(device) else 1


def trace_chunk(
    mode: Any,
    layers: Sequence[nn.Module],
    inputs: ChunkInputs,
    options: TraceOptions,
    *,
    recomputed: bool = False,
) -> "Traced":
    """Trace F, B and W of one chunk on two micro-batches, and BW on two more.

    Args:
        mode: of all fake tensors.
        layers: of the chunk.
        inputs: its inputs.
        options: of the stage.
        recomputed: run every layer inside a non-reentrant checkpoint.

    Raises:
        UnknownNumbers: a layer decides by numbers that are not known.
    """
    tracker = StorageTracker(granularity=granularity_of(options.device))
    recorder = Recorder(tracker, len(layers))
    run = _checkpointed if recomputed else None
    watched = [WatchedLayer(x, i, recorder, run) for i, x in enumerate(layers)]
    is_first = inputs.sent is None
    index = 0 if is_first else 1
    n_chunks = index + 1 if inputs.is_last else index + 2
    held = [*tensors_of(layers), *tensors_in((inputs.inputs, inputs.targets))]
    with LayerRandom(torch.device("cpu")).restored(), mode:
        tracker.ignore(held)
        stage = Stage(
            [Chunk(index, 0, tuple(watched))],
            n_chunks=n_chunks,
            loss_fn=_watched_loss(options.loss_fn or _no_loss, recorder),
            device=options.device,
            autocast=options.autocast,
            exact_sums=options.exact_sums,
        )
        targets = [inputs.targets] * 4 if inputs.targets is not None else None
        read = [as_tensors(inputs.inputs)] * 4 if is_first else None
        stage.begin(MicroBatches(4, inputs=read, targets=targets))
        learning = {p: None for layer in layers for p in layer.parameters()}
        try:
            microbatch = _Microbatch(stage, index, recorder, inputs)
            passes = [microbatch.run(i) for i in (0, 1)]
            gradients = {
                p: tracker.bytes_of([p.grad]) for p in learning if p.grad is not None
            }
            for parameter in learning:
                parameter.grad = None
            joint = [microbatch.run_joint(i) for i in (2, 3) if options.exact_sums]
        except UNKNOWN as error:
            raise UnknownNumbers(recorder.place, str(error)) from error
        finally:
            for parameter in learning:
                parameter.grad = None
    (first, _, _), (steady, autocast_cache, messages) = passes
    per_layer = zip(*first, *steady, autocast_cache, *joint, strict=True)
    chunk = ChunkPasses(tuple(LayerPasses(*spans) for spans in per_layer), messages)
    return Traced(chunk, recorder.specs, gradients)


class Traced(NamedTuple):
    """Bytes that the passes of a chunk take.

    ``specs`` are, by layer, its input with `Spec` for tensors, ``gradients`` the bytes
    of those that parameters have got.
    """

    passes: ChunkPasses
    specs: dict[int, Any]
    gradients: dict[nn.Parameter, int]


class _Microbatch:
    """Runs the passes of one micro-batch of a stage's chunk, as an executor does."""

    def __init__(
        self,
        stage: Stage,
        chunk: int,
        recorder: Recorder,
        inputs: ChunkInputs,
    ) -> None:
        self._stage = stage
        self._chunk = chunk
        self._recorder = recorder
        self._sent, self._is_last = inputs.sent, inputs.is_last

    def run(self, microbatch: int) -> tuple[list[list[Span]], list[int], Messages]:
        """F, B and W; their spans by layer, what autocast keeps, and the messages."""
        tracker, recorder = self._recorder.tracker, self._recorder
        stage, chunk = self._stage, self._chunk
        with tracker:
            f, sent, autocast_cache, (n_x, n_y, y_unshared) = self._forward(microbatch)
            dy = None if self._is_last else _gradients(sent)
            n_dy = 0 if dy is None else tracker.counted(dy)
            recorder.begin("B", n_dy)
            dx = stage.backward_input(chunk, microbatch, dy)
            most, full = tracker.most, tracker.held
            n_dx = tracker.counted(dx)
            del dx
            dx_unshared = full - tracker.held
            full = tracker.held
            del dy
            b = recorder.end(most)
            dy_unshared = full - tracker.held

            recorder.begin("W")
            stage.backward_weight(chunk, microbatch)
            w = recorder.end(tracker.most)
        if self._is_last:
            n_y = y_unshared = 0
        messages = Messages(n_x, n_y, y_unshared, n_dy, n_dx, dx_unshared, dy_unshared)
        return [f, b, w], autocast_cache, messages

    def run_joint(self, microbatch: int) -> list[Span]:
        """F and BW; the spans of BW by layer."""
        tracker, recorder = self._recorder.tracker, self._recorder
        with tracker:
            _, sent, _, _ = self._forward(microbatch)
            dy = None if self._is_last else _gradients(sent)
            recorder.begin("BW", 0 if dy is None else tracker.counted(dy))
            dx = self._stage.backward(self._chunk, microbatch, dy)
            most = tracker.most
            del dx, dy
            return recorder.end(most)

    def _forward(
        self, microbatch: int
    ) -> tuple[list[Span], list[Any], list[int], tuple[int, int, int]]:
        """F; its spans, what it sends, casts that end with it, and bytes of x and y."""
        tracker, recorder = self._recorder.tracker, self._recorder
        x = None if self._sent is None else _received(self._sent)
        n_x = 0 if x is None else tracker.counted(x)
        recorder.begin("F", n_x)
        y = self._stage.forward(self._chunk, microbatch, x)
        most, full = tracker.most, tracker.held
        sent = [(t.shape, t.dtype, t.device) for t in y if t.requires_grad]
        n_y = tracker.counted(y)
        del x, y
        autocast_cache = recorder.autocast_cache()
        f = recorder.end(most)
        return f, sent, autocast_cache, (n_x, n_y, full - tracker.held)


def _received(sent: Any) -> Tensors:
    made = []
    for x in sent:
        tensor = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        made.append(tensor.requires_grad_(x.needs_grad))
    return with_tensors(sent, made)


def _gradients(sent: Iterable[Any]) -> Tensors:
    return tuple(
        torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in sent
    )


def tensors_of(layers: Iterable[nn.Module]) -> list[Tensor]:
    """Parameters and buffers of some layers."""
    return [t for layer in layers for t in (*layer.parameters(), *layer.buffers())]


def _checkpointed(layer: nn.Module, value: Any) -> Any:
    """Run a layer that B runs once more."""
    return checkpoint(layer, value, use_reentrant=False)


def _watched_loss(loss_fn: LossFn, recorder: Recorder) -> LossFn:
    def loss(*args: Any) -> Any:
        value = loss_fn(*args)
        recorder.tail()
        return value

    return loss


def _no_loss(*_: object) -> Tensor:
    raise AssertionError("there are no targets, so no loss is called")
