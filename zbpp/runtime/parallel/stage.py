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
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn

from zbpp.core import Collective, CollectiveKind, RequestError
from zbpp.core.collectives.sharding import Shard, reduces_every
from zbpp.runtime.chunk import Chunk
from zbpp.runtime.parallel.buckets import Buckets
from zbpp.runtime.parallel.buffers import AlternatingBuffers
from zbpp.runtime.parallel.mesh import DATA_DIMS, Place
from zbpp.runtime.parallel.progress import LayerProgress, LayerSums, SumsByJobs
from zbpp.runtime.parallel.wrap import check_bare, wrap
from zbpp.runtime.support.fsdp_internals import Unit, managed, units_in
from zbpp.runtime.support.fsdp_widening import widening_of

__all__ = ["Collectives", "bind_parallel"]


@dataclass(frozen=True)
class _Layer:
    """The parts of one layer: what is wrapped, and what is not."""

    index: int
    units: Sequence[Unit]
    buckets: Buckets | None


class Collectives:
    """Runs the collectives of a stage.

    Args:
        layers: by chunk; empty: nothing is to be done.
        reduces: after which W's of a chunk its gradients are reduced.
        tied: parameters whose gradients other stages add to first.
        buffers: that layers are gathered and reduced in; None: their own.
    """

    def __init__(
        self,
        layers: Mapping[int, Sequence[_Layer]],
        *,
        reduces: Literal["none", "last", "every"] = "none",
        tied: Buckets | None = None,
        buffers: AlternatingBuffers | None = None,
    ) -> None:
        self._layers = layers
        self.buffers = buffers
        self._reduces = reduces
        self._tied = tied
        self._reduced: dict[int, set[int]] = {}
        self.began: dict[int, Any] = {}
        """The start, by `now`, of the first sum of each chunk that is under way."""
        self.now: Callable[[], Any] = time.perf_counter

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
        for layer in reversed(self._layers.get(chunk, ())):
            self.reduce_layer(chunk, layer.index)
        self._reduced.pop(chunk, None)

    def reduce_layer(self, chunk: int, index: int) -> None:
        """Start to sum one layer's gradients, which are all there."""
        if self.buffers is None and self._reduces == "last":
            done = self._reduced.setdefault(chunk, set())
            if index in done:
                return
            done.add(index)
        self.began.setdefault(chunk, self.now())
        layer = self._layers[chunk][index - self._layers[chunk][0].index]
        for unit in reversed(layer.units):
            unit.reduce()
        if layer.buckets is not None:
            layer.buckets.reduce()

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
            rest = partial(self.reduce, number)
            if self.buffers is not None:
                found[number] = LayerSums(layer_of, reduce, rest, self.buffers.joint)
            elif self._reduces == "every":
                found[number] = SumsByJobs(layer_of, reduce, rest)
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
        assert not self._reduced, f"nobody waits for sums of {sorted(self._reduced)}"
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
) -> tuple[list[Chunk], Collectives]:
    """Find what of a stage's chunks is sharded or replicated; all its peers must call.

    Every wrapped module is gathered once, so that its forwards' parameters exist.

    Args:
        chunks: of the stage, on their device.
        place: of this process.
        shard: how layers are wrapped that are not.
        tied: parameters that other layers hold too, as this stage steps them.
        alternating: gather and reduce in `AlternatingBuffers`.

    Returns:
        The chunks, which know the parameter behind each leaf; and their collectives.

    Raises:
        RequestError: something is wrapped, and there is no mesh, or not on its groups.
    """
    if alternating:
        check_bare(chunks)
    wrap((layer for chunk in chunks for layer in chunk.layers), place, shard)
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
            one, its = _bind_layer(index, layer, groups, alike)
            shards |= its
            found.append(one)
        layers[chunk.index] = found
        widen = widening_of([unit.widening for one in found for unit in one.units])
        bound.append(replace(chunk, shards=shards, widen=widen))
    buffers = None
    if alternating:
        named = {
            chunk: [(f"layers.{one.index}", u) for one in own for u in one.units]
            for chunk, own in layers.items()
        }
        buffers = AlternatingBuffers(named)
    often: Literal["last", "every"] = "every" if reduces_every(shard) else "last"
    return bound, Collectives(
        layers,
        reduces=often if groups else "none",
        tied=Buckets(tied, groups) if groups and tied else None,
        buffers=buffers,
    )


def _is_in(module: nn.Module, other: nn.Module) -> bool:
    return module is not other and any(part is module for part in other.modules())


def _bind_layer(
    index: int,
    layer: nn.Module,
    groups: Sequence[dist.ProcessGroup],
    tied: Collection[nn.Parameter],
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
        buckets = Buckets(others, groups)
    return _Layer(index, units, buckets), shards
