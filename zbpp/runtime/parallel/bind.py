"""Find what of a stage is sharded or replicated, and what runs its collectives.

What runs them is chosen here, once: `Collectives`, or with alternating buffers
`BufferedCollectives`.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from zbpp.core import RequestError
from zbpp.core.sharding import Shard, reduces_every
from zbpp.runtime.chunk import Chunk
from zbpp.runtime.parallel.buckets import Buckets
from zbpp.runtime.parallel.buffers import BufferedCollectives
from zbpp.runtime.parallel.mesh import DATA_DIMS, Place
from zbpp.runtime.parallel.stage import Collectives, LayerSum
from zbpp.runtime.parallel.wrap import check_bare, wrap
from zbpp.runtime.support.fsdp import Unit, managed, units_in, widening_of
from zbpp.runtime.support.fsdp_buffers import BufferedUnit

__all__ = ["bind_parallel"]


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
            layer_sum, shards_of_layer = _bind_layer(
                index,
                layer,
                groups,
                alike,
                make_unit=BufferedUnit if alternating else Unit,
                sums_each=reduces_every(shard),
            )
            shards |= shards_of_layer
            found.append(layer_sum)
        layers[chunk.index] = found
        widen = widening_of(unit for x in found for unit in x.units)
        bound.append(replace(chunk, shards=shards, widen=widen))
    make_collectives = BufferedCollectives if alternating else Collectives
    often: Literal["last", "every"] = "every" if reduces_every(shard) else "last"
    return bound, make_collectives(
        layers,
        reduces=often if groups else "none",
        tied=Buckets(tied, groups) if groups and tied else None,
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
    make_unit: Callable[[nn.Module], Unit],
    sums_each: bool,
) -> tuple[LayerSum, dict[nn.Parameter, nn.Parameter]]:
    modules = list(units_in(layer))
    held = {p for module in modules for p in managed(module)}
    others = [p for p in layer.parameters() if p not in held and p not in tied]
    units = [make_unit(module) for module in modules]
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
    return LayerSum(index, units, buckets, summed), shards
