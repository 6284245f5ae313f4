"""Find the sharded and replicated parameters of a stage, and their collectives."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from torch import Tensor, nn

from zbpp.core import RequestError
from zbpp.core.reductions import Reduction
from zbpp.core.replicas import reduces_every
from zbpp.runtime.chunk import Chunk
from zbpp.runtime.comm.place import DATA_DIMS, Place, single_dims
from zbpp.runtime.parallel.broadcast import broadcast_first
from zbpp.runtime.parallel.buffers import alternate
from zbpp.runtime.parallel.experts import mesh_dims
from zbpp.runtime.parallel.pieces import PieceGather
from zbpp.runtime.parallel.reductions import StartSum, TopKSum, make_sum
from zbpp.runtime.parallel.sums import Buckets, ChunkCollectives, Collectives
from zbpp.runtime.parallel.wrap import check_bare, wrap
from zbpp.runtime.policies import DataParallel
from zbpp.runtime.support.fsdp import Unit, managed, units_in
from zbpp.runtime.support.sharded import local_part


def bind_parallel(
    chunks: Sequence[Chunk],
    place: Place,
    replicas: DataParallel,
    *,
    tied: Sequence[nn.Parameter],
    aliases: Collection[nn.Parameter],
    now: Callable[[], Any],
) -> tuple[list[Chunk], Collectives]:
    """Wrap a stage's layers, and find their collectives; all its peers must call.

    The chunks that are returned know the parameter behind each leaf. Other stages add
    to the gradients of ``tied``; ``aliases`` share their memory.
    """
    alternating, sums_each = replicas.alternating_buffers, reduces_every(replicas.shard)
    every_tied = {*tied, *aliases}
    if alternating:
        check_bare(chunks)
    layers = [layer for chunk in chunks for layer in chunk.layers]
    broadcast_first(chunks, place)
    wrap(layers, place, replicas.shard, every_tied)
    wrapped = [module for layer in layers for module in units_in(layer)]
    if wrapped and not any(dim in DATA_DIMS for dim in place.sizes):
        raise RequestError(
            f"a {type(wrapped[0]).__name__} is sharded or replicated; give the "
            "mesh as well: zbpp.Pipeline(..., mesh=mesh)"
        )
    dims = place.sum_dims()
    if not wrapped and not dims:
        return list(chunks), Collectives({})
    if wrapped and replicas.reduction != Reduction():
        raise RequestError(
            f"reduction is {replicas.reduction}, and a {type(wrapped[0]).__name__} "
            "sums its gradients itself; pass bare layers, or leave reduction out"
        )
    sum_over = cache(partial(make_sum, replicas.reduction, place))
    if wrapped:
        from torch.distributed.fsdp import share_comm_ctx

        inner = {part for x in wrapped for part in x.modules() if part is not x}
        share_comm_ctx([x for x in wrapped if x not in inner])  # type: ignore[misc]
    if (n_bytes := replicas.gather_piece_bytes) is not None:
        for module in wrapped:
            module.set_custom_all_gather(PieceGather(n_bytes))  # type: ignore[operator]
    for module in wrapped if alternating else ():  # torch reads it in the first gather
        module.set_reduce_scatter_max_input_buffers(2)  # type: ignore[operator]
    bound: list[Chunk] = []
    collectives: dict[int, ChunkCollectives] = {}
    for chunk in chunks:
        parts: dict[int, list[Unit | Buckets]] = {}
        for index, layer in chunk.numbered():
            _check_managed(index, layer, place)
            parts[index] = _parts_of(layer, place, every_tied, sum_over)
        units = [x for of_layer in parts.values() for x in of_layer if type(x) is Unit]
        shards = {leaf: shard for unit in units for leaf, shard in unit.leaves.items()}
        widened = [unit for unit in units if unit.widens]
        widen = partial(_widen, widened) if widened else None
        bound.append(replace(chunk, shards=shards, widen=widen))
        collectives[chunk.index] = ChunkCollectives(
            parts,
            {leaf: index for index, _, leaf in bound[-1].all_leaves()},
            sums_each=sums_each,
            now=now,
        )
    if alternating:
        alternate((index, chunk.units) for index, chunk in collectives.items())
    start, of_tied = sum_over(tuple(dims)) if dims else None, None
    top_k = start if isinstance(start, TopKSum) else None
    if start is not None and tied:
        if top_k is not None:  # the copies must not part
            start = make_sum(Reduction(dtype=replicas.reduction.dtype), place, dims)
        of_tied = Buckets(tied, start)
    return bound, Collectives(collectives, of_tied, top_k)


def _parts_of(
    layer: nn.Module,
    place: Place,
    tied: Collection[nn.Parameter],
    sum_over: Callable[[tuple[str, ...]], StartSum],
) -> list[Unit | Buckets]:
    """The wrapped modules of a layer, and the flat sums of its other parameters."""
    parts: list[Unit | Buckets] = []
    apart: set[Tensor] = set(tied)
    for module in units_in(layer):
        parts.append(Unit(module))
        apart.update(p for p, _ in managed(module))
    alike: dict[tuple[str, ...], list[nn.Parameter]] = {}
    for p in layer.parameters():
        if p not in apart:
            alike.setdefault(tuple(place.sum_dims(mesh_dims(p))), []).append(p)
    for dims, parameters in sorted(alike.items()):
        if dims:
            start = sum_over(dims)
            if isinstance(start, TopKSum):
                start.begin(p for p in parameters if p.requires_grad)
            parts.append(Buckets(parameters, start))
    return parts


def _widen(units: Sequence[Unit]) -> None:
    for unit in units:
        unit.widen()


def _check_managed(index: int, layer: nn.Module, place: Place) -> None:
    """Check that the wrapper of a layer sums gradients over all necessary processes."""
    for module in units_in(layer):
        for p, mesh in managed(module):
            ranks = set(mesh.mesh.flatten().tolist())
            by_unit = single_dims(mesh.mesh_dim_names or ())
            dims = place.sum_dims({*single_dims(local_part(p).names)} - {*by_unit})
            needed = set(place.ranks_along(dims))
            if needed <= ranks:
                continue
            raise RequestError(
                f"a {type(module).__name__} of layer {index} is wrapped over the ranks "
                f"{sorted(ranks)}, and gradients of a parameter of shape "
                f"{tuple(p.shape)} are to be summed over {dims or 'no dimension'}, the "
                f"ranks {sorted(needed)}; wrap it over these, or pass the bare "
                "layer and give zbpp.DataParallel(shard=...)"
            )
