"""Let the processes of a stage begin with the numbers of the first one, as DDP does.

    parameters   along each dimension of the mesh on which they are replicated
    buffers      along dp alone: on others a layer may have some that tell its place

Parameters that are sharded by then, as DTensors, are broadcast part by part.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbpp.core import RequestError
from zbpp.runtime.chunk import Chunk
from zbpp.runtime.comm.place import (
    EXPERT_DIM,
    REPLICA_DIMS,
    TENSOR_DIM,
    Place,
    single_dims,
)
from zbpp.runtime.support.sharded import local_part, own_shard
from zbpp.runtime.support.torch_internals import inner_tensors

_PARTS = {
    TENSOR_DIM: "parallelize_module on mesh['tp']",
    EXPERT_DIM: "zbpp.deal(experts, mesh['ep'])",
}
"""Along these a plain parameter that differs is a part of another, by all odds."""


def broadcast_first(chunks: Iterable[Chunk], place: Place) -> None:
    """Broadcast parameters and buffers; all processes of the stage must call.

    Plain parameters that differ along ``tp`` or ``ep`` are refused: parts of a tensor
    would become copies of the first.
    """
    differ: dict[str, list[str]] = {}
    seen: set[Tensor] = set()
    for chunk in chunks:
        for _, name, p in chunk.all_leaves():
            names = local_part(p).names
            if not place.has_dims(names):
                raise RequestError(
                    f"{name} is sharded along {names}, and the pipeline's mesh has the "
                    f"dimensions {(*place.sizes,)}; give a mesh that has them all: "
                    "zbpp.Pipeline(..., mesh=mesh), and name a dimension that is made "
                    "of others like 'dp+cp'"
                )
            if p in seen:
                continue
            seen.add(p)
            for dim in place.dims:
                if dim not in single_dims(names) and broadcast(p, place.group(dim)):
                    differ.setdefault(dim, []).append(name)
        for _, layer in chunk.numbered():
            for buffer in layer.buffers():
                for dim in place.dims:
                    if dim in REPLICA_DIMS:
                        broadcast(buffer, place.group(dim))
    for dim, way in _PARTS.items():
        if dim in differ:
            shown = ", ".join(differ[dim][:3]) + ", ..." * (len(differ[dim]) > 3)
            raise RequestError(
                f"{shown}: plain parameters that differ along {dim!r}, and nothing "
                f"shows that they are parts of others; make them DTensors "
                f"({way}), or let every process begin with the same"
            )


@torch.no_grad()
def broadcast(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Broadcast a tensor's bits; True if they were others here."""
    differed = False
    for part in _dense_parts(own_shard(tensor)):
        before = part.detach().contiguous()
        after = before.clone()
        flat = after.view(-1).view(torch.uint8)
        dist.broadcast(flat, group=group, group_src=0)
        if not torch.equal(flat, before.view(-1).view(torch.uint8)):
            part.copy_(after)
            differed = True
    return differed


def _dense_parts(tensor: Tensor) -> Iterator[Tensor]:
    """The dense tensors that store a tensor of any library's class."""
    if nn.parameter.is_lazy(tensor) or tensor.is_meta or not tensor.numel():
        return
    inner = inner_tensors(tensor)
    if inner is not None:
        for part in inner:
            yield from _dense_parts(part)
    elif tensor.layout is torch.strided and not tensor.is_quantized:
        yield tensor
