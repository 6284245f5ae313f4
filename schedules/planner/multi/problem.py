"""A planning problem for any placement, as flat numbers that planners can run fast.

On its way a micro-batch takes 2C passes, for C chunks: F of chunk 0, 1, ... C-1, then
B of chunk C-1, ... 0. Pass number q of this *chain* needs pass q-1, so one number
names a kind and a chunk. Two stages with two chunks each:

    q       0   1   2   3   4   5   6   7
    pass   0F  1F  2F  3F  3B  2B  1B  0B
    stage   0   1   1   0   0   1   1   0

The W of the chunk with B number q is written as number q + C. Identical micro-batches
take turns: within a number they run first in, first out, so a row of numbers says all.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from zbpp.core import (
    ChunkMemory,
    Costs,
    Job,
    MemoryModel,
    Order,
    Pass,
    PassKind,
    PassTimes,
    Placement,
    Step,
    lower_bound_on,
)
from zbpp.core.bulk import gc_paused
from zbpp.schedules.planner.limits import beyond, micro_batch

__all__ = ["PlacementProblem", "Plan", "Rows"]

Rows = list[list[int]]
"""Per stage the numbers of its passes, in order."""


@dataclass(frozen=True)
class Plan:
    """Result of one run of a planner: the rows and the largest span of a stage."""

    span: float
    rows: Rows


@dataclass(frozen=True)
class PlacementProblem:
    """Times and memories by number in the chain; see the module's text.

    Limits are above what is always there.
    """

    times: PassTimes
    memory: ChunkMemory
    n_microbatches: int

    @classmethod
    def of(
        cls,
        placement: Placement,
        n_microbatches: int,
        costs: Costs,
        memory: MemoryModel,
    ) -> "PlacementProblem":
        """Put the numbers together; every limit must hold one micro-batch.

        Raises:
            RequestError: lists of a wrong length.
        """
        times = costs.on(placement)
        held = memory.on(placement, times.splits).above_fixed()
        return cls(times, held, n_microbatches)

    @property
    def placement(self) -> Placement:
        """Chunk to stage."""
        return self.times.placement

    @cached_property
    def n_stages(self) -> int:
        """Number of stages."""
        return self.placement.n_stages

    @cached_property
    def n_chunks(self) -> int:
        """Number of chunks over all stages."""
        return self.placement.n_chunks

    @cached_property
    def n_passes(self) -> int:
        """F's, B's and W's of all micro-batches on all chunks."""
        return 3 * self.n_chunks * self.n_microbatches

    @property
    def memory_model(self) -> MemoryModel:
        """The memories as the caller writes them."""
        memory = self.memory
        limit = None if math.inf in memory.limit else memory.limit
        return MemoryModel(
            memory.m_b,
            memory.m_w,
            limit,
            peak_f=memory.peak_f,
            peak_b=memory.peak_b,
            peak_w=memory.peak_w,
        )

    @cached_property
    def target(self) -> float:
        """The lower bound of the largest span, and what rounding adds to it."""
        bound = lower_bound_on(self.times, self.memory, self.n_microbatches)
        return bound * (1 + 1e-9)

    def lower_limits(self, rows: Rows) -> Iterator["PlacementProblem"]:
        """The same under less memory than some rows hold: all quarters of M_B below."""
        whole = micro_batch(self.memory, self.placement)
        peaks = [self.peak_of(row) for row in rows]
        most = max(
            (peak - more) / one if one > 0 else 0.0
            for peak, more, one in zip(peaks, self.beyond, whole, strict=True)
        )
        for quarters in range(math.ceil(4 * most * (1 - 1e-9)) - 1, 3, -1):
            parts = zip(self.memory.limit, self.beyond, whole, strict=True)
            limit = tuple(
                min(limit, more + quarters / 4 * one) for limit, more, one in parts
            )
            yield replace(self, memory=replace(self.memory, limit=limit))

    def peak_of(self, row: Sequence[int]) -> float:
        """Most memory that a stage holds along a row."""
        if self.is_plain:
            return max(accumulate(map(self.change.__getitem__, row)))
        held = most = 0.0
        for q in row:
            most = max(most, held + self.peak[q])
            held += self.change[q]
        return most

    def chunk(self, q: int) -> int:
        """The chunk of a number."""
        if q < self.n_chunks:
            return q
        return (2 if q < 2 * self.n_chunks else 3) * self.n_chunks - 1 - q

    @cached_property
    def stage(self) -> tuple[int, ...]:
        """The stage of each number."""
        stage_of = self.placement.stage_of
        return (*stage_of, *reversed(stage_of), *reversed(stage_of))

    @cached_property
    def joint(self) -> frozenset[int]:
        """The stages that cannot split their backward: their B's stand for BW."""
        return frozenset(s for s, split in enumerate(self.times.splits) if not split)

    @cached_property
    def time(self) -> tuple[float, ...]:
        """The time of each number: F, B (BW where joint), W."""
        times = self.times
        return (*times.f, *reversed(times.b), *reversed(times.w))

    @cached_property
    def change(self) -> tuple[float, ...]:
        """The memory that each number takes (> 0) or gives back (< 0)."""
        held, kept = self.memory.m_b, self.memory.m_w
        freed = [after - before for before, after in zip(held, kept, strict=True)]
        return (*held, *reversed(freed), *(-one for one in reversed(kept)))

    @cached_property
    def peak(self) -> tuple[float, ...]:
        """The most memory inside each number, above what is held before it."""
        memory = self.memory
        return (*memory.peak_f, *reversed(memory.peak_b), *reversed(memory.peak_w))

    @cached_property
    def is_plain(self) -> bool:
        """True if only F's add memory, and nothing has a peak above what it leaves."""
        return all(
            peak <= max(0.0, change)
            for peak, change in zip(self.peak, self.change, strict=True)
        ) and all(change <= 0 for change in self.change[self.n_chunks :])

    @cached_property
    def needs(self) -> tuple[float, ...]:
        """Room with which an F or B may start: it fits, and so does any W after it."""
        return tuple(
            max(peak, change + self._most_in_w[stage])
            for peak, change, stage in zip(
                self.peak, self.change, self.stage, strict=True
            )
        )[: 2 * self.n_chunks]

    @cached_property
    def _most_in_w(self) -> list[float]:
        """Per stage the largest peak of a W."""
        chunks_of = self.placement.chunks_of
        return [max(self.memory.peak_w[c] for c in own) for own in chunks_of]

    @cached_property
    def beyond(self) -> list[float]:
        """Per stage the memory beyond M_B that one micro-batch needs."""
        return beyond(self.memory, self.placement)

    @cached_property
    def delay(self) -> tuple[float, ...]:
        """The time of the message from each number to the next, 0 on one stage."""
        down = self.times.hops
        return (*down, 0.0, *reversed(down), 0.0)

    @cached_property
    def numbers(self) -> tuple[tuple[int, ...], ...]:
        """The F and B numbers of each stage, in the order of the chain."""
        chain = range(2 * self.n_chunks)
        return tuple(
            tuple(q for q in chain if self.stage[q] == stage)
            for stage in range(self.n_stages)
        )

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Time that each stage computes."""
        times = self.times
        each = [
            sum(times.f[c] + times.b[c] + times.w[c] for c in chunks)
            for chunks in self.placement.chunks_of
        ]
        return tuple(self.n_microbatches * one for one in each)

    @cached_property
    def tiny(self) -> float:
        """A time that is none: what rounding adds to sums of times."""
        return 1e-9 * (max(self.work) / self.n_microbatches or 1.0)

    @cached_property
    def limits(self) -> list[float]:
        """The memory limit of each stage, and what rounding adds to sums."""
        return [one * (1 + 1e-9) for one in self.memory.limit]

    @cached_property
    def forward_limits(self) -> list[float]:
        """Per stage what may be held after an F, so that all B's and W's fit later.

        The limit, less the most that any pass adds to what F's left; -inf where this
        holds no micro-batch, though it fits if each pass is looked at for itself.
        """
        if self.is_plain:
            return self.limits
        found = []
        for stage, own in enumerate(self.numbers):
            inside = [self.needs[q] - max(0.0, self.change[q]) for q in own]
            rise = max(self.needs[q] for q in own[len(own) // 2 :])
            left = self.limits[stage] - max(0.0, rise, *inside)
            found.append(left if left >= self.all_forwards[stage] else -math.inf)
        return found

    @cached_property
    def all_forwards(self) -> list[float]:
        """Per stage the memory of a micro-batch that has had all F's and no B."""
        return [
            sum(self.change[q] for q in own[: len(own) // 2]) for own in self.numbers
        ]

    @cached_property
    def ample(self) -> list[float]:
        """Per stage the room with which an F fits whatever else is to come."""
        return [
            total + max(self.change[q] for q in own[: len(own) // 2])
            for total, own in zip(self.all_forwards, self.numbers, strict=True)
        ]

    @staticmethod
    def passes(order: Iterable[Job]) -> list[Pass]:
        """The passes of an order; optimizer jobs are left out."""
        return [job for job in order if isinstance(job, Pass)]

    @gc_paused()
    def orders(self, rows: Sequence[Sequence[int]]) -> tuple[Order, ...]:
        """Write rows of numbers as jobs, each with its micro-batch."""
        return tuple(
            (*self._jobs(stage, row), Step(stage)) for stage, row in enumerate(rows)
        )

    def _jobs(self, stage: int, row: Sequence[int]) -> Iterable[Pass]:
        backward = PassKind.BW if stage in self.joint else PassKind.B
        kinds = (PassKind.F, backward, PassKind.W)
        done = [0] * (3 * self.n_chunks)
        names = [
            (kinds[q // self.n_chunks], self.chunk(q)) for q in range(3 * self.n_chunks)
        ]
        for q in row:
            yield Pass(*names[q], done[q])
            done[q] += 1
