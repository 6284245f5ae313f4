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
from itertools import accumulate, chain
from typing import TypeAlias

import numpy as np

from zbpp.core import (
    KINDS,
    ChunkCosts,
    Lane,
    Order,
    Part,
    Pass,
    PassKind,
    Step,
    lower_bound_on,
)
from zbpp.core.jobs import gc_paused, passes
from zbpp.schedules.planner.compiled import Structure, doubles, whole
from zbpp.schedules.planner.limits import ROUNDING, beyond

Row: TypeAlias = "array[int]"
"""Numbers of the passes of a stage, in order."""

Rows: TypeAlias = "list[array[int]]"
"""A row for each stage."""


@dataclass(frozen=True)
class Plan:
    """Rows, and the largest span of a stage if every pass starts as early as it can."""

    span: float
    rows: Rows


class PlacementProblem:
    """Times and memories by number in the chain, or by stage.

    Args:
        costs: joined and above what is fixed; every limit must fit one micro-batch.
        n_microbatches: in a step.
    """

    def __init__(self, costs: ChunkCosts, n_microbatches: int) -> None:
        placement = costs.placement
        n, p, m = placement.n_chunks, placement.n_stages, n_microbatches
        self.costs, self.placement = costs, placement
        self.n_microbatches, self.n_stages, self.n_chunks = m, p, n
        self.n_passes = 3 * n * m
        self.target = lower_bound_on(costs, m) * (1 + ROUNDING)
        """The lower bound of the largest span, and what rounding adds to it."""
        down, up = placement.stage_of, placement.stage_of[::-1]
        self.stage = (*down, *up, *up)
        numbers: list[list[int]] = [[] for _ in range(p)]
        for q in range(2 * n):
            numbers[self.stage[q]].append(q)
        self.numbers = tuple(map(tuple, numbers))
        """The F and B numbers of each stage, in the order of the chain."""
        self.joint = tuple(not split for split in costs.splits)
        """Stages that cannot split their backward: their B's stand for BW."""
        self.time = (*costs.f, *reversed(costs.b), *reversed(costs.w))
        self.delay = (*costs.hops, 0.0, *reversed(costs.hops), 0.0)
        """The time of the message from each number to the next, 0 on one stage."""
        self.pieces = [self._pieces_of(q) for q in range(3 * n)]
        """The lane and the time of each part of a number, or of the pass in one."""
        self.first_part = list(accumulate(map(len, self.pieces), initial=0))
        """The first part of each number in a list of all, and the end of the list."""
        sizes = [0] * p
        for q, stage in enumerate(self.stage):
            sizes[stage] += m * len(self.pieces[q])
        self.rows_from = list(accumulate(sizes, initial=0))
        """Where the row of each stage begins in a list of the parts of all rows."""
        self.work = self._work_on(Lane.COMPUTE)
        self.unit = max(*self.work, *self._work_on(Lane.NETWORK)) / m
        """The work of one micro-batch on the busiest stage, or on its network."""
        self.tiny = ROUNDING * (self.unit or 1.0)
        """A time that is none: what rounding adds to sums of times."""
        freed = [w - b for b, w in zip(costs.m_b, costs.m_w, strict=True)]
        self.change = np.array(
            [*costs.m_b, *reversed(freed), *(-w for w in reversed(costs.m_w))]
        )
        """The memory that each number takes (> 0) or frees (< 0)."""
        inside = *costs.peak_f, *reversed(costs.peak_b), *reversed(costs.peak_w)
        self.peak = np.maximum(self.change, inside)
        """The most memory inside each number, above the memory before it."""
        self.limits = [limit * (1 + ROUNDING) for limit in costs.limit]
        """The memory limit of each stage, and what rounding adds to sums."""
        self.beyond = beyond(costs)
        """Per stage the memory beyond M_B that one micro-batch needs."""
        most_in_w = np.array(
            [max(costs.peak_w[c] for c in x) for x in placement.chunks_of]
        )
        before_w = self.change[: 2 * n] + most_in_w[[*down, *up]]
        self.needs = np.maximum(self.peak[: 2 * n], before_w)
        """Room with which an F or B may start: it fits, and so does any W after it."""
        self.in_c = self._in_c()
        """`Problem` of loops.h; it lives as long as this one."""

    def _pieces_of(self, q: int) -> Sequence[tuple[Lane, float]]:
        """The parts of a number; the W of a stage that cannot split has none."""
        if self.costs.parts:
            return self.costs.parts_of(self.pass_of(q))
        return ((Lane.COMPUTE, self.time[q]),)

    def _work_on(self, lane: Lane) -> tuple[float, ...]:
        """Time that each stage works on a lane."""
        work = [0.0] * self.n_stages
        for stage, pieces in zip(self.stage, self.pieces, strict=True):
            work[stage] += sum(time for on, time in pieces if on is lane)
        return tuple(self.n_microbatches * each for each in work)

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

    def chain_starts(self, stretch: float = 1.0) -> list[float]:
        """Start of each F and B number if nothing waits, times a factor."""
        starts = [0.0]
        for q in range(2 * self.n_chunks - 1):
            starts.append(starts[-1] + self.time[q] + self.delay[q])
        return [stretch * start for start in starts]

    def _forward_limits(self) -> Iterator[float]:
        """Per stage the most memory after an F with which all B's and W's fit later.

        The limit, less the most that any pass adds to what F's left; -inf where no
        micro-batch fits this, though each single pass of it does.
        """
        for limit, numbers in zip(self.limits, self.numbers, strict=True):
            half = len(numbers) // 2
            needs, change = self.needs[[*numbers]], self.change[[*numbers]]
            inside = (needs - np.maximum(0.0, change)).max()
            left = limit - max(0.0, needs[half:].max(), inside)
            yield left if left >= sum(change[:half]) else -math.inf

    def fits(self, rows: Rows) -> bool:
        """True if every row keeps the memory limit of its stage."""
        for row, limit in zip(rows, self.limits, strict=True):
            change = self.change[row]
            if (np.cumsum(change) - change + self.peak[row]).max() > limit:
                return False
        return True

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

    def _in_c(self) -> Structure:
        counts = map(len, self.numbers)
        parts = [*chain.from_iterable(self.pieces)]
        return Structure(
            n_microbatches=self.n_microbatches,
            n_chunks=self.n_chunks,
            n_stages=self.n_stages,
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
            forward_limits=doubles(self._forward_limits()),
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
        n = self.n_chunks
        for q, pieces in enumerate(self.pieces):
            for index, (lane, _) in enumerate(pieces):
                source = 0
                if q >= 2 * n:
                    source = self.first_part[q - n]
                    if self.costs.parts:
                        part = Part(self.pass_of(q), index, lane)
                        source += self.costs.source_of(part)
                yield source


def joined(rows: Sequence[Sequence[int]]) -> "array[int]":
    """All rows as one array."""
    row_after_row = array("i")
    for row in rows:
        row_after_row.extend(row)
    return row_after_row
