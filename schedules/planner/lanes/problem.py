"""A problem with parts as flat numbers, and the rules that a list schedule follows.

As in `zbpp.schedules.planner.search.problem`, a number q names a kind and a chunk: F of
0 .. C-1, then B of C-1 .. 0, then W of C-1 .. 0. The parts of all numbers stand in one
list, those of q from ``first[q]`` on.

    q       0           1           2           3           4     5
    pass    0F          1F          1B          0B          1W    0W
    parts   0 1 2 3     4 5 6 7     8 ..
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from zbpp.core import (
    ChunkCosts,
    Job,
    Lane,
    Order,
    Part,
    Pass,
    PassKind,
    Schedule,
    Step,
)
from zbpp.schedules.planner.search.problem import PlacementProblem

__all__ = ["LaneProblem", "LaneRules", "Rows"]

Rows = list[list[tuple[int, int]]]
"""For each stage its parts in the order of their starts: index and micro-batch."""

_LANES = (Lane.COMPUTE, Lane.NETWORK)


@dataclass(frozen=True)
class LaneRules:
    """Settings of a list schedule; lists are by stage unless said.

    Args:
        rank: of each F and B number: what its turn of a micro-batch costs it; the
            least of rank and turn goes first.
        cap: micro-batches between their first F and their last B.
        most_f, most_b: F's and B's at once.
        most_w: W's that wait before the next goes ahead of all else.
        tolerance, tail: share of a part of W by which it may hold up what comes next;
            tail, once all first F's have started.
        go_on: advantage of a pass that has started.
        most: F's and B's at once on any stage.
    """

    rank: list[float]
    cap: list[int]
    most_f: list[int]
    most_b: list[int]
    most_w: list[int]
    tolerance: list[float]
    tail: list[float]
    go_on: float
    most: int


@dataclass(frozen=True)
class LaneProblem:
    """Parts and memories by number; ``base`` has those of whole passes.

    A B or W with the last part on the network gives its memory back too late for what
    starts on the other lane: such plans may not keep the limit, and are left out.
    """

    base: PlacementProblem

    @property
    def costs(self) -> ChunkCosts:
        """Of the chunks."""
        return self.base.costs

    @cached_property
    def passes(self) -> list[tuple[PassKind, int]]:
        """Kind and chunk of each number."""
        chunks = range(self.base.n_chunks)
        return [
            *((PassKind.F, c) for c in chunks),
            *((PassKind.B, c) for c in reversed(chunks)),
            *((PassKind.W, c) for c in reversed(chunks)),
        ]

    @cached_property
    def parts(self) -> list[tuple[int, Part, float]]:
        """Number, part of micro-batch 0, and time, of all parts."""
        return [
            (q, Part(Pass(kind, chunk, 0), index, lane), time)
            for q, (kind, chunk) in enumerate(self.passes)
            for index, (lane, time) in enumerate(
                self.costs.parts_of(Pass(kind, chunk, 0))
            )
        ]

    @cached_property
    def first(self) -> list[int]:
        """First part of each number, and the end of the last one's."""
        counts = [len(self.costs.parts_of(Pass(*of, 0))) for of in self.passes]
        return list(accumulate(counts, initial=0))

    @cached_property
    def lane(self) -> list[int]:
        """0 or 1 for each part: computes, or occupies the network."""
        return [_LANES.index(part.lane) for _, part, _ in self.parts]

    @cached_property
    def time(self) -> list[float]:
        """Of each part."""
        return [time for _, _, time in self.parts]

    @cached_property
    def source(self) -> list[int]:
        """The part of B that each part of W needs; 0 of others."""
        n = self.base.n_chunks
        return [
            self.first[q - n] + self.costs.source_of(part) if q >= 2 * n else 0
            for q, part, _ in self.parts
        ]

    @cached_property
    def lane_work(self) -> list[tuple[float, float]]:
        """Time of a micro-batch on the lanes of each stage."""
        work = [[0.0, 0.0] for _ in range(self.base.n_stages)]
        for (q, _, time), lane in zip(self.parts, self.lane, strict=True):
            work[self.base.stage[q]][lane] += time
        return [(compute, network) for compute, network in work]

    @cached_property
    def round(self) -> float:
        """Time of a micro-batch on the busiest lane."""
        return max(map(max, self.lane_work))

    @cached_property
    def row_from(self) -> list[int]:
        """Where the row of each stage begins in one list of all rows."""
        m, counts = self.base.n_microbatches, [0] * self.base.n_stages
        for q, (begin, end) in enumerate(pairwise(self.first)):
            counts[self.base.stage[q]] += m * (end - begin)
        return list(accumulate(counts, initial=0))

    def schedule(self, rows: Rows, name: str) -> Schedule:
        """Write rows as orders and parts; each stage steps at its end."""
        laid: list[Order] = [
            (*self._row(row), Step(stage)) for stage, row in enumerate(rows)
        ]
        orders = tuple(tuple(self._starts(row, s)) for s, row in enumerate(laid))
        placement, m = self.base.placement, self.base.n_microbatches
        return Schedule(name, placement, m, orders, parts=tuple(laid))

    def _row(self, row: list[tuple[int, int]]) -> Iterator[Part]:
        for index, microbatch in row:
            part = self.parts[index][1]
            of = Pass(part.kind, part.chunk, microbatch)
            yield Part(of, part.index, part.lane)

    def _starts(self, row: Order, stage: int) -> Iterator[Job]:
        """The passes of a row, in the order of their starts."""
        for job in row:
            if not isinstance(job, Part):
                yield job
            elif not job.index:
                of = job.of
                if of.kind is PassKind.B and self.base.joint[stage]:
                    of = Pass(PassKind.BW, of.chunk, of.microbatch)
                yield of
