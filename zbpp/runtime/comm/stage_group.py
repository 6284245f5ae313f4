"""The processes that hold the same stage: replicas of it, and shards of its layers.

    mesh pp 2 x dp 2 x tp 2    stage 1 | row 0: dp 0, tp 0    counts its losses
                                       | row 1: dp 0, tp 1
                                       | row 2: dp 1, tp 0    counts its losses
                                       | row 3: dp 1, tp 1

What all processes sum has a row for each of them, so that every entry has one summand
that is not zero: the sum is exact, and rows are added in their order afterwards.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["ALONE", "EXPERT_DIM", "FLATTENED", "StageGroup", "row_of", "single_dims"]

EXPERT_DIM = "ep"
"""Along it processes hold different experts."""

FLATTENED = "+"
"""Between the names of dimensions in that of the one that they were made."""


@dataclass(frozen=True)
class StageGroup:
    """The place of this process among those of its stage.

    Args:
        row: its number among them.
        n: how many they are.
        replicas: rows of those that compute other parts of the loss, in the order of
            the batch.
        ranks: of the processes, among everyone, that hold the same part of the stage
            on each replica; this one is among them.
        place: coordinate along each dimension of the mesh but that of the stages.
    """

    row: int = 0
    n: int = 1
    replicas: tuple[int, ...] = (0,)
    ranks: tuple[int, ...] = (0,)
    place: Mapping[str, int] = field(default_factory=dict)

    @property
    def counts_losses(self) -> bool:
        """True for one process of each replica."""
        return self.row in self.replicas

    def has_dims(self, dims: Collection[str]) -> bool:
        """True if these are dimensions of the mesh, or made of such."""
        return all(dim in self.place for dim in single_dims(dims))

    def at(self, dims: Collection[str]) -> tuple[int, ...]:
        """Coordinates of this process along some dimensions."""
        return tuple(self.place[dim] for dim in single_dims(dims))

    def owns(self, sharded: Collection[str]) -> bool:
        """True on one process of those that hold the same part of a tensor.

        Args:
            sharded: dimensions along which the parts differ.
        """
        dims = single_dims(sharded)
        return not any(at for dim, at in self.place.items() if dim not in dims)

    def scatter_into_table(self, vector: Tensor) -> Tensor:
        """This process's row in a table of all, flat."""
        if self.n == 1:
            return vector
        table = vector.new_zeros(self.n, len(vector))
        table[self.row] = vector
        return table.flatten()

    def rows(self, flat: Tensor) -> Tensor:
        """The table of a sum, (processes of the stage, entries)."""
        return flat.view(self.n, -1)

    def replica_rows(self, rows: Tensor) -> Tensor:
        """The rows of the replicas, in the order of the batch."""
        return rows if self.n == 1 else rows[list(self.replicas)]


ALONE = StageGroup()


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
