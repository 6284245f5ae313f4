"""The place of a process: its stage, and the processes that hold the same stage.

    mesh pp 2 x dp 2 x tp 2    stage 1 | row 0: dp 0, tp 0    counts its losses
                                       | row 1: dp 0, tp 1
                                       | row 2: dp 1, tp 0    counts its losses
                                       | row 3: dp 1, tp 1

What all processes sum has a row for each of them, so that every entry has one summand
that is not zero: the sum is exact, and rows are added in their order afterwards.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zbpp.runtime.support.errors import PeerError

__all__ = [
    "ALONE",
    "CONTEXT_DIM",
    "DATA_DIMS",
    "EXPERT_DIM",
    "FLATTENED",
    "REPLICATE_DIM",
    "REPLICA_DIMS",
    "STAGE_DIM",
    "TENSOR_DIM",
    "Place",
    "ranks_along",
    "row_of",
    "single_dims",
]

STAGE_DIM, CONTEXT_DIM, EXPERT_DIM, TENSOR_DIM = "pp", "cp", "ep", "tp"
REPLICATE_DIM = "dp_replicate"
REPLICA_DIMS = ("dp", REPLICATE_DIM, "dp_shard")
"""Along these all processes of a stage hold the same model."""
_SAMPLE_DIMS = (*REPLICA_DIMS, EXPERT_DIM)
"""Along these each process reads other samples."""
DATA_DIMS = (*REPLICA_DIMS, CONTEXT_DIM, EXPERT_DIM)
"""Along these each process computes other parts of the loss, and so other summands of
the gradients."""
FLATTENED = "+"
"""Between the names of dimensions in that of the one that they were made."""


@dataclass(frozen=True)
class Place:
    """The place of this process.

    Args:
        everyone: all processes that step together; None: this one is alone.
        pipeline: ranks among them of the stages of this process's pipeline.
        rank: of this process among everyone.
        n_ranks: how many they are.
        mesh: None: there are only stages.
        coordinates: along each dimension of the mesh but that of the stages.
        sizes: of these dimensions.
    """

    everyone: dist.ProcessGroup | None = None
    pipeline: tuple[int, ...] = (0,)
    rank: int = 0
    n_ranks: int = 1
    mesh: DeviceMesh | None = None
    coordinates: Mapping[str, int] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def n_stages(self) -> int:
        """Processes of the pipeline."""
        return len(self.pipeline)

    @property
    def replica(self) -> int:
        """Number of the share of the samples that this process reads."""
        dims = [dim for dim in _SAMPLE_DIMS if dim in self.sizes]
        return row_of(
            [self.coordinates[dim] for dim in dims], [self.sizes[dim] for dim in dims]
        )

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

    @property
    def n_summands(self) -> int:
        """Processes that gradients are summed over."""
        return prod(self.sizes.get(dim, 1) for dim in DATA_DIMS)

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

    # Groups of this process along dimensions of the mesh.

    @property
    def dims(self) -> list[str]:
        """Dimensions but that of the stages along which there are other processes."""
        return [dim for dim, size in self.sizes.items() if size > 1]

    def group(self, dim: str) -> dist.ProcessGroup:
        """Group of this process along a dimension of the mesh."""
        assert self.mesh is not None
        return self.mesh.get_group(dim)

    def sum_dims(self, kept: Collection[str] = ()) -> list[str]:
        """Dimensions of more than one process that gradients are summed over.

        Args:
            kept: dimensions along which each process has a parameter of its own, or
                whose sums are others' business.
        """
        dims = self.dims
        return [dim for dim in DATA_DIMS if dim in dims and dim not in kept]

    def sum_groups(self, kept: Collection[str] = ()) -> list[dist.ProcessGroup]:
        """Groups of `sum_dims`."""
        return [self.group(dim) for dim in self.sum_dims(kept)]

    def ranks_summed(self, kept: Collection[str] = ()) -> tuple[int, ...]:
        """The processes that `sum_groups` are of, this one among them."""
        if self.mesh is None:
            return (self.rank,)
        return ranks_along(self.mesh, self.sum_dims(kept))

    # The processes of this stage, in rows.

    @property
    def n_peers(self) -> int:
        """Processes of this stage."""
        return prod(self.sizes.values())

    @property
    def peer_ranks(self) -> tuple[int, ...]:
        """Ranks of these processes."""
        if self.mesh is None:
            return (self.rank,)
        return ranks_along(self.mesh, self.dims)

    @property
    def row(self) -> int:
        """Number of this process among them."""
        return row_of([*self.coordinates.values()], [*self.sizes.values()])

    @cached_property
    def replica_numbers(self) -> list[int]:
        """Rows of those that compute other parts of the loss, in the order of the
        batch; of neighbours along ``tp`` the first."""
        others = [i for i, dim in enumerate(self.sizes) if dim not in DATA_DIMS]
        places = product(*map(range, self.sizes.values()))
        return [
            row for row, place in enumerate(places) if not any(place[i] for i in others)
        ]

    @property
    def counts_losses(self) -> bool:
        """True for one process of each replica."""
        return self.row in self.replica_numbers

    def has_dims(self, dims: Collection[str]) -> bool:
        """True if these are dimensions of the mesh, or made of such."""
        return all(dim in self.sizes for dim in single_dims(dims))

    def owns(self, sharded: Collection[str]) -> bool:
        """True on one process of those that hold the same part of a tensor.

        Args:
            sharded: dimensions along which the parts differ.
        """
        dims = single_dims(sharded)
        return not any(at for dim, at in self.coordinates.items() if dim not in dims)

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
        """The rows of the replicas, in the order of the batch."""
        return rows if self.n_peers == 1 else rows[self.replica_numbers]


ALONE = Place()


def ranks_along(mesh: DeviceMesh, dims: Collection[str]) -> tuple[int, ...]:
    """Ranks of the processes that differ from this one along some dimensions alone."""
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    at = dict(zip(mesh.mesh_dim_names or (), coordinates, strict=True))
    index = tuple(slice(None) if dim in dims else at[dim] for dim in at)
    return tuple(mesh.mesh[index].flatten().tolist())


def single_dims(dims: Collection[str]) -> list[str]:
    """The dimensions that some are made of.

    >>> single_dims(("dp+cp", "ep"))
    ['dp', 'cp', 'ep']
    """
    return [part for dim in dims for part in dim.split(FLATTENED)]


def row_of(place: Sequence[int], sizes: Sequence[int]) -> int:
    """Number of a place in row-major order.

    >>> row_of((1, 0), (2, 2))
    2
    """
    row = 0
    for at, size in zip(place, sizes, strict=True):
        row = row * size + at
    return row
