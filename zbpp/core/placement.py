"""Placement of the chunks on the stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from zbpp.core.errors import RequestError


@dataclass(frozen=True)
class Placement:
    """Chunk to stage; chunks are numbered in forward order over the whole model.

    ====================  =======================
    one chunk a stage     ``0 1 2 3``
    interleaved, 2 each   ``0 1 2 3 0 1 2 3``
    V                     ``0 1 2 3 3 2 1 0``
    ====================  =======================

    Raises:
        RequestError: a stage from 0 to the largest one named has no chunk.
    """

    stage_of: tuple[int, ...]

    def __post_init__(self) -> None:
        stages = set(self.stage_of)
        if not stages or min(stages) < 0 or max(stages) != len(stages) - 1:
            raise RequestError(
                f"placement {list(self.stage_of)}: every stage from 0 up to the "
                "largest must have at least one chunk"
            )

    @classmethod
    def single(cls, n_stages: int) -> "Placement":
        """One chunk a stage: ``0 1 2 3``."""
        return cls.interleaved(n_stages, 1)

    @classmethod
    def interleaved(cls, n_stages: int, chunks_per_stage: int) -> "Placement":
        """Round and round: ``0 1 2 3 0 1 2 3``."""
        return cls(tuple(range(n_stages)) * chunks_per_stage)

    @classmethod
    def wave(cls, n_stages: int, chunks_per_stage: int = 2) -> "Placement":
        """To and fro; two chunks a stage make the V: ``0 1 2 3 3 2 1 0``."""
        down = tuple(range(n_stages))
        legs = (down if leg % 2 == 0 else down[::-1] for leg in range(chunks_per_stage))
        return cls(tuple(stage for leg in legs for stage in leg))

    @cached_property
    def n_stages(self) -> int:
        """Number of stages."""
        return max(self.stage_of) + 1

    @property
    def n_chunks(self) -> int:
        """Number of chunks over all stages."""
        return len(self.stage_of)

    @cached_property
    def n_siblings(self) -> tuple[int, ...]:
        """Number of chunks on the stage of each chunk, itself included."""
        return tuple(len(self.chunks_of[stage]) for stage in self.stage_of)

    @cached_property
    def chunks_of(self) -> tuple[tuple[int, ...], ...]:
        """The chunks of each stage, in forward order."""
        stages: list[list[int]] = [[] for _ in range(self.n_stages)]
        for chunk, stage in enumerate(self.stage_of):
            stages[stage].append(chunk)
        return tuple(tuple(chunks) for chunks in stages)

    @cached_property
    def neighbours_of(self) -> tuple[frozenset[int], ...]:
        """The other stages that each stage exchanges messages with."""
        neighbours: list[set[int]] = [set() for _ in range(self.n_stages)]
        for stage, other in pairwise(self.stage_of):
            if stage != other:
                neighbours[stage].add(other)
                neighbours[other].add(stage)
        return tuple(map(frozenset, neighbours))


def even_split(n_layers: int, n_chunks: int) -> tuple[int, ...]:
    """Divide layers evenly among chunks; the outer chunks get the extra layers.

    The first and last layers often are an embedding and a head: then each chunk has as
    many blocks, here 2.

    >>> even_split(10, 4)
    (3, 2, 2, 3)

    Raises:
        RequestError: fewer layers than chunks.
    """
    if n_layers < n_chunks:
        raise RequestError(
            f"{n_layers} layers cannot fill {n_chunks} chunks, one each at least; use "
            "fewer stages, or a mode with fewer chunks a stage"
        )
    base, more = divmod(n_layers, n_chunks)
    places = ((2 * i, 2 * (n_chunks - i) - 1) for i in range(n_chunks))
    return tuple(base + (min(from_ends) < more) for from_ends in places)


def check_split(split: Sequence[int], n_layers: int, n_chunks: int) -> None:
    """Refuse a split that does not give every chunk layers, and every layer a chunk."""
    if len(split) != n_chunks or sum(split) != n_layers or min(split) < 1:
        raise RequestError(
            f"split {list(split)} must have {n_chunks} entries from 1 on that add up "
            f"to {n_layers} layers; it has {len(split)}, with the sum {sum(split)}"
        )


def ranges_of(split: Sequence[int]) -> list[range]:
    """Layers of each chunk of a split.

    >>> ranges_of((3, 2))
    [range(0, 3), range(3, 5)]
    """
    return [range(*ends) for ends in pairwise(accumulate(split, initial=0))]
