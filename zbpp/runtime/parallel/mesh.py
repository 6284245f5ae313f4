"""One mesh for stages, data and tensor parallelism.

    zbpp.mesh(stages=2, data_parallel=2, tensor_parallel=2)

    pp   stages                                     each holds other layers
    dp   replicas, or ``dp_replicate`` x ``dp_shard``   each reads other samples
    tp   tensor parallelism                          each holds parts of the layers

Ranks are in row-major order, the last dimension the fastest: what talks most lies in
one node.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zbpp.core import RequestError
from zbpp.runtime.comm.process_group import initialise, own_device, place_in
from zbpp.runtime.comm.stage_group import ALONE, StageGroup, row_of

__all__ = ["DATA_DIMS", "Place", "data_mesh", "find_place", "make_mesh"]

DATA_DIMS = ("dp", "dp_replicate", "dp_shard")
_STAGES, _TENSOR = "pp", "tp"


@dataclass(frozen=True)
class Place:
    """The place of this process.

    Args:
        everyone: all processes that step together; None: this one is alone.
        pipeline: ranks among them, by stage, of those that this one is a stage beside.
        rank: of this process among everyone.
        n_ranks: how many they are.
        peers: those of the same stage.
        mesh: None: there are only stages.
    """

    everyone: dist.ProcessGroup | None
    pipeline: tuple[int, ...]
    rank: int
    n_ranks: int
    peers: StageGroup = ALONE
    mesh: DeviceMesh | None = None

    @property
    def n_stages(self) -> int:
        """Processes of the pipeline."""
        return len(self.pipeline)

    @property
    def replica(self) -> int:
        """Number of the share of the batch that this process reads."""
        place = self.peers.place
        dims = [dim for dim in DATA_DIMS if dim in place]
        sizes = [] if self.mesh is None else [self.mesh[dim].size() for dim in dims]
        return row_of([place[dim] for dim in dims], sizes)

    @property
    def n_replicas(self) -> int:
        """Shares of a batch."""
        return len(self.peers.replicas)

    @property
    def sides(self) -> list[dist.ProcessGroup]:
        """Groups of this process along the dimensions of its peers."""
        if self.mesh is None:
            return []
        return [self.mesh.get_group(dim) for dim in self.peers.place]


def make_mesh(
    *,
    stages: int,
    data_parallel: int = 1,
    replicate: int = 1,
    tensor_parallel: int = 1,
    device: torch.device | str | None = None,
    timeout_s: float = 600.0,
) -> DeviceMesh:
    """Make the mesh of a run; all its processes must call.

    Dimensions are ``pp``, ``dp`` and ``tp``; with ``replicate`` ``dp_replicate`` and
    ``dp_shard`` stand for ``dp``.

    Args:
        stages: of the pipeline.
        data_parallel: replicas, those of ``replicate`` included.
        replicate: of them, groups that each hold all shards (HSDP); 1: none.
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
    sizes = {_STAGES: stages, "dp": data_parallel, _TENSOR: tensor_parallel}
    if replicate > 1:
        data = {"dp_replicate": replicate, "dp_shard": data_parallel // replicate}
        sizes = {_STAGES: stages, **data, _TENSOR: tensor_parallel}
    n = dist.get_world_size() if dist.is_initialized() else 1
    needed = stages * data_parallel * tensor_parallel
    if needed != n:
        raise RequestError(
            f"{stages} stages x {data_parallel} replicas x {tensor_parallel} tensor "
            f"parallel are {needed} processes, and there are {n}; start as many"
        )
    return init_device_mesh(
        here.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)
    )


def find_place(
    mesh: DeviceMesh | None, group: dist.ProcessGroup | None, *, n_stages: int | None
) -> Place:
    """Return the place of this process on a mesh, or in a group of stages alone.

    Args:
        mesh: None: there are only stages.
        group: of them; None: all processes.
        n_stages: that were asked for.

    Raises:
        RequestError: the mesh is none that a pipeline can run on.
    """
    if mesh is None:
        group, rank, n = place_in(group)
        return Place(group, tuple(range(n)), rank, n)
    sizes = _sizes(mesh)
    if group is not None:
        raise RequestError("give mesh or group, not both: the mesh has the groups")
    if n_stages not in (None, sizes.get(_STAGES, 1)):
        raise RequestError(
            f"the mesh has {sizes.get(_STAGES, 1)} stage(s), and {n_stages} were asked "
            f"for: each process of a mesh runs one; give it a dimension {_STAGES!r} of "
            f"{n_stages}"
        )
    n = dist.get_world_size()
    if mesh.size() != n:
        raise RequestError(
            f"the mesh holds {mesh.size()} of {n} processes; a pipeline's holds all"
        )
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    at = dict(zip(sizes, coordinates, strict=True))
    rank = dist.get_rank()
    index = tuple(slice(None) if dim == _STAGES else at[dim] for dim in sizes)
    pipeline = tuple(mesh.mesh[index].flatten().tolist())
    index = tuple(slice(None) if dim in DATA_DIMS else at[dim] for dim in sizes)
    ranks = tuple(mesh.mesh[index].flatten().tolist())
    at.pop(_STAGES, None)
    sizes.pop(_STAGES, None)
    return Place(
        dist.group.WORLD, pipeline, rank, n, _stage_group(at, sizes, ranks), mesh
    )


def _sizes(mesh: DeviceMesh) -> dict[str, int]:
    """Sizes of the dimensions by name.

    Raises:
        RequestError: a name is unknown, or dp stands beside its parts.
    """
    names = mesh.mesh_dim_names or ()
    known = (_STAGES, *DATA_DIMS, _TENSOR)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise RequestError(
            f"the mesh has the dimensions {names}; a pipeline knows {known}"
        )
    return dict(zip(names, mesh.shape, strict=True))


def _stage_group(
    at: Mapping[str, int], sizes: Mapping[str, int], ranks: tuple[int, ...]
) -> StageGroup:
    """The processes of this stage.

    Args:
        at: coordinates of this process, by dimension, but for that of the stages.
        sizes: of these dimensions.
        ranks: see `StageGroup`.
    """
    others = [dim for dim in sizes if dim not in DATA_DIMS]
    places = [
        dict(zip(sizes, place, strict=True))
        for place in product(*map(range, sizes.values()))
    ]
    replicas = [
        row for row, place in enumerate(places) if not any(place[d] for d in others)
    ]
    return StageGroup(places.index(dict(at)), len(places), (*replicas,), ranks, at)


def data_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """The part of a mesh that holds replicas or shards; None: there is only one."""
    names = mesh.mesh_dim_names or ()
    dims: Sequence[str] = [dim for dim in DATA_DIMS if dim in names]
    if not dims:
        return None
    return mesh[dims[0]] if len(dims) == 1 else mesh[tuple(dims)]
