"""A model whose layers are traced once each, and the chunks that it can be cut into."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from zbpp.core import RequestError
from zbpp.memory.alike import classes_of, shortened
from zbpp.memory.fake import FakeModel, reading_fakes
from zbpp.memory.operations import layer_operations
from zbpp.memory.optimizer import OptimizerMemory, optimizer_memory
from zbpp.memory.passes import ChunkPasses
from zbpp.memory.recorder import Spec
from zbpp.memory.trace import (
    ChunkInputs,
    Traced,
    TraceOptions,
    UnknownNumbers,
    granularity_of,
    trace_chunk,
)
from zbpp.memory.tracker import storages_of
from zbpp.runtime.chunk import OwnName, layer_name
from zbpp.runtime.optim.make import MakeOptimizer
from zbpp.runtime.ties.plan import find_ties
from zbpp.runtime.values import UnfitValueError, as_tensors

__all__ = ["ModelMemory"]

_T = TypeVar("_T")


class ModelMemory:
    """Bytes of the layers of a model, and of chunks of it.

    Args:
        fake: the model and one micro-batch.
        options: of the stages.
        own_name: the model's own names of parameters.

    Raises:
        RequestError: a layer decides by its data, which fake tensors do not have.
    """

    def __init__(
        self,
        fake: FakeModel,
        options: TraceOptions,
        own_name: OwnName = layer_name,
    ) -> None:
        self._own_name = own_name
        self.fake = fake
        self.options = options
        self.granularity = granularity_of(options.device)
        self._reads_fakes = True
        self._classes = classes_of(fake.layers)
        self._chunks: dict[Any, Traced] = {}
        self._optimizers: dict[Any, OptimizerMemory] = {}
        traced, stands = self._trace(range(len(fake.layers)))
        self.whole = traced.passes.repeated(stands)
        """All layers as one chunk."""
        self._specs = [traced.specs[place] for place in stands]
        self._gradients = self._gradients_of(traced, stands)

    def of_size(self, samples: int) -> "ModelMemory":
        """The same model with another number of samples in its micro-batch."""
        fake = self.fake.of_size(samples)
        resized = ModelMemory(fake, self.options, self._own_name)
        resized._optimizers = self._optimizers  # steps know nothing of samples
        return resized

    @property
    def n_layers(self) -> int:
        """Layers of the model."""
        return len(self.fake.layers)

    def chunk(self, layers: range) -> ChunkPasses:
        """The passes of consecutive layers as one chunk."""
        traced, stands = self._trace(layers)
        return traced.passes.repeated(stands)

    def parameters(self, layers: Sequence[int]) -> list[nn.Parameter]:
        """Of some layers, each once."""
        parameters = (p for i in layers for p in self.fake.layers[i].parameters())
        return list(dict.fromkeys(parameters))

    def named(self, layers: Sequence[int]) -> dict[nn.Parameter, str]:
        """Of some layers, each once, with the model's own name of its first place."""
        names: dict[nn.Parameter, str] = {}
        for i in layers:
            for name, p in self.fake.layers[i].named_parameters():
                names.setdefault(p, self._own_name(i, name))
        return names

    def gradients(self, layers: Sequence[int]) -> dict[nn.Parameter, int]:
        """Bytes of the gradients that parameters of some layers get."""
        return {
            p: self._gradients[p]
            for p in self.parameters(layers)
            if p in self._gradients
        }

    def tied(self, layers: Sequence[int]) -> tuple[int, int]:
        """Bytes that tied weights take on a stage which holds some layers.

        Returns:
            Gradients that it has sent to other stages, where the sums are others; and
            those that it has received, just before they are added.
        """
        sent = received = 0
        for tie in find_ties(self.fake.layers):
            index, name = tie[0]
            others = sum(layer not in layers for layer, _ in tie)
            if 0 < others < len(tie):
                size = self.bytes_of([self.fake.layers[index].get_parameter(name)])
                sent, received = sent + size, received + others * size
        return sent, received

    def buffers(self, layers: Sequence[int]) -> list[Tensor]:
        """Of some layers, each once."""
        buffers = (b for i in layers for b in self.fake.layers[i].buffers())
        return list(dict.fromkeys(buffers))

    def bytes_of(self, tensors: Sequence[Tensor]) -> int:
        """Bytes that tensors take; what shares memory counts once."""
        sizes = {s._cdata: s.nbytes() for t in tensors for s in storages_of(t)}
        g = self.granularity
        return sum(-(-size // g) * g for size in sizes.values())

    def optimizer(
        self,
        layers: Sequence[int],
        make: MakeOptimizer | None,
        *,
        n_parts: Mapping[nn.Parameter, int] | None = None,
    ) -> OptimizerMemory:
        """Memory of the optimizer of a stage with these layers.

        Args:
            layers: of the stage.
            make: builds one or several.
            n_parts: processes that divide each parameter; None: nothing is divided.
        """
        divided = tuple((n_parts or {}).values())
        key = (tuple(self._classes[i] for i in layers), divided)
        if key not in self._optimizers:
            self._optimizers[key] = optimizer_memory(
                self.fake.mode,
                self.named(layers),
                self.gradients(layers),
                make,
                granularity=self.granularity,
                n_parts=n_parts or {},
            )
        return self._optimizers[key]

    def message(self, layer: int) -> int:
        """Bytes of what a layer reads from the one before."""
        try:
            sent: Any = as_tensors(self._specs[layer], leaf=Spec)
        except UnfitValueError:  # no chunk can begin there
            return 0
        return sum(self._size(spec) for spec in sent)

    def recomputed(self) -> ChunkPasses:
        """All layers as one chunk, every one of them recomputed in B."""
        traced, stands = self._trace(range(self.n_layers), recomputed=True)
        return traced.passes.repeated(stands)

    def _size(self, spec: Spec) -> int:
        g = self.granularity
        return -(-spec.n_bytes // g) * g

    def _trace(
        self, layers: range, *, recomputed: bool = False
    ) -> tuple[Traced, list[int]]:
        classes = tuple(self._classes[i] for i in layers)
        kept, stands = shortened(classes)
        is_last = layers.stop == self.n_layers
        key = (tuple(classes[i] for i in kept), layers.start == 0, is_last, recomputed)
        if key not in self._chunks:
            inputs = self._inputs_of(layers, is_last)
            places = [layers[i] for i in kept]
            self._chunks[key] = self._run(places, inputs, recomputed=recomputed)
        return self._chunks[key], stands

    def _inputs_of(self, layers: range, is_last: bool) -> ChunkInputs:
        targets = self.fake.targets if is_last else None
        if layers.start == 0:
            return ChunkInputs(self.fake.inputs, None, targets, is_last)
        try:
            sent: Any = as_tensors(self._specs[layers.start], leaf=Spec)
        except UnfitValueError as error:
            raise RequestError(
                f"a chunk cannot begin with layer {layers.start}: it reads {error}"
            ) from None
        return ChunkInputs(None, sent, targets, is_last)

    def _run(
        self,
        places: Sequence[int],
        inputs: ChunkInputs,
        *,
        recomputed: bool = False,
    ) -> Traced:
        held = [self.fake.layers[i] for i in places]

        def trace() -> Traced:
            return trace_chunk(
                self.fake.mode,
                held,
                inputs,
                self.options,
                recomputed=recomputed,
            )

        try:
            return self._first(trace)
        except UnknownNumbers as error:
            raise self._undecided(places[error.place], error) from error

    def operations(self) -> list[float]:
        """Floating-point operations of each layer's forward of one micro-batch.

        Raises:
            RequestError: a layer decides by its data.
        """

        def count() -> list[float]:
            return layer_operations(self.fake)

        try:
            return self._first(count)
        except UnknownNumbers as error:
            raise self._undecided(error.place, error) from error

    def _undecided(self, index: int, error: UnknownNumbers) -> RequestError:
        kind = type(self.fake.layers[index]).__name__
        return RequestError(
            f"layer {index} (a {kind}) cannot be traced without data: what {error} "
            "gives depends on numbers that are not known before a run; use an "
            "operator of fixed shape (for experts of transformers "
            "config._experts_implementation = 'grouped_mm'), or measure the layer "
            "with `zbpp profile`"
        )

    def _first(self, trace: Callable[[], _T]) -> _T:
        """Trace; transformers may take its own path for fakes if a run's path fails."""
        try:
            with reading_fakes() if self._reads_fakes else nullcontext():
                return trace()
        except UnknownNumbers:
            if not self._reads_fakes:
                raise
            self._reads_fakes = False
            return trace()

    def _gradients_of(
        self, traced: Traced, stands: Sequence[int]
    ) -> dict[nn.Parameter, int]:
        """Bytes of all gradients; a layer that was not traced has those of its like."""
        kept, _ = shortened(self._classes)
        gradients: dict[nn.Parameter, int] = {}
        for layer, place in zip(self.fake.layers, stands, strict=True):
            like = self.fake.layers[kept[place]]
            pairs = zip(layer.parameters(), like.parameters(), strict=True)
            for parameter, same in pairs:
                if same in traced.gradients:
                    gradients[parameter] = traced.gradients[same]
        return gradients


def default_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW, as it comes."""
    return torch.optim.AdamW(parameters)
