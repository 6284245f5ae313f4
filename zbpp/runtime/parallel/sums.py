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

    W of the last micro-batch | layer 3 | layer 2 | layer 1 |
    sums                                | layer 3 | layer 2 | layer 1

Replicas may run other parts of a layer, which leaves work to W on one of them only. So
that their sums meet all the same, layers are summed in one order, the last one first: a
layer waits for those behind it.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbpp.core import Collective, CollectiveKind
from zbpp.runtime.backward.order import EachSum
from zbpp.runtime.chunk import Chunk
from zbpp.runtime.support.collectives import noting_broken
from zbpp.runtime.support.fsdp import Unit
from zbpp.runtime.support.sharded import local_part, place_gradients

__all__ = ["Buckets", "Collectives", "LayerProgress", "LayerSum", "LayerSums"]


@dataclass
class _Sum:
    """An all-reduce that is under way, and what its parts are for."""

    flat: Tensor
    targets: Sequence[Tensor]
    work: dist.Work
    rest: Sequence[dist.ProcessGroup]


class Buckets:
    """Gradients of one layer that nobody has wrapped.

    All replicas must have the same parameters at the same places of a flat tensor.

    Args:
        parameters: of the layer.
        groups: processes that hold replicas, by dimension of the mesh.
        sums_each: every micro-batch is summed by itself, and kept apart until
            `put_back`: the next one's gradients must not be added to it.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        groups: Sequence[dist.ProcessGroup],
        *,
        sums_each: bool = False,
    ) -> None:
        self._parameters = parameters
        self._groups = groups
        self._sums: list[_Sum] = []
        self._sums_each = sums_each
        self._taken: list[tuple[nn.Parameter, Tensor]] = []
        self._totals: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def reduce(self) -> None:
        """Start to sum the gradients; parameters that have none get zeros."""
        place_gradients(self._parameters)
        alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for p in self._parameters:
            if p.grad is None:
                if not p.requires_grad:
                    continue
                p.grad = torch.zeros_like(p, requires_grad=False)
            part = local_part(p.grad).numbers
            if part.layout is torch.sparse_coo:  # replicas may have other rows
                p.grad = part = part.to_dense()
            alike.setdefault((part.dtype, part.device), []).append(part)
        first, *rest = self._groups
        for targets in alike.values():
            flat = torch.cat([x.reshape(-1) for x in targets])
            work = dist.all_reduce(flat, group=first, async_op=True)
            self._sums.append(_Sum(flat, targets, work, rest))
        for p in self._parameters if self._sums_each else ():
            if p.grad is not None:
                self._taken.append((p, p.grad))
                p.grad = None

    @torch.no_grad()
    def wait(self) -> None:
        """Put the sums where the gradients are."""
        for pending in self._sums:
            with noting_broken():  # a limit here would hold up the host with NCCL
                pending.work.wait()
            for group in pending.rest:
                dist.all_reduce(pending.flat, group=group)
            pieces = torch.split(pending.flat, [x.numel() for x in pending.targets])
            for target, piece in zip(pending.targets, pieces, strict=True):
                target.copy_(piece.view_as(target))
        self._sums = []
        for p, gradient in self._taken:
            if p in self._totals:
                self._totals[p].add_(gradient)
            else:
                self._totals[p] = gradient
        self._taken = []

    def put_back(self) -> None:
        """Give the parameters the totals of all micro-batches that are kept apart."""
        for p, total in self._totals.items():
            p.grad = total
        self._totals = {}


@dataclass(frozen=True)
class LayerSum:
    """The parts of one layer: what is wrapped, and what is not.

    ``buckets`` are of parameters that are summed over the same dimensions.
    """

    index: int
    units: Sequence[Unit]
    buckets: Sequence[Buckets]


class LayerProgress:
    """Hears how far the last W of a chunk is.

    Args:
        layer_of: layer of every leaf of the chunk.
        reduce: called with each layer whose gradients are all there.
    """

    def __init__(
        self, layer_of: Mapping[Tensor, int], reduce: Callable[[int], None]
    ) -> None:
        self._layer_of = layer_of
        self._reduce = reduce
        self._left: Counter[int] = Counter()
        self._order: list[int] = []

    def begin(self, leaves: Sequence[Tensor]) -> None:
        """Learn which leaves W will add to; B has done the rest."""
        self._left = Counter(self._layer_of[leaf] for leaf in leaves)
        self._order = sorted({*self._layer_of.values()})
        self._go_on()

    def done(self, leaf: Tensor) -> None:
        """All gradients of a leaf are there."""
        self._left[self._layer_of[leaf]] -= 1
        self._go_on()

    def _go_on(self) -> None:
        while self._order and not self._left[self._order[-1]]:
            self._reduce(self._order.pop())


class LayerSums(LayerProgress, EachSum):
    """Sums every micro-batch by itself.

    Args:
        layer_of: layer of every leaf of the chunk.
        reduce: called with each layer; it takes the gradients that are there.
        rest: called when all of a micro-batch are there.
    """

    def __init__(
        self,
        layer_of: Mapping[Tensor, int],
        reduce: Callable[[int], None],
        rest: Callable[[], None],
    ) -> None:
        super().__init__(layer_of, reduce)
        self._rest = rest

    def rest(self) -> None:
        """Reduce what is there."""
        self._rest()


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
