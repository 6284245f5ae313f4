"""The collectives of one stage, chunk by chunk, at the times that its order says.

    UNSHARD      gather parameters that `fully_shard` keeps in parts
    RESHARD      drop what was gathered: W needs no parameters
    REDUCE_GRAD  start to sum gradients over the replicas; the last W of a chunk has
                 done so for each layer that it was done with, with buffers every W
    REDUCE_WAIT  have them

Layers may be wrapped by `fully_shard` or `replicate`, as a whole or in parts; those
that nobody has wrapped are the same on all replicas, and their gradients are summed
here. Torch's own gathers ahead are off: what is gathered, a job has asked for, or the
pass that needs it.

A sum is of all layers of a chunk, the last one first, and of all their parameters that
learn, whatever this replica has used of them: what it has not counts with zeros. The
replicas then tell each other what they have used, so that a parameter that none of them
has is left without a gradient, as a plain loop leaves it.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbpp.core import Collective, CollectiveKind, RequestError
from zbpp.core.sharding import Shard, reduces_every
from zbpp.runtime.chunk import Chunk
from zbpp.runtime.comm.transport import Reduction
from zbpp.runtime.parallel.buckets import Buckets
from zbpp.runtime.parallel.buffers import AlternatingBuffers
from zbpp.runtime.parallel.mesh import DATA_DIMS, Place
from zbpp.runtime.parallel.progress import LayerProgress, LayerSums, SumsByJobs
from zbpp.runtime.parallel.wrap import Unsharded, check_bare, wrap
from zbpp.runtime.support.fsdp_internals import Unit, managed, units_in
from zbpp.runtime.support.fsdp_widening import widening_of

__all__ = ["Collectives", "bind_parallel"]


@dataclass(frozen=True)
class _Layer:
    """The parts of one layer: what is wrapped, and what is not.

    ``summed`` are the parameters whose gradients are summed, on all replicas alike.
    """

    index: int
    units: Sequence[Unit]
    buckets: Buckets | None
    summed: Sequence[nn.Parameter]


class Collectives:
    """Runs the collectives of a stage.

    Args:
        layers: by chunk; empty: nothing is to be done.
        reduces: after which W's of a chunk its gradients are reduced.
        tied: parameters whose gradients other stages add to first.
        buffers: that layers are gathered and reduced in; None: their own.
        unsharded: what parameters were before ``shard`` dealt them out.
        now: reads the clock by which the stage's jobs are timed.
    """

    def __init__(
        self,
        layers: Mapping[int, Sequence[_Layer]],
        *,
        reduces: Literal["none", "last", "every"] = "none",
        tied: Buckets | None = None,
        buffers: AlternatingBuffers | None = None,
        unsharded: Mapping[nn.Parameter, Unsharded] | None = None,
        now: Callable[[], Any] = time.perf_counter,
    ) -> None:
        self._layers = layers
        self.buffers = buffers
        self.unsharded = unsharded or {}
        self._reduces = reduces
        self._tied = tied
        self._n_begun: dict[int, int] = {}
        """Of each chunk that is being summed, the layers whose sums have begun."""
        self._complete: set[int] = set()
        """Chunks with all gradients of a micro-batch, if each is summed by itself."""
        self._unused: dict[int, set[nn.Parameter]] = {}
        """Of each layer, parameters without a gradient in all sums of this step."""
        self._parameters = [p for own in layers.values() for x in own for p in x.summed]
        self._uses: Reduction | None = None
        self.began: dict[int, Any] = {}
        """The start, by `now`, of the first sum of each chunk that is under way."""
        self._now = now

    @property
    def has_units(self) -> bool:
        """True if `fully_shard` or `replicate` has wrapped anything here."""
        return any(layer.units for own in self._layers.values() for layer in own)

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
        """Start to sum the chunk's gradients, but those that `reduce_layer` has."""
        if self._reduces == "every":
            if chunk not in self._complete:
                return
            self._complete.remove(chunk)
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
            self._begin_sum(layer)

    def _begin_sum(self, layer: _Layer) -> None:
        """Start to sum one layer's gradients; note the parameters that have none."""
        kept = {p for p in layer.summed if p.grad is not None}  # maybe the caller's
        unused = [p for unit in reversed(layer.units) for p in unit.reduce()]
        if layer.buckets is not None:
            unused += layer.buckets.reduce()
        if layer.index in self._unused:
            self._unused[layer.index].intersection_update(unused)
        else:
            self._unused[layer.index] = set(unused) - kept

    def complete(self, chunk: int) -> None:
        """All gradients of a micro-batch are there, if each is summed by itself."""
        self._complete.add(chunk)
        if self.buffers is not None:
            self.reduce(chunk)

    @torch.no_grad()
    def end_sums(self, add: Callable[[Tensor], Reduction | None]) -> None:
        """All sums of a step are there: leave every gradient where it belongs.

        Parameters that no replica has used get none. All replicas must call; this one
        waits for the others only if it has left a parameter unused itself.

        Args:
            add: starts to add numbers of all replicas.
        """
        if self._reduces == "none" or not self._parameters:
            return
        for layer in chain.from_iterable(self._layers.values()):
            if layer.buckets is not None:
                layer.buckets.put_back()
        unused = set[nn.Parameter]().union(*self._unused.values())
        self._unused = {}
        uses = torch.ones(len(self._parameters), dtype=torch.float64)
        for place, p in enumerate(self._parameters) if unused else ():
            uses[place] = p not in unused
        self._uses = add(uses)  # kept while it is under way
        if unused and self._uses is not None:
            total = self._uses.result().tolist()
            for p, n_replicas in zip(self._parameters, total, strict=True):
                if n_replicas == 0:
                    p.grad = None

    def wait(self, chunk: int) -> None:
        """Have the sums of the chunk."""
        for layer in self._layers.get(chunk, ()):
            for unit in layer.units:
                unit.wait()
            if layer.buckets is not None:
                layer.buckets.wait()

    def sum_tied(self) -> None:
        """Sum gradients of tied parameters, to which all stages have added theirs."""
        if self._tied is not None:
            self._tied.reduce()
            self._tied.wait()

    def progress(self, chunks: Iterable[Chunk]) -> dict[int, LayerProgress]:
        """Listeners that reduce layers within the last W of a chunk, or within all."""
        found: dict[int, LayerProgress] = {}
        for chunk in chunks:
            number = chunk.index
            if number not in self._layers:
                continue
            leaves = chunk.all_leaves()
            layer_of: dict[Tensor, int] = {leaf: index for index, _, leaf in leaves}
            reduce = partial(self.reduce_layer, number)
            rest = partial(self.complete, number)
            if self.buffers is not None:
                joint = partial(self.buffers.joint, reduce)
                found[number] = LayerSums(layer_of, reduce, rest, joint)
            elif self._reduces == "every":
                before = partial(self.reduce, number)
                found[number] = SumsByJobs(layer_of, reduce, rest, before)
            elif self._reduces == "last":
                found[number] = LayerProgress(layer_of, reduce)
        return found

    def rewind(self) -> None:
        """Drop all that was gathered before the step was rolled back."""
        if self.buffers is not None:
            self.buffers.forget()
        for chunk in self._layers:
            self.reshard(chunk)

    def end(self) -> None:
        """End a step or an evaluation.

        Raises:
            AssertionError: a gather or a sum is under way that nobody has waited for;
                the next step would use what it brings.
        """
        begun = {*self._n_begun, *self._complete}
        assert not begun, f"nobody waits for sums of {sorted(begun)}"
        if self.buffers is not None:
            self.buffers.end()
        for chunk, layers in self._layers.items():
            for layer in layers:
                for unit in layer.units:
                    assert not unit.pending, (
                        f"chunk {chunk}, layer {layer.index} is being gathered at the "
                        "end of a step"
                    )
            self.reshard(chunk)

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


def bind_parallel(
    chunks: Sequence[Chunk],
    place: Place,
    shard: Shard,
    tied: Sequence[nn.Parameter] = (),
    *,
    alternating: bool = False,
    now: Callable[[], Any] = time.perf_counter,
) -> tuple[list[Chunk], Collectives]:
    """Find what of a stage's chunks is sharded or replicated; all its peers must call.

    Every wrapped module is gathered once, so that its forwards' parameters exist.

    Args:
        chunks: of the stage, on their device.
        place: of this process.
        shard: how layers are wrapped that are not.
        tied: parameters that other layers hold too, as this stage steps them.
        alternating: gather and reduce in `AlternatingBuffers`.
        now: see `Collectives`.

    Returns:
        The chunks, which know the parameter behind each leaf; and their collectives.

    Raises:
        RequestError: something is wrapped, and there is no mesh, or not on its groups.
    """
    if alternating:
        check_bare(chunks)
    every_layer = (layer for chunk in chunks for layer in chunk.layers)
    unsharded = wrap(every_layer, place, shard)
    wrapped = [
        module
        for chunk in chunks
        for layer in chunk.layers
        for module in units_in(layer)
    ]
    if place.mesh is None:
        if wrapped:
            raise RequestError(
                f"a {type(wrapped[0]).__name__} is sharded or replicated; give the "
                "mesh as well: zbpp.Pipeline(..., mesh=mesh)"
            )
        return list(chunks), Collectives({})
    dims = [dim for dim in DATA_DIMS if dim in place.peers.place]
    groups = [place.mesh.get_group(dim) for dim in dims if place.mesh[dim].size() > 1]
    roots = [
        module for module in wrapped if not any(_is_in(module, x) for x in wrapped)
    ]
    if roots:
        from torch.distributed.fsdp import share_comm_ctx

        share_comm_ctx(roots)  # type: ignore[arg-type]
    bound, layers = [], {}
    for chunk in chunks:
        shards: dict[nn.Parameter, nn.Parameter] = {}
        found = []
        for index, layer in chunk.numbered():
            alike = {*tied, *chunk.leaves.get(index, ())}
            one, its = _bind_layer(
                index, layer, groups, alike, sums_each=reduces_every(shard)
            )
            shards |= its
            found.append(one)
        layers[chunk.index] = found
        widen = widening_of([unit.widening for one in found for unit in one.units])
        bound.append(replace(chunk, shards=shards, widen=widen))
    buffers = None
    if alternating:
        named = {
            chunk: [(one.index, u) for one in own for u in one.units]
            for chunk, own in layers.items()
        }
        buffers = AlternatingBuffers(named)
    often: Literal["last", "every"] = "every" if reduces_every(shard) else "last"
    return bound, Collectives(
        layers,
        reduces=often if groups else "none",
        tied=Buckets(tied, groups) if groups and tied else None,
        buffers=buffers,
        unsharded=unsharded,
        now=now,
    )


def _is_in(module: nn.Module, other: nn.Module) -> bool:
    return module is not other and any(part is module for part in other.modules())


def _bind_layer(
    index: int,
    layer: nn.Module,
    groups: Sequence[dist.ProcessGroup],
    tied: Collection[nn.Parameter],
    *,
    sums_each: bool,
) -> tuple[_Layer, dict[nn.Parameter, nn.Parameter]]:
    modules = list(units_in(layer))
    held = {p for module in modules for p in managed(module)}
    others = [p for p in layer.parameters() if p not in held and p not in tied]
    units = [Unit(module) for module in modules]
    shards: dict[nn.Parameter, nn.Parameter] = {}
    for unit in units:
        unit.begin(keeps=not unit.gathers_by_itself)
        unit.module.unshard()
        shards |= dict(unit.leaves())
        unit.module.reshard()
    buckets = None
    if groups and others:
        buckets = Buckets(others, groups, sums_each=sums_each)
    summed = [*shards.values(), *(others if buckets is not None else ())]
    return _Layer(index, units, buckets, summed), shards
