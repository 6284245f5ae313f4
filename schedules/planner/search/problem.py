"""A planning problem for any placement, as flat numbers that planners can run fast.

On its way a micro-batch takes 2C passes, for C chunks: F of chunk 0, 1, ... C-1, then
B of chunk C-1, ... 0. Pass number q of this *chain* needs pass q-1, so one number
names a kind and a chunk. Two stages, with one chunk each and with two:

    q       0   1   2   3           0   1   2   3   4   5   6   7
    pass   0F  1F  1B  0B          0F  1F  2F  3F  3B  2B  1B  0B
    stage   0   1   1   0           0   1   1   0   0   1   1   0

The W of the chunk with B number q is written as number q + C. Micro-batches are alike,
so exchanging two of them changes nothing: within a number they run first in, first out.
An order is then a row of numbers, and a pass is named by counting, which is what makes
plans of millions of passes affordable.
"""

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import TypeAlias

from zbpp.core import (
    KINDS,
    ChunkCosts,
    Lane,
    Order,
    Part,
    Pass,
    PassKind,
    Placement,
    Step,
    lower_bound_on,
)
from zbpp.core.jobs import gc_paused, passes
from zbpp.schedules.planner.compiled.binding import Structure, doubles, whole
from zbpp.schedules.planner.limits import beyond

__all__ = ["PlacementProblem", "Plan", "Row", "Rows", "joined"]

_ROUNDING = 1e-9  # relative, of sums of times and of memory; `Schedule` allows as much

Row: TypeAlias = "array[int]"
"""Numbers of the passes of a stage, in order."""

Rows: TypeAlias = "list[array[int]]"
"""A row for each stage."""


@dataclass(frozen=True)
class Plan:
    """Rows, and the largest span of a stage if every pass starts as early as it can."""

    span: float
    rows: Rows


@dataclass(frozen=True)
class PlacementProblem:
    """Times and memories by number in the chain.

    Args:
        costs: joined and above what is fixed; every limit must hold one micro-batch.
        n_microbatches: in a step.
    """

    costs: ChunkCosts
    n_microbatches: int

    @property
    def placement(self) -> Placement:
        """Chunk to stage."""
        return self.costs.placement

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

    @cached_property
    def target(self) -> float:
        """The lower bound of the largest span, and what rounding adds to it."""
        bound = lower_bound_on(self.costs, self.n_microbatches)
        return bound * (1 + _ROUNDING)

    @cached_property
    def stage(self) -> tuple[int, ...]:
        """The stage of each number."""
        stage_of = self.placement.stage_of
        return (*stage_of, *reversed(stage_of), *reversed(stage_of))

    @cached_property
    def numbers(self) -> tuple[tuple[int, ...], ...]:
        """The F and B numbers of each stage, in the order of the chain."""
        chain = range(2 * self.n_chunks)
        return tuple(
            tuple(q for q in chain if self.stage[q] == stage)
            for stage in range(self.n_stages)
        )

    @cached_property
    def joint(self) -> tuple[bool, ...]:
        """Per stage: true if it cannot split its backward; its B's stand for BW."""
        return tuple(not split for split in self.costs.splits)

    @cached_property
    def time(self) -> tuple[float, ...]:
        """The time of each number: F, B (BW where joint), W."""
        times = self.costs
        return (*times.f, *reversed(times.b), *reversed(times.w))

    @cached_property
    def delay(self) -> tuple[float, ...]:
        """The time of the message from each number to the next, 0 on one stage."""
        down = self.costs.hops
        return (*down, 0.0, *reversed(down), 0.0)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Time that each stage computes."""
        return self._work_on(Lane.COMPUTE)

    def _work_on(self, lane: Lane) -> tuple[float, ...]:
        work = [0.0] * self.n_stages
        for q, stage in enumerate(self.stage):
            work[stage] += sum(time for on, time in self.pieces_of(q) if on is lane)
        return tuple(self.n_microbatches * each for each in work)

    @cached_property
    def unit(self) -> float:
        """The work of one micro-batch on the busiest stage, or on its network."""
        work = *self.work, *self._work_on(Lane.NETWORK)
        return max(work) / self.n_microbatches

    @cached_property
    def tiny(self) -> float:
        """A time that is none: what rounding adds to sums of times."""
        return _ROUNDING * (self.unit or 1.0)

    def pass_of(self, q: int, microbatch: int = 0) -> Pass:
        """The pass of a number."""
        n = self.n_chunks
        kind = (PassKind.F, PassKind.B, PassKind.W)[q // n]
        return Pass(kind, q if q < n else n - 1 - q % n, microbatch)

    def numbers_of(self, kind: PassKind, chunk: int) -> list[int]:
        """The number of a pass, and of both that a BW is."""
        b = 2 * self.n_chunks - 1 - chunk
        parts = {PassKind.F: chunk, PassKind.B: b, PassKind.W: b + self.n_chunks}
        return [parts[each] for each in KINDS[kind].work]

    def pieces_of(self, q: int) -> Sequence[tuple[Lane, float]]:
        """The lane and the time of each part of a number; without parts, of the pass.

        The W of a stage that cannot split has no parts of its own.
        """
        if self.costs.parts:
            return self.costs.parts_of(self.pass_of(q))
        return ((Lane.COMPUTE, self.time[q]),)

    @cached_property
    def first_part(self) -> list[int]:
        """The first part of each number in a list of all, and the end of the list."""
        counts = (len(self.pieces_of(q)) for q in range(3 * self.n_chunks))
        return list(accumulate(counts, initial=0))

    @cached_property
    def rows_from(self) -> list[int]:
        """Where the row of each stage begins in a list of the parts of all rows."""
        sizes = [0] * self.n_stages
        for q, stage in enumerate(self.stage):
            n_parts = self.first_part[q + 1] - self.first_part[q]
            sizes[stage] += self.n_microbatches * n_parts
        return list(accumulate(sizes, initial=0))

    def chain_starts(self, stretch: float = 1.0) -> list[float]:
        """Start of each F and B number if nothing waits, times a factor."""
        starts = [0.0]
        for q in range(2 * self.n_chunks - 1):
            starts.append(starts[-1] + self.time[q] + self.delay[q])
        return [stretch * start for start in starts]

    @cached_property
    def change(self) -> tuple[float, ...]:
        """The memory that each number takes (> 0) or gives back (< 0)."""
        held, kept = self.costs.m_b, self.costs.m_w
        freed = [after - before for before, after in zip(held, kept, strict=True)]
        return (*held, *reversed(freed), *(-left for left in reversed(kept)))

    @cached_property
    def peak(self) -> tuple[float, ...]:
        """The most memory inside each number, above what is held before it."""
        memory = self.costs
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
        most_in_w = [
            max(self.costs.peak_w[c] for c in chunks)
            for chunks in self.placement.chunks_of
        ]
        return tuple(
            max(self.peak[q], self.change[q] + most_in_w[self.stage[q]])
            for q in range(2 * self.n_chunks)
        )

    @cached_property
    def limits(self) -> list[float]:
        """The memory limit of each stage, and what rounding adds to sums."""
        return [limit * (1 + _ROUNDING) for limit in self.costs.limit]

    @cached_property
    def forward_limits(self) -> list[float]:
        """Per stage what may be held after an F, so that all B's and W's fit later.

        The limit, less the most that any pass adds to what F's left; -inf where this
        holds no micro-batch, though it fits if each pass is looked at for itself.
        """
        if self.is_plain:
            return self.limits
        limits = []
        for stage, numbers in enumerate(self.numbers):
            half = len(numbers) // 2
            inside = [self.needs[q] - max(0.0, self.change[q]) for q in numbers]
            rise = max(self.needs[q] for q in numbers[half:])
            left = self.limits[stage] - max(0.0, rise, *inside)
            whole = sum(self.change[q] for q in numbers[:half])
            limits.append(left if left >= whole else -math.inf)
        return limits

    @cached_property
    def beyond(self) -> list[float]:
        """Per stage the memory beyond M_B that one micro-batch needs."""
        return beyond(self.costs)

    def peak_of(self, row: Sequence[int]) -> float:
        """Most memory that a stage holds along a row."""
        if self.is_plain:
            return max(accumulate(map(self.change.__getitem__, row)))
        held = most = 0.0
        for q in row:
            most = max(most, held + self.peak[q])
            held += self.change[q]
        return most

    def fits(self, rows: Rows) -> bool:
        """True if every row keeps the memory limit of its stage."""
        pairs = zip(rows, self.limits, strict=True)
        return all(self.peak_of(row) <= limit for row, limit in pairs)

    @gc_paused()
    def orders(self, rows: Rows) -> tuple[Order, ...]:
        """Write rows of numbers as passes, and let each stage step at its end."""
        left = []
        for q, stage in enumerate(self.stage):
            first = self.pass_of(q)
            is_joint = first.kind is PassKind.B and self.joint[stage]
            kind = PassKind.BW if is_joint else first.kind
            left.append(iter(passes(kind, first.chunk, self.n_microbatches)))
        return tuple(
            (*map(next, map(left.__getitem__, row)), Step(stage))
            for stage, row in enumerate(rows)
        )

    @cached_property
    def in_c(self) -> Structure:
        """`Problem` of loops.h; it lives as long as the problem."""
        counts = [len(numbers) for numbers in self.numbers]
        parts = [part for q in range(3 * self.n_chunks) for part in self.pieces_of(q)]
        return Structure(
            n_microbatches=self.n_microbatches,
            n_chunks=self.n_chunks,
            n_stages=self.n_stages,
            is_plain=int(self.is_plain),
            unit=float(self.unit),
            tiny=self.tiny,
            target=self.target,
            time=doubles(self.time),
            change=doubles(self.change),
            peak=doubles(self.peak),
            delay=doubles(self.delay),
            needs=doubles(self.needs),
            work=doubles(self.work),
            limits=doubles(self.limits),
            forward_limits=doubles(self.forward_limits),
            stage=whole(self.stage),
            numbers=whole(chain.from_iterable(self.numbers)),
            first=whole(accumulate(counts, initial=0)),
            joint=whole(self.joint),
            part_from=whole(self.first_part),
            is_network=whole(lane is Lane.NETWORK for lane, _ in parts),
            source=whole(self._sources()),
            part_time=doubles(time for _, time in parts),
        )

    def _sources(self) -> Iterator[int]:
        """For each part of a W the part of its B that it needs; 0 for others."""
        for q in range(3 * self.n_chunks):
            for index, (lane, _) in enumerate(self.pieces_of(q)):
                source = 0
                if q >= 2 * self.n_chunks:
                    part = Part(self.pass_of(q), index, lane)
                    source = self.first_part[q - self.n_chunks]
                    source += self.costs.source_of(part) if self.costs.parts else 0
                yield source


def joined(rows: Sequence[Sequence[int]]) -> "array[int]":
    """All rows as one array."""
    row_after_row = array("i")
    for row in rows:
        row_after_row.extend(row)
    return row_after_row
