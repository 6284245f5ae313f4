"""One mesh for stages, data, context, expert and tensor parallelism.

    zbpp.mesh(stages=2, data_parallel=2, expert_parallel=2)

    pp   stages                each has other layers
    dp   replicas              each reads other samples
    cp   context parallelism   each reads another slice of the same sequences
    ep   expert parallelism    each reads other samples, and has other experts
    tp   tensor parallelism    each has parts of the layers

``dp_replicate`` and ``dp_shard`` may stand for ``dp``. Ranks are in row-major order,
the last dimension the fastest: what talks most lies in one node.

Gradients are summed over dp x cp x ep, those of experts over dp x cp.
"""

from collections.abc import Collection
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zbpp.core import RequestError
from zbpp.runtime.comm.place import (
    CONTEXT_DIM,
    DATA_DIMS,
    EXPERT_DIM,
    REPLICATE_DIM,
    STAGE_DIM,
    TENSOR_DIM,
    Place,
    flattened,
)
from zbpp.runtime.comm.process_group import initialise
from zbpp.runtime.support.devices import own_device


def make_mesh(
    *,
    stages: int,
    data_parallel: int = 1,
    replicate: int = 1,
    context_parallel: int = 1,
    expert_parallel: int = 1,
    tensor_parallel: int = 1,
    device: torch.device | str | None = None,
    timeout_s: float = 600.0,
) -> DeviceMesh:
    """Make the mesh of a run; all its processes must call.

    Dimensions are ``pp``, ``dp``, ``cp``, ``ep`` and ``tp``; with ``replicate``
    ``dp_replicate`` and ``dp_shard`` stand for ``dp``.

    Args:
        stages: of the pipeline.
        data_parallel: replicas, those of ``replicate`` included.
        replicate: of them, groups with all shards each (HSDP); 1: none.
        context_parallel: processes that read slices of the same sequences.
        expert_parallel: processes that have different experts of each layer, and read
            different samples.
        tensor_parallel: processes that share each layer.
        device: of this process; None: its GPU, else the CPU.
        timeout_s: for the other processes.

    Raises:
        RequestError: the sizes do not multiply to the number of processes.
    """
    here = own_device(device)
    initialise(here, timeout_s=timeout_s)
    if data_parallel % replicate:
        raise RequestError(
            f"data_parallel is {data_parallel}, which {replicate} groups cannot share"
        )
    data = {"dp": data_parallel}
    if replicate > 1:
        data = {REPLICATE_DIM: replicate, "dp_shard": data_parallel // replicate}
    sizes = {
        STAGE_DIM: stages,
        **data,
        CONTEXT_DIM: context_parallel,
        EXPERT_DIM: expert_parallel,
        TENSOR_DIM: tensor_parallel,
    }
    n = dist.get_world_size() if dist.is_initialized() else 1
    needed = prod(sizes.values())
    if needed != n:
        text = " x ".join(f"{size} {dim}" for dim, size in sizes.items())
        raise RequestError(
            f"a mesh of {text} has {needed} processes, and there are {n}; start as many"
        )
    if not dist.is_initialized():  # alone, and a mesh has groups
        make_store: Any = getattr(dist, "HashStore")  # noqa: B009 - torch has no type
        dist.init_process_group(store=make_store(), rank=0, world_size=1)
    return init_device_mesh(
        here.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)
    )


def find_place(
    mesh: DeviceMesh | None, device: torch.device, *, n_stages: int | None
) -> Place:
    """Find the place of this process on a mesh; None: all processes are stages."""
    if mesh is not None:
        _check_mesh(mesh, n_stages)
    elif dist.group.WORLD is not None:
        mesh = DeviceMesh.from_group(
            dist.group.WORLD, device.type, mesh_dim_names=(STAGE_DIM,)
        )
    return Place(mesh)


def _check_mesh(mesh: DeviceMesh, n_stages: int | None) -> None:
    names = mesh.mesh_dim_names or ()
    known_names = (STAGE_DIM, *DATA_DIMS, TENSOR_DIM)
    if not names or not set(names) <= set(known_names):
        raise RequestError(
            f"the mesh has the dimensions {names}; a pipeline knows {known_names}"
        )
    n_here = mesh.size(names.index(STAGE_DIM)) if STAGE_DIM in names else 1
    if n_stages not in (None, n_here):
        raise RequestError(
            f"the mesh has {n_here} stage(s), and n_stages is {n_stages}: each process "
            f"of a mesh runs one stage; give it a dimension 'pp' of {n_stages}"
        )


def shard_mesh(mesh: DeviceMesh, without: Collection[str] = ()) -> DeviceMesh | None:
    """The part of a mesh that parameters are sharded over; None: there is none.

    All processes of the mesh must call. With ``dp_replicate`` it has two dimensions,
    the second that of the shards; several dimensions of shards are flattened.
    Dimensions in ``without`` are left out.
    """
    names = mesh.mesh_dim_names or ()
    dims = [dim for dim in names if dim in DATA_DIMS and dim not in without]
    copies = [dim for dim in dims if dim == REPLICATE_DIM]
    shards = [dim for dim in dims if dim != REPLICATE_DIM]
    several = [dim for dim in shards if mesh[dim].size() > 1] or shards[:1]
    if not several:
        return mesh[copies[0]] if copies else None
    part = mesh[several[0]]
    if len(several) > 1:
        part = flattened(mesh[tuple(several)])
    if not copies:
        return part
    if len(several) == 1:
        return mesh[(copies[0], several[0])]
    return DeviceMesh._concatenate([mesh[copies[0]], part])
