"""One mesh for stages, data, context, expert and tensor parallelism.

    zbpp.mesh(stages=2, data_parallel=2, expert_parallel=2)

    pp   stages                each holds other layers
    dp   replicas              each reads other samples
    cp   context parallelism   each reads another slice of the same sequences
    ep   expert parallelism    each reads other samples, and holds other experts
    tp   tensor parallelism    each holds parts of the layers

``dp_replicate`` and ``dp_shard`` may stand for ``dp``. Ranks are in row-major order,
the last dimension the fastest: what talks most lies in one node.

Gradients are summed over dp x cp x ep, those of experts over dp x cp.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zbpp.core import RequestError
from zbpp.runtime.comm.process_group import initialise, place_in
from zbpp.runtime.comm.stage_group import (
    ALONE,
    EXPERT_DIM,
    FLATTENED,
    StageGroup,
    row_of,
)
from zbpp.runtime.support.devices import own_device
from zbpp.runtime.support.errors import PeerError

__all__ = [
    "DATA_DIMS",
    "REPLICA_DIMS",
    "TENSOR_DIM",
    "Place",
    "find_place",
    "make_mesh",
    "shard_mesh",
]

_STAGES, _CONTEXT, TENSOR_DIM = "pp", "cp", "tp"
_REPLICATE = "dp_replicate"
REPLICA_DIMS = frozenset({"dp", _REPLICATE, "dp_shard"})
"""Along these all processes of a stage hold the same model."""
_SAMPLE_DIMS = ("dp", _REPLICATE, "dp_shard", EXPERT_DIM)
"""Along these each process reads other samples."""
DATA_DIMS = ("dp", _REPLICATE, "dp_shard", _CONTEXT, EXPERT_DIM)
"""Along these each process computes other parts of the loss, and so other summands of
the gradients."""


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
        """Number of the share of the samples that this process reads."""
        dims = [dim for dim in _SAMPLE_DIMS if dim in self.peers.place]
        return row_of([self.peers.place[dim] for dim in dims], [*map(self._size, dims)])

    @property
    def n_replicas(self) -> int:
        """Shares of the samples of a batch, over ``dp`` and ``ep``."""
        return prod(self._size(dim) for dim in _SAMPLE_DIMS)

    @property
    def sequence_slice(self) -> int:
        """Number of the slice that this process reads of each sequence."""
        return self.peers.place.get(_CONTEXT, 0)

    @property
    def n_sequence_slices(self) -> int:
        """Slices of every sequence, over ``cp``."""
        return self._size(_CONTEXT)

    @property
    def dims(self) -> list[str]:
        """Dimensions but that of the stages along which there are other processes."""
        return [dim for dim in self.peers.place if self._size(dim) > 1]

    @property
    def n_summands(self) -> int:
        """Processes that gradients are summed over."""
        return len(self.peers.replicas)

    def gather(self, thing: Any) -> list[Any]:
        """Give every process the picklable things of all, by rank.

        Raises:
            PeerError: a process has ended.
        """
        if self.n_ranks == 1:
            return [thing]
        things: list[Any] = [None] * self.n_ranks
        try:
            dist.all_gather_object(things, thing, group=self.everyone)
        except RuntimeError as error:
            raise PeerError(
                f"rank {self.rank} does not reach the others at the start: {error}"
            ) from error
        return things

    def group(self, dim: str) -> dist.ProcessGroup:
        """Group of this process along a dimension of the mesh."""
        assert self.mesh is not None
        return self.mesh.get_group(dim)

    def sum_groups(self, kept: Collection[str] = ()) -> list[dist.ProcessGroup]:
        """Groups, by dimension, that gradients are summed over.

        Args:
            kept: dimensions along which each process has a parameter of its own, or
                whose sums are others' business.
        """
        return [self.group(dim) for dim in self.sum_dims(kept)]

    def sum_dims(self, kept: Collection[str] = ()) -> list[str]:
        """Dimensions of more than one process that gradients are summed over."""
        return [dim for dim in DATA_DIMS if dim not in kept and self._size(dim) > 1]

    def ranks_summed(self, kept: Collection[str] = ()) -> tuple[int, ...]:
        """The processes that `sum_groups` are of, this one among them."""
        assert self.mesh is not None
        return _ranks_along(self.mesh, self.sum_dims(kept))

    def _size(self, dim: str) -> int:
        if self.mesh is None or dim not in self.peers.place:
            return 1
        return self.mesh.shape[(self.mesh.mesh_dim_names or ()).index(dim)]

    def sides(self, *, shards: bool = False) -> list[dist.ProcessGroup]:
        """Groups of this process along the dimensions of its peers.

        Args:
            shards: those that `shard_mesh` makes, too; all processes must call.
        """
        if self.mesh is None:
            return []
        groups = [self.mesh.get_group(dim) for dim in self.peers.place]
        for kept in ((), (EXPERT_DIM,)) if shards else ():
            part = shard_mesh(self.mesh, kept)
            groups += [] if part is None else part.get_all_groups()
        return list(dict.fromkeys(groups))


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
        replicate: of them, groups that each hold all shards (HSDP); 1: none.
        context_parallel: processes that read slices of the same sequences.
        expert_parallel: processes that hold different experts of each layer, and read
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
        data = {_REPLICATE: replicate, "dp_shard": data_parallel // replicate}
    sizes = {
        _STAGES: stages,
        **data,
        _CONTEXT: context_parallel,
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
    pipeline = _ranks_along(mesh, (_STAGES,))
    ranks = _ranks_along(mesh, DATA_DIMS)
    at.pop(_STAGES, None)
    sizes.pop(_STAGES, None)
    return Place(
        dist.group.WORLD, pipeline, rank, n, _stage_group(at, sizes, ranks), mesh
    )


def _ranks_along(mesh: DeviceMesh, dims: Collection[str]) -> tuple[int, ...]:
    """Ranks of the processes that differ from this one along some dimensions alone."""
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    at = dict(zip(mesh.mesh_dim_names or (), coordinates, strict=True))
    index = tuple(slice(None) if dim in dims else at[dim] for dim in at)
    return tuple(mesh.mesh[index].flatten().tolist())


def _sizes(mesh: DeviceMesh) -> dict[str, int]:
    """Sizes of the dimensions by name.

    Raises:
        RequestError: a name is unknown, or dp stands beside its parts.
    """
    names = mesh.mesh_dim_names or ()
    known_names = (_STAGES, *DATA_DIMS, TENSOR_DIM)
    unknown = [name for name in names if name not in known_names]
    if unknown or not names:
        raise RequestError(
            f"the mesh has the dimensions {names}; a pipeline knows {known_names}"
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


def shard_mesh(mesh: DeviceMesh, kept: Collection[str] = ()) -> DeviceMesh | None:
    """The part of a mesh that parameters are dealt out over; None: there is none.

    All processes of the mesh must call. With ``dp_replicate`` it has two dimensions,
    the second one that of the shards; several dimensions of shards are made one.

    Args:
        mesh: of the pipeline.
        kept: dimensions along which each process has parameters of its own.
    """
    names = mesh.mesh_dim_names or ()
    dims = [dim for dim in names if dim in DATA_DIMS and dim not in kept]
    copies = [dim for dim in dims if dim == _REPLICATE]
    shards = [dim for dim in dims if dim != _REPLICATE]
    several = [dim for dim in shards if mesh[dim].size() > 1] or shards[:1]
    if not several:
        return mesh[copies[0]] if copies else None
    part = mesh[several[0]]
    if len(several) > 1:
        part = mesh[tuple(several)]._flatten(FLATTENED.join(several))
    if not copies:
        return part
    if len(several) == 1:
        return mesh[(copies[0], several[0])]
    return DeviceMesh._concatenate([mesh[copies[0]], part])
