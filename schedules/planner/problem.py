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

**Memory.** A stage uses least memory, its *need*, if it runs one micro-batch at a time,
and each W right after its B. Where passes have no peaks and W's keep no more than m_b,
that is M_B: what a micro-batch keeps when all its F's are done. A promise of n M_B
allows n micro-batches in flight:

    limit = m_fixed + (need - M_B) + n M_B

**Effort** is the work that a planner may do, counted in passes placed, not in seconds:
the same request gives the same schedule on every machine. Only ``best`` looks at the
clock, at that of the CPU time of its thread: what else runs on the machine takes
nothing from it.
"""

import math
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import TypeAlias

import numpy as np

from zbpp.core import (
    KINDS,
    ChunkCosts,
    Lane,
    LimitError,
    Order,
    Part,
    Pass,
    PassKind,
    RequestError,
    Step,
    format_memory,
    lower_bound_on,
)
from zbpp.core.jobs import gc_paused, passes
from zbpp.schedules.planner.compiled import Structure, doubles, whole

ROUNDING = 1e-9  # relative, of sums of times and of memory; `Schedule` allows as much

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


# ---- Memory.


def micro_batch(costs: ChunkCosts) -> list[float]:
    """Return the memory of one micro-batch on each stage: M_B."""
    chunks_of = costs.placement.chunks_of
    return [sum(costs.m_b[chunk] for chunk in chunks) for chunks in chunks_of]


def beyond(costs: ChunkCosts) -> list[float]:
    """Memory that each stage needs beyond M_B to run one micro-batch at a time."""
    more = []
    for chunks in costs.placement.chunks_of:
        before = most = 0.0
        for c in chunks:
            after = before + costs.m_b[c]
            most = max(
                most,
                before + costs.peak_f[c],
                after + costs.peak_b[c],
                before + costs.m_w[c] + costs.peak_w[c],
            )
            before = after
        more.append(max(0.0, most - before))
    return more


def needs(costs: ChunkCosts, n_in_flight: float = 1.0) -> list[float]:
    """Return the limit of each stage under which so many micro-batches are in flight.

    One is the least: no micro-batch fits a smaller limit.
    """
    parts = zip(
        costs.fixed, beyond(costs), micro_batch(costs), costs.peak_o, strict=True
    )
    return [
        fixed + max(more + n_in_flight * m_b, peak_o)
        for fixed, more, m_b, peak_o in parts
    ]


def capped(
    costs: ChunkCosts, *, memory_cap: float = math.inf, default_limit: float = math.inf
) -> ChunkCosts:
    """Lower the limits to the promise of a mode, in M_B of each stage.

    The default limit counts where the costs have none.
    """
    if math.inf in costs.limit:
        memory_cap = min(memory_cap, default_limit)
    if math.isinf(memory_cap):
        return costs
    return replace(costs, limit=tuple(map(min, costs.limit, needs(costs, memory_cap))))


def check_limits(
    name: str, wanted: Sequence[float], costs: ChunkCosts, n_microbatches: int
) -> None:
    """Refuse a request that needs more memory than the limits.

    Raises:
        LimitError: it names the stage that lacks most, and the smallest limit that
            works.
    """
    lacks = [need - limit for need, limit in zip(wanted, costs.limit, strict=True)]
    stage = lacks.index(max(lacks))
    need, limit, fixed = wanted[stage], costs.limit[stage], costs.fixed[stage]
    if need > limit * (1 + ROUNDING):
        of_it = f" ({format_memory(fixed)} of it fixed)" if fixed else ""
        raise LimitError(
            f"{name} with {len(wanted)} stages and {n_microbatches} micro-batches "
            f"needs memory {format_memory(need)} on stage {stage}{of_it}, "
            f"over the limit {format_memory(limit)}",
            smallest=max(wanted),
        )


# ---- Effort.


_BEST_S = 60.0


def parse_effort(effort: str) -> tuple[str, float]:
    """Read ``fast``, ``default``, ``best`` or ``best:SECONDS``; seconds of the last.

    >>> parse_effort("best:2.5")
    ('best', 2.5)

    Raises:
        RequestError: it is none of these.
    """
    name, colon, number = effort.partition(":")
    try:
        seconds = float(number) if colon else _BEST_S
    except ValueError:
        seconds = math.nan
    if name == "best" and 0 <= seconds < math.inf:
        return name, seconds
    if name in ("fast", "default") and not colon:
        return name, math.inf
    raise RequestError(
        f"effort {effort!r} is not known; choose fast, default, best ({_BEST_S:g} s) "
        "or best:SECONDS"
    )


@dataclass
class Budget:
    """A number of passes, and CPU time of this thread, to spend."""

    passes: float
    seconds: float = math.inf
    spent: float = 0.0
    _end: float = field(init=False)

    def __post_init__(self) -> None:
        # reading the clock of a thread is a system call: only where it is needed
        is_timed = self.seconds < math.inf
        self._end = time.thread_time() + self.seconds if is_timed else math.inf

    def spend(self, passes: float) -> None:
        """Take some of it."""
        self.spent += passes

    @property
    def seconds_left(self) -> float:
        """Seconds until the time is over."""
        if self.seconds == math.inf:
            return math.inf
        return max(0.0, self._end - time.thread_time())

    @property
    def is_left(self) -> bool:
        """True if there is anything left to spend."""
        return self.spent < self.passes and self.seconds_left > 0


def shares(effort: str, n: int) -> Iterator[str]:
    """Efforts of plans that are made in turn; those of ``best`` share its seconds.

    What a plan leaves of its share is there for those after it.

    >>> list(shares("fast", 2))
    ['fast', 'fast']
    """
    kind, seconds = parse_effort(effort)
    budget = Budget(math.inf, seconds)
    for left in range(n, 0, -1):
        yield effort if kind != "best" else f"best:{budget.seconds_left / left:g}"
