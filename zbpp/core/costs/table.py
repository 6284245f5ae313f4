"""The one table that plans are made for: times and memories, a row for each chunk.

    chunk    f    b    w    m_b  m_w  peak_f ..      on a placement: `ChunkCosts`
    0        1.0  1.1  0.8  1.0  0.4  1.2
    1        1.0  1.1  0.8  1.0  0.4  1.2
    ..
    links    comm, send_occupies: one entry for each edge between two chunks
    stages   limit, splits

`Costs` holds what the caller writes, with shorthands: one number for all, or one for
each stage. `Costs.on` spreads them over the chunks of a placement, once.
"""

from dataclasses import dataclass, fields, replace

from zbpp.core.costs.columns import check_memory_unit
from zbpp.core.costs.memory_model import ChunkMemory, MemoryModel
from zbpp.core.costs.times import PassTimes, Times
from zbpp.core.placement import Placement

__all__ = ["ChunkCosts", "Costs"]


@dataclass(frozen=True)
class Costs(MemoryModel, Times):
    """Times and memories of chunks: the columns of `Times` and of `MemoryModel`.

    Raises:
        RequestError: a number is negative, not finite or above 1e100, or splits holds
            no booleans.
    """

    def __post_init__(self) -> None:
        check_memory_unit(self.memory_unit)
        Times.__post_init__(self)

    def on(
        self, placement: Placement, splits: tuple[bool, ...] | None = None
    ) -> "ChunkCosts":
        """Give every chunk its share.

        Args:
            placement: chunk to stage.
            splits: see `ChunkMemory.joined`; None: every stage splits its backward.

        Raises:
            RequestError: a list has another length than `zbpp.core.costs.columns` says,
                or a peak is below what its pass leaves.
        """
        memory = super().on(placement, splits)
        return ChunkCosts(**vars(self.times_on(placement)), **vars(memory))

    def with_memory(self, memory: MemoryModel) -> "Costs":
        """The same times with other memories."""
        return replace(self, **vars(memory))

    @property
    def memory(self) -> MemoryModel:
        """The memories without the times."""
        names = [field.name for field in fields(MemoryModel)]
        return MemoryModel(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class ChunkCosts(ChunkMemory, PassTimes):
    """`Costs` on a placement: one entry for each chunk, edge or stage."""
