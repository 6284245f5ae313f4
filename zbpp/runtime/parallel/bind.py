"""Find what of a stage is sharded or replicated, and what runs its collectives."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from zbpp.core import RequestError
from zbpp.core.sharding import reduces_every
from zbpp.runtime.chunk import Chunk
from zbpp.runtime.comm.place import DATA_DIMS, EXPERT_DIM, Place
from zbpp.runtime.parallel.broadcast import broadcast_first
from zbpp.runtime.parallel.buffers import alternate
from zbpp.runtime.parallel.experts import experts_in, mesh_dims
from zbpp.runtime.parallel.sums import Buckets, Collectives, LayerSum
from zbpp.runtime.parallel.wrap import check_bare, wrap
from zbpp.runtime.policies import DataParallel
from zbpp.runtime.support.fsdp import Unit, managed, units_in, widening_of

__all__ = ["bind_parallel"]


def bind_parallel(
    chunks: Sequence[Chunk],
    place: Place,
    replicas: DataParallel,
    tied: Sequence[nn.Parameter] = (),
    *,
    aliases: Collection[nn.Parameter] = (),
    now: Callable[[], Any] = time.perf_counter,
) -> tuple[list[Chunk], Collectives]:
    """Find what of a stage's chunks is sharded or replicated; all its peers must call.

    Every wrapped module is gathered once, so that its forwards' parameters exist.

    Args:
        chunks: of the stage, on their device.
        place: of this process.
        replicas: how layers are wrapped that are not.
        tied: parameters that other layers hold too, as this stage steps them.
        aliases: other parameters on the memory of these.
        now: see `Collectives`.

    Returns:
        The chunks, which know the parameter behind each leaf; and their collectives.

    Raises:
        RequestError: something is wrapped, and there is no mesh, or not on its groups.
    """
    shard, alternating = replicas.shard, replicas.alternating_buffers
    if alternating:
        check_bare(chunks)
    every_tied = {*tied, *aliases}
    experts = experts_in(chunks)
    if alternating and experts:
        raise RequestError(
            "alternating_buffers hold whole layers, and experts are dealt out apart "
            "from the rest of theirs; leave alternating_buffers out"
        )
    broadcast_first(chunks, place)
    every_layer = (layer for chunk in chunks for layer in chunk.layers)
    wrap(every_layer, place, shard, experts, every_tied)
    experts = experts_in(chunks)
    wrapped = [
        module
        for chunk in chunks
        for layer in chunk.layers
        for module in units_in(layer)
    ]
    if wrapped and not any(dim in DATA_DIMS for dim in place.sizes):
        raise RequestError(
            f"a {type(wrapped[0]).__name__} is sharded or replicated; give the "
            "mesh as well: zbpp.Pipeline(..., mesh=mesh)"
        )
    groups = [place.group(dim) for dim in place.sum_dims()]
    if not wrapped and not groups:
        return list(chunks), Collectives({})
    roots = [
        module for module in wrapped if not any(_is_in(module, x) for x in wrapped)
    ]
    if roots:
        from torch.distributed.fsdp import share_comm_ctx

        share_comm_ctx(roots)  # type: ignore[arg-type]
    for module in wrapped if alternating else ():  # torch reads it in the first gather
        module.set_reduce_scatter_max_input_buffers(2)  # type: ignore[operator]
    bound, layers = [], {}
    for chunk in chunks:
        shards: dict[nn.Parameter, nn.Parameter] = {}
        layer_sums = []
        for index, layer in chunk.numbered():
            layer_sum, shards_of_layer = _bind_layer(
                index,
                layer,
                place,
                every_tied,
                experts=experts,
                sums_each=reduces_every(shard),
            )
            shards |= shards_of_layer
            layer_sums.append(layer_sum)
        layers[chunk.index] = layer_sums
        widen = widening_of(unit for x in layer_sums for unit in x.units)
        bound.append(replace(chunk, shards=shards, widen=widen))
    if alternating:
        alternate(
            (chunk, [unit for layer in of_chunk for unit in layer.units])
            for chunk, of_chunk in layers.items()
        )
    often: Literal["last", "every"] = "every" if reduces_every(shard) else "last"
    return bound, Collectives(
        layers,
        reduces=often,
        tied=Buckets(tied, groups) if groups and tied else None,
        now=now,
    )


def _is_in(module: nn.Module, parent: nn.Module) -> bool:
    return module is not parent and any(part is module for part in parent.modules())


def _bind_layer(
    index: int,
    layer: nn.Module,
    place: Place,
    tied: Collection[nn.Parameter],
    *,
    experts: Collection[nn.Parameter],
    sums_each: bool,
) -> tuple[LayerSum, dict[nn.Parameter, nn.Parameter]]:
    _check_managed(index, layer, place, experts)
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
    alike: dict[tuple[str, ...], list[nn.Parameter]] = {}
    for p in others:
        dims = place.sum_dims(mesh_dims(p))
        alike.setdefault(tuple(dims), []).append(p)
    buckets = [
        Buckets(parameters, [place.group(dim) for dim in dims], sums_each=sums_each)
        for dims, parameters in sorted(alike.items())
        if dims
    ]
    return LayerSum(index, units, buckets), shards


def _check_managed(
    index: int,
    layer: nn.Module,
    place: Place,
    experts: Collection[nn.Parameter],
) -> None:
    """Check that what wraps a layer sums gradients over all that must be.

    Raises:
        RequestError: it sums over fewer.
    """
    for module in units_in(layer):
        for p in managed(module):
            ranks = set(p.device_mesh.mesh.flatten().tolist())  # type: ignore[attr-defined]
            dims = place.sum_dims({EXPERT_DIM} if p in experts else ())
            needed = set(place.ranks_along(dims))
            if needed <= ranks:
                continue
            raise RequestError(
                f"a {type(module).__name__} of layer {index} is wrapped over the ranks "
                f"{sorted(ranks)}, and gradients of a parameter of shape "
                f"{tuple(p.shape)} are to be summed over {dims or 'no dimension'}, the "
                f"ranks {sorted(needed)}; wrap it over these, or hand over the bare "
                "layer and give zbpp.DataParallel(shard=...)"
            )
