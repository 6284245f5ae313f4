"""The collectives of one stage, chunk by chunk, at the times that its order says.

    UNSHARD      gather parameters that `fully_shard` keeps in parts
    RESHARD      drop what was gathered: W needs no parameters
    REDUCE_GRAD  start to sum gradients over the replicas; the last W of a chunk, or
                 every W, has done so for each layer that it was done with
    REDUCE_WAIT  have them

Layers may be wrapped by `fully_shard` or `replicate`, as a whole or in parts; those
that nobody has wrapped are the same on all replicas, and their gradients are summed
here. Torch's own gathers ahead are off: what is gathered, a job has asked for, the pass
that needs it, or with alternating buffers the one before.

A sum is of all layers of a chunk, the last one first, and of all their parameters that
learn: what this replica has not used counts with zeros, and so does what none has.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal

from torch import Tensor

from zbpp.core import Collective, CollectiveKind
from zbpp.runtime.chunk import Chunk
from zbpp.runtime.parallel.buckets import Buckets
from zbpp.runtime.parallel.progress import LayerProgress, LayerSums
from zbpp.runtime.support.fsdp import Unit

__all__ = ["Collectives", "LayerSum"]


@dataclass(frozen=True)
class LayerSum:
    """The parts of one layer: what is wrapped, and what is not.

    ``buckets`` are of parameters that are summed over the same dimensions.
    """

    index: int
    units: Sequence[Unit]
    buckets: Sequence[Buckets]


class Collectives:
    """Runs the collectives of a stage.

    Args:
        layers: by chunk; empty: nothing is to be done.
        reduces: after which W's of a chunk its gradients are reduced.
        tied: parameters whose gradients other stages add to first.
        now: reads the clock by which the stage's jobs are timed.
    """

    def __init__(
        self,
        layers: Mapping[int, Sequence[LayerSum]],
        *,
        reduces: Literal["none", "last", "every"] = "none",
        tied: Buckets | None = None,
        now: Callable[[], Any] = time.perf_counter,
    ) -> None:
        self._layers = layers
        self._reduces = reduces
        self._tied = tied
        self._n_begun: dict[int, int] = {}
        """Of each chunk that is being summed, the layers whose sums have begun."""
        self.began: dict[int, Any] = {}
        """The start, by `now`, of the first sum of each chunk that is under way."""
        self._now = now

    @property
    def has_units(self) -> bool:
        """True if `fully_shard` or `replicate` has wrapped anything here."""
        return any(layer.units for layers in self._layers.values() for layer in layers)

    @property
    def keeps(self) -> bool:
        """True if some parameters are gathered for longer than a pass."""
        return any(map(self._kept, self._layers))

    def run(self, job: Collective) -> None:
        """Run one job."""
        _RUN[job.kind](self, job.chunk)

    def unshard(self, chunk: int) -> None:
        """Start to gather the chunk, first layers first."""
        for unit in self._kept(chunk):
            unit.gather()

    def reshard(self, chunk: int) -> None:
        """Drop what was gathered of the chunk."""
        for unit in self._kept(chunk):
            unit.drop()

    def reduce(self, chunk: int) -> None:
        """Start to sum the chunk's gradients, unless each W has."""
        if self._reduces == "last":
            self.reduce_rest(chunk)

    def reduce_rest(self, chunk: int) -> None:
        """Start to sum the chunk's gradients, but those that `reduce_layer` has."""
        layers = self._layers.get(chunk)
        if layers:
            self.reduce_layer(chunk, layers[0].index)
            del self._n_begun[chunk]

    def reduce_layer(self, chunk: int, index: int) -> None:
        """Start to sum the gradients of a layer, and of those behind it.

        They are all there. What has begun since the last `reduce` does not again.
        """
        layers = self._layers[chunk]
        begun = self._n_begun.get(chunk, 0)
        ready = layers[index - layers[0].index : len(layers) - begun]
        self._n_begun[chunk] = begun + len(ready)
        self.began.setdefault(chunk, self._now())
        for layer in reversed(ready):
            for unit in reversed(layer.units):
                unit.reduce()
            for buckets in layer.buckets:
                buckets.reduce()

    def end_sums(self) -> None:
        """All sums of a step are there: leave every gradient where it belongs."""
        for layer in chain.from_iterable(self._layers.values()):
            for buckets in layer.buckets:
                buckets.put_back()

    def wait(self, chunk: int) -> None:
        """Have the sums of the chunk."""
        for layer in self._layers.get(chunk, ()):
            for unit in layer.units:
                unit.wait()
            for buckets in layer.buckets:
                buckets.wait()

    def sum_tied(self) -> None:
        """Sum gradients of tied parameters, to which all stages have added theirs."""
        if self._tied is not None:
            self._tied.reduce()
            self._tied.wait()

    def progress(self, chunks: Iterable[Chunk]) -> dict[int, LayerProgress]:
        """Listeners that reduce layers within the last W of a chunk, or within all."""
        listeners: dict[int, LayerProgress] = {}
        for chunk in chunks:
            number = chunk.index
            if number not in self._layers:
                continue
            leaves = chunk.all_leaves()
            layer_of: dict[Tensor, int] = {leaf: index for index, _, leaf in leaves}
            if (listener := self._listener(number, layer_of)) is not None:
                listeners[number] = listener
        return listeners

    def _listener(
        self, chunk: int, layer_of: Mapping[Tensor, int]
    ) -> LayerProgress | None:
        reduce = partial(self.reduce_layer, chunk)
        if self._reduces == "every":
            return LayerSums(layer_of, reduce, partial(self.reduce_rest, chunk))
        return LayerProgress(layer_of, reduce) if self._reduces == "last" else None

    def rewind(self) -> None:
        """Drop all that was gathered before the step was rolled back."""
        for chunk, layers in self._layers.items():
            for unit in chain.from_iterable(layer.units for layer in layers):
                if unit.gathers_by_itself and unit.pending:  # ahead, and in vain
                    unit.drop()
            self.reshard(chunk)

    def end(self) -> None:
        """End a step or an evaluation.

        Raises:
            RuntimeError: a gather or a sum is under way that nobody has waited for; the
                next step would use what it brings.
        """
        if self._n_begun:
            raise RuntimeError(f"nobody waits for sums of {sorted(self._n_begun)}")
        for chunk in self._layers:
            if any(unit.pending for unit in self._kept(chunk)):
                raise RuntimeError(f"chunk {chunk} is gathered at the end of a step")
        self.rewind()

    def _kept(self, chunk: int) -> list[Unit]:
        return [
            unit
            for layer in self._layers.get(chunk, ())
            for unit in layer.units
            if not unit.gathers_by_itself
        ]


_RUN: dict[CollectiveKind, Callable[[Collectives, int], None]] = {
    CollectiveKind.UNSHARD: Collectives.unshard,
    CollectiveKind.RESHARD: Collectives.reshard,
    CollectiveKind.REDUCE_GRAD: Collectives.reduce,
    CollectiveKind.REDUCE_WAIT: Collectives.wait,
}
