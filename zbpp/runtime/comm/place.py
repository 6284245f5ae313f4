"""The place of a process: its stage, and the other processes of the same stage.

    mesh pp 2 x dp 2 x tp 2    stage 1 | row 0: dp 0, tp 0    counts its losses
                                       | row 1: dp 0, tp 1
                                       | row 2: dp 1, tp 0    counts its losses
                                       | row 3: dp 1, tp 1

What all processes sum has a row for each of them, so that every entry has one summand
that is not zero: the sum is exact, and rows are added in their order afterwards.
"""

from collections.abc import Collection
from math import prod
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zbpp.runtime.support.errors import PeerError

STAGE_DIM, CONTEXT_DIM, EXPERT_DIM, TENSOR_DIM = "pp", "cp", "ep", "tp"
REPLICATE_DIM = "dp_replicate"
REPLICA_DIMS = ("dp", REPLICATE_DIM, "dp_shard")
"""Along these all processes of a stage have the same parameters."""
_SAMPLE_DIMS = (*REPLICA_DIMS, EXPERT_DIM)
"""Along these each process reads other samples."""
DATA_DIMS = (*REPLICA_DIMS, CONTEXT_DIM, EXPERT_DIM)
"""Along these each process computes other parts of the loss, and so other summands of
the gradients."""
FLATTENED = "+"
"""Between the names of dimensions in that of the one that they were made."""


class Place:
    """The place of this process on a mesh; without one it is alone."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self.mesh = mesh
        self.everyone: dist.ProcessGroup | None = None
        """All processes that step together."""
        self.rank, self.n_ranks = 0, 1
        """Rank of this process among them, and their number."""
        self.pipeline: tuple[int, ...] = (0,)
        """Ranks of the stages of this process's pipeline."""
        self.coordinates: dict[str, int] = {}
        """Along each dimension of the mesh but that of the stages."""
        self.sizes: dict[str, int] = {}
        """Of these dimensions."""
        if mesh is None:
            return
        is_part = mesh.size() < dist.get_world_size()
        self.everyone = flattened(mesh).get_group() if is_part else dist.group.WORLD
        self.rank, self.n_ranks = dist.get_rank(self.everyone), mesh.size()
        self.pipeline = self.ranks_along((STAGE_DIM,))
        for number, (dim, at) in enumerate(self._coordinates()):
            if dim != STAGE_DIM:
                self.coordinates[dim], self.sizes[dim] = at, mesh.size(number)

    def _coordinates(self) -> list[tuple[str, int]]:
        if self.mesh is None:
            return []
        names, coordinates = self.mesh.mesh_dim_names, self.mesh.get_coordinate()
        return list(zip(names or (), coordinates or (), strict=True))

    @property
    def n_stages(self) -> int:
        """Processes of the pipeline."""
        return len(self.pipeline)

    @property
    def replica(self) -> int:
        """Number of the share of the samples that this process reads."""
        dims = [dim for dim in _SAMPLE_DIMS if dim in self.sizes]
        return self._number(dims)

    @property
    def n_replicas(self) -> int:
        """Shares of the samples of a batch, over ``dp`` and ``ep``."""
        return prod(self.sizes.get(dim, 1) for dim in _SAMPLE_DIMS)

    @property
    def sequence_slice(self) -> int:
        """Number of the slice that this process reads of each sequence."""
        return self.coordinates.get(CONTEXT_DIM, 0)

    @property
    def n_sequence_slices(self) -> int:
        """Slices of every sequence, over ``cp``."""
        return self.sizes.get(CONTEXT_DIM, 1)

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

    # Dimensions of the mesh.

    @property
    def dims(self) -> list[str]:
        """Dimensions but that of the stages along which there are other processes."""
        return [dim for dim, size in self.sizes.items() if size > 1]

    def sum_dims(self, without: Collection[str] = ()) -> list[str]:
        """Those of them that gradients are summed over, but for some."""
        dims = self.dims
        return [dim for dim in DATA_DIMS if dim in dims and dim not in without]

    def group(self, dim: str) -> dist.ProcessGroup:
        """Group of this process along a dimension."""
        assert self.mesh is not None
        return self.mesh.get_group(dim)

    def ranks_along(self, dims: Collection[str]) -> tuple[int, ...]:
        """Ranks of the processes that differ from this one only along these."""
        if self.mesh is None or self.everyone is None:
            return (self.rank,)
        index = tuple(
            slice(None) if dim in dims else at for dim, at in self._coordinates()
        )
        ranks = self.mesh.mesh[index].flatten().tolist()
        return tuple(dist.get_group_rank(self.everyone, rank) for rank in ranks)

    def has_dims(self, dims: Collection[str]) -> bool:
        """True if these are dimensions of the mesh, or made of such."""
        return all(dim in self.sizes for dim in single_dims(dims))

    def owns(self, sharded: Collection[str]) -> bool:
        """True on one process of those with the same part of a tensor, by its dims."""
        dims = single_dims(sharded)
        return not any(at for dim, at in self.coordinates.items() if dim not in dims)

    # The processes of this stage, in rows.

    @property
    def n_peers(self) -> int:
        """Processes of this stage."""
        return prod(self.sizes.values())

    @property
    def peer_ranks(self) -> tuple[int, ...]:
        """Ranks of these processes."""
        return self.ranks_along(self.dims)

    @property
    def row(self) -> int:
        """Number of this process among them."""
        return self._number(self.sizes)

    @property
    def counts_losses(self) -> bool:
        """True for one process of each replica."""
        return self.owns(DATA_DIMS)

    def _number(self, dims: Collection[str]) -> int:
        """Number of this process along some dimensions, the last one the fastest."""
        coordinates = tuple(self.coordinates[dim] for dim in dims)
        sizes = tuple(self.sizes[dim] for dim in dims)
        return int(np.ravel_multi_index(coordinates, sizes))

    def scatter_into_table(self, vector: Tensor) -> Tensor:
        """This process's row in a table of all, flat."""
        if self.n_peers == 1:
            return vector
        table = vector.new_zeros(self.n_peers, len(vector))
        table[self.row] = vector
        return table.flatten()

    def rows(self, flat: Tensor) -> Tensor:
        """The table of a sum, (processes of the stage, entries)."""
        return flat.view(self.n_peers, -1)

    def replica_rows(self, rows: Tensor) -> Tensor:
        """The rows of those that count losses, in the order of the batch."""
        first = tuple(slice(None) if dim in DATA_DIMS else 0 for dim in self.sizes)
        table = rows.view(*self.sizes.values(), -1, rows.shape[-1])
        return table[first].flatten(0, -2)


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh of one dimension; all processes must call."""
    if mesh.ndim == 1:
        return mesh
    return mesh._flatten(FLATTENED.join(mesh.mesh_dim_names or ()))


ALONE = Place()


def single_dims(dims: Collection[str]) -> list[str]:
    """The dimensions that some are made of.

    >>> single_dims(("dp+cp", "ep"))
    ['dp', 'cp', 'ep']
    """
    return [part for dim in dims for part in dim.split(FLATTENED)]
