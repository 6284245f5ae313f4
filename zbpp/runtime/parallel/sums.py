"""The collectives of one stage, chunk by chunk, at the times of its order.

    UNSHARD      gather parameters that `fully_shard` keeps in parts
    RESHARD      free gathered parameters: W needs none
    REDUCE_GRAD  start to sum gradients over the replicas; the last W of a chunk, or
                 every W, has done so for each layer that it was done with
    REDUCE_WAIT  wait for the sums

Layers may be wrapped by `fully_shard` or `replicate`, as a whole or in parts; those
that are not wrapped are the same on all replicas, and their gradients are summed
here. FSDP2's prefetches are off: a job gathers a layer, or the pass that needs it, or
with alternating buffers the pass before.

A sum is of all layers of a chunk, the last one first, and of all their parameters that
learn: what this replica has not used counts with zeros, and so does what none has.

    W of the last micro-batch | layer 3 | layer 2 | layer 1 |
    sums                                | layer 3 | layer 2 | layer 1

Replicas may run other parts of a layer, which leaves work to W on one of them only. So
that their sums meet all the same, layers are summed in one order, the last one first: a
layer waits for those behind it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from zbpp.core import Collective, CollectiveKind
from zbpp.runtime.backward.split import Progress
from zbpp.runtime.parallel.reductions import Finish, StartSum, TopKSum
from zbpp.runtime.support.fsdp import Unit
from zbpp.runtime.support.sharded import as_sharded, local_part, place_gradients


class _Sum(NamedTuple):
    """A sum that is under way, of gradients of some parameters."""

    parameters: Sequence[nn.Parameter]
    shapes: Sequence[torch.Size]
    finish: Finish


class Buckets:
    """Gradients of one layer that are not wrapped, summed by a function.

    All replicas must have the same parameters at the same places of a flat tensor.
    Until `put_back` the sums are apart from the gradients of the next micro-batch.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], start: StartSum) -> None:
        self._parameters = parameters
        self._start = start
        self._sums: list[_Sum] = []
        self._totals: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def reduce(self) -> None:
        """Start to sum the gradients; parameters that have none get zeros."""
        place_gradients(self._parameters)
        alike: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for p in self._parameters:
            if p.grad is None and p.requires_grad:
                p.grad = torch.zeros_like(p, requires_grad=False)
            if p.grad is not None:
                alike.setdefault((p.grad.dtype, p.grad.device), []).append(p)
        for parameters in alike.values():
            parts = [local_part(cast(Tensor, p.grad)).numbers for p in parameters]
            # dense: replicas may have other rows
            flat = torch.cat([part.to_dense().reshape(-1) for part in parts])
            for p in parameters:
                p.grad = None
            shapes = [part.shape for part in parts]
            self._sums.append(_Sum(parameters, shapes, self._start(flat, parameters)))

    @torch.no_grad()
    def wait(self) -> None:
        """Add the sums that are under way to the totals."""
        for parameters, shapes, finish in self._sums:
            pieces = torch.split(finish(), [shape.numel() for shape in shapes])
            for p, shape, piece in zip(parameters, shapes, pieces, strict=True):
                if p in self._totals:
                    self._totals[p].add_(piece.view(shape))
                else:
                    self._totals[p] = piece.view(shape)
        self._sums = []

    def put_back(self) -> None:
        """Give the parameters the totals as their gradients."""
        for p, total in self._totals.items():
            p.grad = as_sharded(total, p)
        self._totals = {}


class ChunkCollectives(Progress):
    """The collectives of one chunk.

    ``layers`` are in order, each with what is wrapped of it and what is not. With
    ``sums_each`` every W sums, not the last one alone.
    """

    def __init__(
        self,
        layers: Mapping[int, Sequence[Unit | Buckets]],
        layer_of: Mapping[Tensor, int],
        *,
        sums_each: bool,
        now: Callable[[], Any],
    ) -> None:
        self._layers, self._layer_of = layers, layer_of
        self.sums_each = sums_each
        self._now = now
        self.parts = list(chain.from_iterable(layers.values()))
        self.units = [part for part in self.parts if isinstance(part, Unit)]
        self.gathered = [unit for unit in self.units if not unit.gathers_by_itself]
        """Gathered for longer than a pass."""
        self._left: Counter[int] = Counter()
        """Leaves of each layer whose gradients the W that runs has not added."""
        self._order = list(layers)
        """Layers whose sums have not begun."""
        self.began: Any = None
        """The start, by `now`, of the first sum that is under way."""

    def unshard(self) -> None:
        """Start to gather the parameters, first layers first."""
        for unit in self.gathered:
            unit.gather()

    def reshard(self) -> None:
        """Free the gathered parameters."""
        for unit in self.gathered:
            unit.drop()

    def begin(self, leaves: Sequence[Tensor]) -> None:
        """A W begins that adds to these leaves; B has done the rest."""
        self._left = Counter(self._layer_of[leaf] for leaf in leaves)
        self._go_on()

    def done(self, leaf: Tensor) -> None:
        """All gradients of a leaf are there."""
        self._left[self._layer_of[leaf]] -= 1
        self._go_on()

    def _go_on(self) -> None:
        while self._order and not self._left[self._order[-1]]:
            self._reduce_layer()

    def rest(self) -> None:
        """Start to sum the layers that no W has."""
        while self._order:
            self._reduce_layer()
        self._order = list(self._layers)

    def _reduce_layer(self) -> None:
        self.began = self._now() if self.began is None else self.began
        for part in reversed(self._layers[self._order.pop()]):
            part.reduce()

    def reduce(self) -> None:
        """Start to sum the gradients, unless each W has."""
        if not self.sums_each:
            self.rest()

    def wait(self) -> None:
        """Have the sums."""
        for part in self.parts:
            part.wait()

    def drop(self) -> None:
        """Drop all that was gathered: the step ends, or was rolled back."""
        for unit in self.units:
            if unit.pending or not unit.gathers_by_itself:  # ahead, and in vain
                unit.drop()


class Collectives:
    """Runs the collectives of a stage: of chunks that have any, and of tied weights."""

    def __init__(
        self,
        chunks: Mapping[int, ChunkCollectives],
        tied: Buckets | None = None,
        top_k: TopKSum | None = None,
    ) -> None:
        self.chunks = chunks
        self._tied = tied
        self.top_k = top_k
        """Sums all others, where they are not sums of all numbers."""

    @property
    def has_units(self) -> bool:
        """True if `fully_shard` or `replicate` has wrapped anything here."""
        return any(chunk.units for chunk in self.chunks.values())

    @property
    def keeps(self) -> bool:
        """True if some parameters are gathered for longer than a pass."""
        return any(chunk.gathered for chunk in self.chunks.values())

    def run(self, job: Collective) -> None:
        """Run one job."""
        if job.chunk in self.chunks:
            _RUN[job.kind](self.chunks[job.chunk])

    def take_start(self, chunk: int) -> Any:
        """Return when the first sum of a chunk has begun, and forget it."""
        if chunk not in self.chunks:
            return None
        start, self.chunks[chunk].began = self.chunks[chunk].began, None
        return start

    def end_sums(self) -> None:
        """All sums of a step are there: leave every gradient where it belongs."""
        for chunk in self.chunks.values():
            for part in chunk.parts:
                if isinstance(part, Buckets):
                    part.put_back()

    def sum_tied(self) -> None:
        """Sum gradients of tied parameters, with the summands of all stages."""
        if self._tied is not None:
            self._tied.reduce()
            self._tied.wait()
            self._tied.put_back()

    def drop(self) -> None:
        """Drop all that was gathered: the step ends, or was rolled back."""
        for chunk in self.chunks.values():
            chunk.drop()


_RUN: dict[CollectiveKind, Callable[[ChunkCollectives], None]] = {
    CollectiveKind.UNSHARD: ChunkCollectives.unshard,
    CollectiveKind.RESHARD: ChunkCollectives.reshard,
    CollectiveKind.REDUCE_GRAD: ChunkCollectives.reduce,
    CollectiveKind.REDUCE_WAIT: ChunkCollectives.wait,
}
