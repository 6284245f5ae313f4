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

__all__ = ["ALONE", "StageGroup"]


@dataclass(frozen=True)
class StageGroup:
    """The place of this process among those of its stage.

    Args:
        row: its number among them.
        n: how many they are.
        replicas: rows of those with which others share a batch, in its order.
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
        """True if these are dimensions of the mesh."""
        return all(dim in self.place for dim in dims)

    def owns(self, sharded: Collection[str]) -> bool:
        """True on one process of those that hold the same part of a tensor.

        Args:
            sharded: dimensions along which the parts differ.
        """
        return not any(at for dim, at in self.place.items() if dim not in sharded)

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


def row_of(place: Sequence[int], sizes: Sequence[int]) -> int:
    """Number of a place in row-major order.

    >>> row_of((1, 0), (2, 2))
    2
    """
    row = 0
    for at, size in zip(place, sizes, strict=True):
        row = row * size + at
    return row
