"""Limits of a request: its sizes, its memory, the promises of modes, and its effort.

A stage uses least memory, its *need*, if it runs one micro-batch at a time, and each W
right after its B. Where passes have no peaks and W's keep no more than m_b, that is
M_B: what a micro-batch keeps when all its F's are done. A promise of n M_B allows n
micro-batches in flight:

    limit = m_fixed + (need - M_B) + n M_B

Effort is the work that a planner may do, counted in passes placed, not in seconds: the
same request gives the same schedule on every machine. Only ``best`` looks at the clock,
at that of the CPU time of its thread: what else runs on the machine takes nothing from
it.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from zbpp.core import ChunkCosts, LimitError, RequestError, format_memory

ROUNDING = 1e-9  # relative, of sums of times and of memory; `Schedule` allows as much
_MOST_JOBS = 2**24  # with effort fast, minutes and some GB of memory
_MOST_CHUNKS = 2**13  # the time of lower bounds grows with their square


def micro_batch(costs: ChunkCosts) -> list[float]:
    """Return the memory of one micro-batch on each stage: M_B."""
    chunks_of = costs.placement.chunks_of
    return [sum(costs.m_b[chunk] for chunk in chunks) for chunks in chunks_of]


def beyond(costs: ChunkCosts) -> list[float]:
    """Memory that each stage needs beyond M_B to run one micro-batch at a time."""
    return [_beyond(costs, chunks) for chunks in costs.placement.chunks_of]


def _beyond(costs: ChunkCosts, chunks: Sequence[int]) -> float:
    """The largest memory that its passes need, less M_B; never below 0."""
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
    return max(0.0, most - before)


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


def check_sizes(n_stages: int, n_microbatches: int, chunks_per_stage: int = 1) -> None:
    """Refuse sizes below 1, and those that would be planned for hours.

    Raises:
        RequestError: a number is zero or too large; the error names the number of jobs
            or chunks in the request, and the largest that is planned.
    """
    if min(n_stages, n_microbatches, chunks_per_stage) < 1:
        raise RequestError(
            f"{n_stages} stages with {chunks_per_stage} chunks each and "
            f"{n_microbatches} micro-batches are asked for; there must be at least 1 "
            "of each"
        )
    n_chunks = n_stages * chunks_per_stage
    n_jobs = 3 * n_chunks * n_microbatches
    if n_jobs > _MOST_JOBS:
        raise RequestError(
            f"{n_stages} stages with {chunks_per_stage} chunks each and "
            f"{n_microbatches} micro-batches are {n_jobs:,} jobs (F, B and W of each "
            f"chunk and micro-batch); at most {_MOST_JOBS:,} are planned: take fewer "
            "stages or micro-batches"
        )
    if n_chunks > _MOST_CHUNKS:
        raise RequestError(
            f"{n_stages} stages with {chunks_per_stage} chunks each are {n_chunks:,} "
            f"chunks; at most {_MOST_CHUNKS:,} are planned: take fewer stages or chunks"
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
