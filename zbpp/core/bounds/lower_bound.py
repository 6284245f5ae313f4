"""Times below which no schedule can go; a plan is judged by its gap to them.

Each bound is on the largest span, holds for any placement, and follows in a few
lines. Notation: on stage s, F, B and W are sums over its chunks; a is its first
chunk; the loop of a chunk is the time from the start of its F to the end of its B on
one micro-batch if nothing waits: all F and B of later chunks, and messages, between.
Until it is through its loop, a micro-batch holds the memory m_b of that chunk.

work        The stage does m (F + B + W).
bottleneck  A stage k whose first chunk c is not before a: the stage's span starts
            with an F of a (all other jobs need one), so k's F and B take m (F + B)
            after the path from a's F to c's F; the last of them is a B of c, after
            which the path back to a's B and a W of a remain.
front       Up to its first B a stage can only do F's, no more than memory holds;
            yet that B cannot start before one micro-batch has gone the way from
            a's F to the B of the stage's last chunk. The rest is idle.
tail        With one chunk a stage and more micro-batches than fit: the same at the
            end. From the last F's end to its own B lies the loop; then only B's of
            the x - 1 other micro-batches in flight and their W's, and y pending W's
            can fill it, where x m_b + y m_w fit in memory. It adds to front, since
            the last F comes after the first B.
cycle       At most K micro-batches are in their loop of a. So the (i+K)-th F of a
            starts a loop or more after the i-th. If K activations leave no room for
            a pending W, it starts min(W, max(F, B)) later still (proof below). It
            also starts K F's later. Count the steps to the m-th F; a whole loop and
            a W follow it.
area        Each micro-batch holds m_b of each chunk for its loop or longer, and m_w
            for its W. The sum over all is at most limit x span.
fill        Front and tail for several chunks a stage, from any pass to any pass, and
            what they cost the stages before it: see `bounds_fill`.
turns       The same for cycle: see `bounds_turns`.

Proof of the cycle's last term. Micro-batches are identical, so let each kind run in
order. When the (i+K)-th F starts, B_i has ended: K + 1 activations do not fit. Either
K - 1 others are in flight; then no W may be pending, so W_i ran after B_i, on this
stage: W later. Or fewer are; then B_(i+1) has ended as well. It ran after B_i, on this
stage: B later. And it ended a loop or more after F_(i+1), which ran after F_i: F later.
With K = 1 no fewer are in flight: W later.

Every bound is tested against all planners on random costs.
"""

import math

from zbpp.core.bounds.fill import fill
from zbpp.core.bounds.stage import stages as all_chunks
from zbpp.core.bounds.turns import turns
from zbpp.core.costs import ChunkMemory, Costs, MemoryModel, PassTimes
from zbpp.core.placement import Placement

__all__ = ["lower_bound", "lower_bound_on", "lower_bounds"]

_MARGIN = 1e-9  # relative; a limit of 0.3 holds three times 0.1
_UNIT = Costs()


def lower_bound(
    placement: Placement,
    n_microbatches: int,
    costs: Costs = _UNIT,
    memory: MemoryModel | None = None,
) -> float:
    """Return the best of `lower_bounds`."""
    return max(lower_bounds(placement, n_microbatches, costs, memory).values())


def lower_bounds(
    placement: Placement,
    n_microbatches: int,
    costs: Costs = _UNIT,
    memory: MemoryModel | None = None,
) -> dict[str, float]:
    """Bound the largest span of every schedule of a placement, one entry per proof.

    Without a memory model, or without a limit in it, memory is no constraint. On a
    stage that cannot split its backward, B stands for BW, W takes no time and keeps
    nothing (`PassTimes`, `MemoryModel.on`): the proofs hold as they stand.

    >>> lower_bounds(Placement.single(4), 8)["work"]
    24.0

    Raises:
        RequestError: costs or memory have not one entry per chunk.
    """
    times = costs.on(placement)
    held = (memory or MemoryModel()).on(placement, times.splits)
    return _all_bounds(times, held, n_microbatches)


def lower_bound_on(times: PassTimes, memory: ChunkMemory, n_microbatches: int) -> float:
    """Return the best bound for times and memory that are on their placement."""
    return max(_all_bounds(times, memory, n_microbatches).values())


def _all_bounds(
    times: PassTimes, memory: ChunkMemory, n_microbatches: int
) -> dict[str, float]:
    bounds = _Bounds(times, memory, n_microbatches)
    views = list(all_chunks(times, memory, n_microbatches))
    stages = range(times.placement.n_stages)
    return {
        "work": max(bounds.work(stage) for stage in stages),
        "bottleneck": max(bounds.bottleneck(stage) for stage in stages),
        "front and tail": max(
            bounds.work(stage) + bounds.front(stage) + bounds.tail(stage)
            for stage in stages
        ),
        "cycle": max(bounds.cycle(stage) for stage in stages),
        "area": max(bounds.area(stage) for stage in stages),
        "fill": max(fill(view) for view in views),
        "turns": max(turns(view) for view in views),
    }


class _Bounds:
    """The bounds of one stage each, and the sums that they share."""

    def __init__(
        self, times: PassTimes, memory: ChunkMemory, n_microbatches: int
    ) -> None:
        self._times = times
        self._of_kinds = times.f, times.b, times.w
        self._memory = memory
        self._m = n_microbatches
        placement = times.placement
        self._chunks_of = placement.chunks_of
        self._loss = placement.n_chunks - 1
        delays = [times.delay(chunk, chunk + 1) for chunk in range(self._loss)]
        # The way down: from the start of chunk 0's F to the start of each F.
        self._down = [0.0]
        # The way up: from the end of each B to the end of chunk 0's B.
        self._up = [0.0]
        for chunk, delay in enumerate(delays):
            self._down.append(self._down[-1] + times.f[chunk] + delay)
            self._up.append(self._up[-1] + times.b[chunk] + delay)

    def work(self, stage: int) -> float:
        times = self._times
        return self._m * sum(
            times.f[chunk] + times.b[chunk] + times.w[chunk]
            for chunk in self._chunks_of[stage]
        )

    def bottleneck(self, stage: int) -> float:
        times = self._times
        first = self._chunks_of[stage][0]
        longest = 0.0
        for chunks in self._chunks_of:
            target = chunks[0]
            if target < first:
                continue
            way = self._down[target] - self._down[first]
            way += self._up[target] - self._up[first]
            busy = sum(times.f[chunk] + times.b[chunk] for chunk in chunks)
            longest = max(longest, way + self._m * busy)
        return longest + times.w[first]

    def front(self, stage: int) -> float:
        times = self._times
        chunks = self._chunks_of[stage]
        fill = self._m * sum(times.f[chunk] for chunk in chunks)
        least = min(self._memory.m_b[chunk] for chunk in chunks)
        fits = self._fits(stage, least)
        if fits < self._m * len(chunks):
            fill = min(fill, fits * max(times.f[chunk] for chunk in chunks))
        first, last = chunks[0], chunks[-1]
        way = self._down[self._loss] - self._down[first] + times.f[self._loss]
        way += self._up[self._loss] - self._up[last] + times.b[self._loss]
        way -= times.b[last]
        return max(0.0, way - fill)

    def tail(self, stage: int) -> float:
        if len(self._times.placement.stage_of) > len(self._chunks_of):
            return 0.0
        (chunk,) = self._chunks_of[stage]
        in_flight = self._fits(stage, self._memory.m_b[chunk])
        if in_flight >= self._m:
            return 0.0
        b, w = self._times.b[chunk], self._times.w[chunk]
        fill = 0.0
        for x in range(1, int(in_flight) + 1):
            left = self._memory.limit[stage] * (1 + _MARGIN)
            left -= x * self._memory.m_b[chunk]
            m_w = self._memory.m_w[chunk]
            pending = left / m_w if m_w > 0 else math.inf
            y = min(self._m - x, math.floor(min(pending, self._m)))
            fill = max(fill, (x - 1) * (b + w) + y * w)
        return max(0.0, self._loop(chunk) - self._times.f[chunk] - b - fill)

    def cycle(self, stage: int) -> float:
        chunk = self._chunks_of[stage][0]
        fits = self._fits(stage, self._memory.m_b[chunk])
        loops, rest = 0, self._m - 1
        if 0 < fits < self._m:
            loops, rest = divmod(self._m - 1, int(fits))
        f, b, w = (times[chunk] for times in self._of_kinds)
        loop, wait = self._loop(chunk), 0.0
        memory = self._memory
        full = fits * memory.m_b[chunk] + memory.m_w[chunk]
        if loops and full > memory.limit[stage] * (1 + _MARGIN):
            wait = min(w, max(f, b)) if fits > 1 else w
        turn = max(loop + wait, fits * f) if loops else 0.0
        return loops * turn + rest * f + loop + w

    def area(self, stage: int) -> float:
        memory, times = self._memory, self._times
        limit = memory.limit[stage]
        if not 0 < limit < math.inf:
            return 0.0
        held = sum(
            memory.m_b[chunk] * self._loop(chunk) + memory.m_w[chunk] * times.w[chunk]
            for chunk in self._chunks_of[stage]
        )
        return self._m * held / (limit * (1 + _MARGIN))

    def _loop(self, chunk: int) -> float:
        """Time from the start of a chunk's F to the end of its B, nothing waiting."""
        times = self._times
        down = self._down[self._loss] - self._down[chunk] + times.f[self._loss]
        up = self._up[self._loss] - self._up[chunk] + times.b[self._loss]
        return down + up

    def _fits(self, stage: int, amount: float) -> float:
        """How many times an amount of memory fits in the limit of a stage."""
        limit = self._memory.limit[stage]
        if amount <= 0 or math.isinf(limit):
            return math.inf
        return math.floor(limit / amount * (1 + _MARGIN))
