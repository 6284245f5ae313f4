"""Times below which no schedule can go; a plan is judged by its gap to them.

Each bound is on the largest span, is valid for any placement, and has its proof in
its docstring; `lower_bound` takes the highest.

Notation: on a stage, F, B and W are sums over its chunks; the loop of a chunk is the
time from the start of its F to the end of its B on one micro-batch if nothing waits:
all F and B of later chunks, and messages, between. Until it is through its loop, a
micro-batch takes the memory m_b of that chunk.

A stage with chunks 0, ..., v-1 (in forward order) runs 2v passes of every micro-batch:
q = 0, 1, ... are F of 0, ..., v-1, then B of v-1, ..., 0; and there are W's. Of the
outer stage of a V, if nothing waits:

    start[q]   0     start[1]      start[2]          start[3]
               F0 .. F1 .......... B1 .............. B0        end(-1)
               |---- loop of chunk 0 ----------------|
                     |---- loop of chunk 1 |

M_c is m_b of the chunks 0 to c, the least memory of a micro-batch from the start of F
of c to the end of B of c.

Every bound is tested against all planners on random costs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import attrgetter

from zbpp.core.costs import ChunkCosts, Costs
from zbpp.core.jobs import Lane, Pass, PassKind
from zbpp.core.placement import Placement

MARGIN = 1e-9  # relative; a limit of 0.3 fits three times 0.1
_BUSY = 8  # stages with the most F and B; a micro-batch goes through all, at any price


class Way:
    """The passes of a micro-batch if nothing waits: F of each chunk, and B of it.

    ``start`` and ``time`` are of pass q of the whole model, in that order; ``passes``
    has the passes of each stage, the stage of chunk 0 first.
    """

    def __init__(self, costs: ChunkCosts) -> None:
        last = costs.placement.n_chunks - 1
        self.time = [*costs.f, *reversed(costs.b)]
        self.start = [0.0]
        chunks = [*range(last + 1), *range(last, -1, -1)]
        for q, time in enumerate(self.time[:-1]):
            delay = costs.delay(chunks[q], chunks[q + 1])
            self.start.append(self.start[-1] + time + delay)
        self.chunks_of = sorted(costs.placement.chunks_of)
        self.passes = [
            (*chunks, *(2 * last + 1 - c for c in reversed(chunks)))
            for chunks in self.chunks_of
        ]
        by_work = sorted(
            self.passes, key=lambda qs: (sum(map(self.time.__getitem__, qs)), qs[0])
        )
        self.busy = by_work[-_BUSY:]
        """The passes of the stages with the most F and B."""

    def end(self, q: int) -> float:
        """The earliest end of a pass."""
        return self.start[q] + self.time[q]

    def around(self, q: int) -> float:
        """The way of a micro-batch before pass q, an F, and after its B."""
        return self.start[q] + self.end(-1) - self.end(-1 - q)

    def through(self, first: int, last: int, passes: Sequence[int]) -> "Through":
        """The least time from pass ``first`` to ``last``, of n micro-batches.

        On a stage each micro-batch has those of its passes that are on this way: n
        times their work. The way to the first of them, and from the last, lie outside.
        It is a constant, and a time for each micro-batch.
        """
        between = [q for q in passes if first <= q <= last]
        if not between:
            return 0.0, 0.0
        way = self.start[between[0]] - self.start[first]
        way += self.end(last) - self.end(between[-1])
        return way, sum(self.time[q] for q in between)


Through = tuple[float, float]


def _relaxed(costs: ChunkCosts) -> ChunkCosts:
    """Memory as the proofs of the bounds see it: with few peaks.

    Every schedule that keeps the true model keeps this one too, so a bound under this
    one is also valid under the true one:

    - Right after an F of c, the memory is at least peak_f - m_b of c below the limit.
      So the least of these is taken off the limit. This is true right after each F;
      and the sum of all m_b in memory keeps it at all times, as only F's add to it.
    - Right after a B there may be more, where m_w is above m_b: up to the whole limit.
    - F of c starts only where peak_f of c fits with all that is in memory, and B or BW
      of c where peak_b of c does.
    """
    placement = costs.placement
    inside = [peak - left for peak, left in zip(costs.peak_f, costs.m_b, strict=True)]
    off = [max(0.0, min(inside[c] for c in cs)) for cs in placement.chunks_of]
    off_of = [off[stage] for stage in placement.stage_of]
    peaks = zip(costs.peak_f, costs.m_b, costs.peak_b, off_of, strict=True)
    both = [(max(b, f - less), max(0.0, peak - less)) for f, b, peak, less in peaks]
    limits = zip(costs.limit, off, strict=True)
    return replace(
        costs,
        limit=tuple(max(0.0, limit - less) for limit, less in limits),
        peak_f=tuple(peak for peak, _ in both),
        peak_b=tuple(peak for _, peak in both),
    )


class Stage:
    """One stage: times and memories by chunk, and what follows from them at once.

    Most bounds are on the *length* of a stage, from its first F to the end of its last
    B of chunk 0. They cost other stages time as well: those whose first chunk is
    earlier in the model. Their span starts before the length, by the way from their
    first F to that of the stage; after it there are the way back and a W:

        earlier stage   F---------------------------------B-W
                        |way|                         |way|
        stage               F-------------------------B
                            |-------- length ---------|

    Its limit and peaks are those of `_relaxed`; ``net`` is the true limit, above what
    is fixed. ``start`` is the earliest of each pass, after that of pass 0; ``around``
    is what an earlier stage, or this one, needs in addition to it, at most; and for
    each chunk ``through`` is that of busy stages, from its F to the B of chunk 0.
    """

    def __init__(
        self,
        costs: ChunkCosts,
        relaxed: ChunkCosts,
        way: Way,
        passes: Sequence[int],
        m: int,
    ) -> None:
        self.m, self.v = m, len(passes) // 2
        chunks = passes[: self.v]

        def of(column: Sequence[float]) -> list[float]:
            return [column[c] for c in chunks]

        self.f, self.b, self.w = map(of, (costs.f, costs.b, costs.w))
        self.m_b, self.m_w = map(of, (relaxed.m_b, relaxed.m_w))
        self.peak_f, self.peak_b = map(of, (relaxed.peak_f, relaxed.peak_b))
        index = costs.placement.stage_of[chunks[0]]
        self.limit = relaxed.limit[index] * (1 + MARGIN)
        self.net = costs.limit[index] * (1 + MARGIN)
        self.time = [*self.f, *reversed(self.b)]
        self.start = [way.start[q] - way.start[passes[0]] for q in passes]
        self.work = m * (sum(self.f) + sum(self.b) + sum(self.w))
        self.memory = list(accumulate(self.m_b))
        """M_c of each chunk c."""
        busy = way.busy
        self.through = [[way.through(c, passes[-1], x) for x in busy] for c in chunks]
        self.around = 0.0

    def chunk(self, q: int) -> int:
        """The chunk of pass q."""
        return q if q < self.v else 2 * self.v - 1 - q

    def end(self, q: int) -> float:
        """The earliest end of pass q."""
        return self.start[q] + self.time[q]


def stages_of(costs: ChunkCosts, m: int) -> list[Stage]:
    """The stages, in the order of their first chunks; costs are above what is fixed."""
    way, relaxed, least = Way(costs), _relaxed(costs), math.inf
    stages = [Stage(costs, relaxed, way, passes, m) for passes in way.passes]
    for stage, (first, *_) in zip(stages, way.passes, strict=True):
        least = min(least, way.around(first) - costs.w[first])
        stage.around = way.around(first) - least
    return stages


def count(room: float, amount: float) -> float:
    """Number of times that an amount fits in the room."""
    if room < 0:
        return 0
    if amount <= 0 or math.isinf(room):
        return math.inf
    return math.floor(room / amount)


# ---- Passes in one piece: by work and waits, and by memory.


_MOST_COUNTED = 64  # above this number of chunks in memory, fractions do not matter


def ramp(stage: Stage) -> float:
    """Bound by how little can be done at first, and how little be left at last.

    Front: before the first F of c only F's of chunks before c can run, and before the
    first B only F's: its peak comes on top of all of them, and every chunk has had one.
    That pass i starts at start[i] or later. So up to start[i] the stage does no more
    than this; for the rest of that time it is idle.

    Tail: when the last pass j ends, its micro-batch still has all passes after j before
    it, and so the way to the end of its B of chunk 0. All others have had j as well.
    What is left of their work takes memory, as does the micro-batch of the last j: of
    what is left b + w take m_b (F's too if j is an F), and w takes m_w. Therefore
    the length is at least all work, less the most that can be left, plus that way.
    Right after a B where a chunk keeps m_w > m_b, ``net`` bounds this sum (see
    `_relaxed`).

    The idle time of the front adds to it if the last j ends after the first i starts.
    So it is for i <= j. For i > j it can be otherwise only if all micro-batches have
    had j while none has begun i; all take M_c then, c being the last chunk of which F
    is not after j. If this does not fit in memory, front and tail add. If it fits, then
    in that other case the first i starts after start[i] and after all passes up to j,
    and all passes from i on follow. The length is at least the smaller of both.

        stage 0 of a V:  0F0 0F1 0F2 idle  7F0 7B0 ...  7F9 7B9 W W W idle  0B9 0W9
                         |- way to 7F --|                   |-- way to 0B --|
    """
    front = stage.start[: stage.v + 1]
    idle = [max(0.0, start - _before(stage, i)) for i, start in enumerate(front)]
    longest = 0.0
    for j in range(2 * stage.v):
        tail = stage.work - _left(stage, j) + stage.end(-1) - stage.end(j)
        all_fit = stage.m * stage.memory[min(j, stage.v - 1)] <= stage.limit
        for i, idle_before in enumerate(idle):
            length = tail + idle_before
            if i > j and all_fit:
                before = max(stage.start[i], stage.m * sum(stage.time[: j + 1]))
                length = min(length, before + stage.m * sum(stage.time[i:]))
            longest = max(longest, length)
    return max(stage.work + max(idle), longest + stage.around)


def _before(stage: Stage, i: int) -> float:
    """Most work that fits in memory before the first pass i: an F, or the first B."""
    if i < stage.v:
        return _forwards(stage, i, stage.limit - stage.peak_f[i])
    room = stage.limit - stage.peak_b[-1] - stage.memory[-1]
    return min(stage.m * sum(stage.f), sum(stage.f) + _forwards(stage, stage.v, room))


def _forwards(stage: Stage, n: int, room: float) -> float:
    """Most time of F's of the first n chunks that fit together in some room.

    A micro-batch has had the F's of its first r chunks, r = 1, ..., n: no set of them
    is better for its number of F's than the best r.
    """
    if n == 0 or room < 0:
        return 0.0
    times = list(accumulate(stage.f[:n]))
    number = count(room, min(stage.m_b[:n]))
    if number == math.inf:
        return stage.m * times[-1]
    by_number = max(time / r for r, time in enumerate(times, 1))
    return min(stage.m * times[-1], number * by_number)


def _left(stage: Stage, j: int) -> float:
    """Most work that is left at the end of the last pass j.

    The micro-batch of that pass has a separate part; all others together have what fits
    with it. The W's of its chunks whose B is done count among those of the others.
    Another one is right after pass q >= j: with n chunks in memory, its W's from there
    on can run, and its other work is left.
    """
    v, c, m_w = stage.v, stage.chunk(j), stage.m_w
    of_last = _rest(stage, j) + (stage.w[c] if j >= v else 0.0)
    others = stage.m - 1 if j < v else stage.m
    adds = j >= v and any(w > b for b, w in zip(stage.m_b, m_w, strict=True))
    room = (stage.net if adds else stage.limit) - stage.memory[c]
    if others == 0 or room < 0:  # room: no schedule at all
        return of_last
    states = []
    for q in range(j, 2 * v):
        n_stored = q + 1 if q < v else stage.chunk(q)
        memory = stage.memory[n_stored - 1] if n_stored else 0.0
        states.append((_rest(stage, q), n_stored, memory, v if q < v else n_stored))

    def at_price(price: float) -> float:
        """Each micro-batch leaves at most the price of its memory and the largest
        excess over it; all memory is no more than the room."""
        more = [max(0.0, w - price * x) for w, x in zip(stage.w, m_w, strict=True)]
        excess = max(
            rest - price * memory + sum(more[w_from:])
            for rest, _, memory, w_from in states
        )
        return (price * room if price else 0.0) + others * excess

    prices = {0.0}  # no matter which, each gives a bound
    if not math.isinf(room):
        prices |= {rest / memory for rest, _, memory, _ in states if memory > 0}
        prices |= {w / x for w, x in zip(stage.w, m_w, strict=True) if x > 0}
    left = min(map(at_price, prices))
    m_b, are_equal = stage.m_b[0], len({*zip(stage.m_b, m_w, strict=True)}) == 1
    if are_equal and min(m_b, m_w[0]) > 0 and room <= _MOST_COUNTED * m_b:
        # all chunks of the stage take the same: whole ones are left
        each = max((rest / n for rest, n, _, _ in states if n), default=0.0)
        left = min(
            left,
            max(
                n * each + max(stage.w) * math.floor((room - n * m_b) / m_w[0])
                for n in range(int(room / m_b) + 1 if each else 1)
            ),
        )
    return of_last + left


def _rest(stage: Stage, q: int) -> float:
    """Work of a micro-batch after pass q, but for the W's that can run already."""
    n_stored = q + 1 if q < stage.v else stage.chunk(q)
    rest = sum(stage.b[:n_stored]) + sum(stage.w[:n_stored])
    if q < stage.v:
        passes = stage.f, stage.b, stage.w
        rest += sum(sum(times[n_stored:]) for times in passes)
    return rest


def rounds(stage: Stage) -> float:
    """Bound by memory, which lets few micro-batches into a loop at a time.

    Take F of c and B of e; let M be the smaller and M' the larger of M_c and M_e.

    Law: with K = 1 + floor((limit - M') / M), F of c of micro-batch i+K starts after
    the end of B of e of micro-batch i.

    Proof. Suppose that it starts before. If c >= e, then at its start i to i+K-1 take
    M_e each, and i+K takes M_c: too much. If c < e, look at F of e of i. If it comes
    after that F of c, then at its start i takes M_e, and i+1 to i+K take M_c each.
    If it comes before, then they do so at the start of F of c of i+K. Both is too much.
    If c <= e, all this is still in memory when B of e of i starts: so the peak of B of
    e goes off the limit.

    So F of c of i+K starts a loop or more after that of i: the time from the start of F
    of c to the end of B of e. It also starts K F's later. Before the last micro-batch
    there are as many such rounds as fit in m - 1, and an F of c for each of the rest;
    its way through the stage is added.

    From the F of c that the rounds lead to, those that are left also go through every
    stage on the way from there to B of chunk 0; the busiest ones are tried
    (`Stage.through`). One round less leaves more of them, which may take longer; so
    does none at all.

    The wait: between that B of e of i and that F of c of i+K the stage has more to do.

    - F of d of i+K for each d < c, if K of d and e is no larger, by the law.
    - If i+1 to i+K-1 all take M when that F of c starts, then i takes at most what is
      left: limit - M_c - (K-1) M. What gave the rest back ran after B of e of i: a
      number of the B's of chunks before e, and of W's of chunks up to e at least those
      too large for it.
    - Otherwise B of e of i+1 has ended too. It ran after that of i; and it ended a loop
      or more after F of c of i+1, which ran after F of c of i.

    The first and the less of the others are added to the loop. Innermost stage of a V,
    the limit fits two chunks; K = 1 for c = e = 4:

        stage 3 of 4:  3F0 4F0 . . . . . . 4B0 4W0 3B0 3W0 3F1 4F1 . . .
                           |------ loop -----||---- wait ----|
    """
    chunks = range(stage.v)
    return stage.around + max(_length(stage, c, e) for c in chunks for e in chunks)


def _length(stage: Stage, c: int, e: int) -> float:
    """The length that follows from F of c and B of e."""
    fits, f, last = _fits(stage, c, e), stage.f[c], stage.m - 1
    if fits > last:
        return stage.start[c] + _end(stage, c, last)
    most = last // int(fits)
    loop = stage.end(2 * stage.v - 1 - e) - stage.start[c]
    each_round = max(loop + _wait(stage, c, e, int(fits)), fits * f)
    return max(
        n_rounds * each_round
        + stage.start[c]
        + _end(stage, c, last - n_rounds * int(fits))
        for n_rounds in {most, most - 1, 0}
    )


def _end(stage: Stage, c: int, rest: int) -> float:
    """From an F of c to the last B of chunk 0, some micro-batches later."""
    longest = rest * stage.f[c] + stage.end(-1) - stage.start[c]
    for way, each in stage.through[c]:
        longest = max(longest, way + (rest + 1) * each)
    return longest


def _fits(stage: Stage, c: int, e: int) -> float:
    """K of the law."""
    limit = stage.limit - (stage.peak_b[e] if c <= e else 0.0)
    more = count(limit - stage.memory[max(c, e)], stage.memory[min(c, e)])
    return 1 + more


def _wait(stage: Stage, c: int, e: int, fits: int) -> float:
    """Work of the stage between B of e and F of c, K micro-batches later."""
    room = stage.limit - stage.memory[c] - (fits - 1) * stage.memory[min(c, e)]
    if room < 0:  # no schedule at all
        return 0.0
    forwards = sum(stage.f[d] for d in range(c) if _fits(stage, d, e) <= fits)
    full = math.inf
    for n_stored in range(e + 1):  # of the earlier micro-batch; the rest had its B's
        memory = stage.memory[n_stored - 1] if n_stored else 0.0
        if memory <= room:
            done = sum(stage.b[n_stored:e])
            for d in range(n_stored, e + 1):
                if memory + stage.m_w[d] > room:
                    done += stage.w[d]
            full = min(full, done)
    wait = full + forwards
    if fits > 1:
        wait = min(wait, max(stage.f[c], stage.b[e] + forwards))
    return wait


def slots(stage: Stage) -> float:
    """Bound by memory that fits a whole number of chunks at a time.

    A chunk of a micro-batch is *stored* from the start of its F to the end of its B. A
    stage stores at most K at a time, as each takes the least m_b of its chunks. If a
    pending W does not fit with K, at most K - 1 are stored while a W runs: then the W
    counts as stored too. The sum of all times in storage is at least all loops, one for
    each chunk and micro-batch, and the W's that run before its end where they count. It
    is at most K times the length. After it the way back and a W remain (`Stage`), and
    W's that count may run meanwhile, as many as are pending within the memory.
    """
    v, m, least = stage.v, stage.m, min(stage.m_b)
    fits = count(stage.limit, least)
    if not 1 <= fits < v * m:  # no schedule at all, or all fits at once
        return 0.0
    k = int(fits)
    used = m * sum(stage.end(2 * v - 1 - c) - stage.start[c] for c in range(v))
    if k * least + min(stage.m_w) > stage.net:  # no W with k
        # at least one, of a BW, for which nothing is kept
        after = max(stage.w) * max(1.0, count(stage.net, min(stage.m_w)))
        used += m * sum(stage.w) - min(stage.around, after)
    return stage.around + used / k


# ---- Passes in parts, which overlap on the two lanes of a stage.


_F, _B, _W = _KINDS = PassKind.F, PassKind.B, PassKind.W


def bounds_on_lanes(costs: ChunkCosts, n_microbatches: int) -> dict[str, float]:
    """Bound the largest span of every schedule of parts, one entry per proof."""
    way = Way(costs)
    stages = [
        _LaneStage(costs, way, chunks, n_microbatches) for chunks in way.chunks_of
    ]
    bounds = (_LaneStage.ramp, _LaneStage.network, _LaneStage.rounds)
    return {bound.__name__: max(map(bound, stages)) for bound in bounds}


class _LaneStage:
    """One stage, and the sums that its bounds share.

    Times of a pass are of two kinds here: its *length*, all parts in a row, is what a
    micro-batch needs on its way (`Way`), and its *compute* is what it takes of the lane
    that computes. Parts of several passes may alternate, so nothing here assumes that
    a pass keeps others from running. a is its first chunk, z its last one.
    """

    def __init__(
        self, costs: ChunkCosts, way: Way, chunks: tuple[int, ...], m: int
    ) -> None:
        self.costs, self.way, self.chunks, self.m = costs, way, chunks, m
        limit = costs.limit[costs.placement.stage_of[chunks[0]]]
        self.limit = limit * (1 + MARGIN)

    def _sum(self, kind: PassKind, chunk: int, lane: Lane = Lane.COMPUTE) -> float:
        return self.costs.parts[chunk].on_lane(kind, lane)

    def ramp(self) -> float:
        """Bound by the work, and what the stage waits before its first B computes.

        The first B is one of z. It starts when a micro-batch has gone the way from F of
        a to there; and what it exchanges first is still to come. Until then the stage
        computes F's alone, no more than there are, and than fit in memory.
        """
        a, z = self.chunks[0], self.chunks[-1]
        way = self.way.start[-1 - z] - self.way.start[a]
        way += _lead(self.costs, Pass(_B, z, 0), Lane.COMPUTE)
        each = [self._sum(_F, c) for c in self.chunks]
        forwards = self.m * sum(each)
        least = min(self.costs.m_b[c] for c in self.chunks)
        if least > 0 and self.limit < math.inf:
            forwards = min(forwards, math.floor(self.limit / least) * max(each))
        work = self.m * sum(self._sum(kind, c) for kind in _KINDS for c in self.chunks)
        return work + max(0.0, way - forwards)

    def network(self) -> float:
        """Bound by all that it exchanges, and what comes before.

        The span starts with an F of a (all other passes need one), so with its parts
        before the first exchange.
        """
        lanes = [(kind, c, Lane.NETWORK) for kind in _KINDS for c in self.chunks]
        exchanged = self.m * sum(self._sum(*each) for each in lanes)
        lead = _lead(self.costs, Pass(_F, self.chunks[0], 0), Lane.NETWORK)
        return exchanged + lead if exchanged else 0.0

    def rounds(self) -> float:
        """Bound by memory, which lets few micro-batches into the loop of a at a time.

        If K fit, then when the (i + K)-th F of a starts, i B's of a have ended, each a
        loop or more after its F: so that start is a loop or more after the i-th. The
        last of these rounds ends with a loop.
        """
        a = self.chunks[0]
        fits = count(self.limit, self.costs.m_b[a])
        n_rounds = 0 if fits == math.inf else (self.m - 1) // max(1, int(fits))
        return (n_rounds + 1) * (self.way.end(-1 - a) - self.way.start[a])


def _lead(costs: ChunkCosts, of: Pass, lane: Lane) -> float:
    """Time of the parts of a pass before the first one on a lane."""
    lead = 0.0
    for on, time in costs.parts_of(of):
        if on is lane:
            break
        lead += time
    return lead


# ---- All bounds.

_UNIT = Costs()
_BOUNDS: dict[str, Callable[[Stage], float]] = {
    "work": attrgetter("work"),
    "ramp": ramp,
    "rounds": rounds,
    "slots": slots,
}


def lower_bound(
    placement: Placement, n_microbatches: int, costs: Costs = _UNIT
) -> float:
    """Return the best of `lower_bounds`."""
    return max(lower_bounds(placement, n_microbatches, costs).values())


def lower_bounds(
    placement: Placement, n_microbatches: int, costs: Costs = _UNIT
) -> dict[str, float]:
    """Bound the largest span of every schedule of a placement, one entry per proof.

    Without a limit in the costs memory is no constraint. On a stage that cannot split
    its backward, B means BW, W takes no time and keeps nothing: the proofs need no
    change.

    >>> lower_bounds(Placement.single(4), 8)["work"]
    24.0

    Raises:
        RequestError: the costs do not fit the placement.
    """
    return _all_bounds(costs.on(placement), n_microbatches)


def lower_bound_on(costs: ChunkCosts, n_microbatches: int) -> float:
    """Return the best bound for costs on a placement."""
    return max(_all_bounds(costs, n_microbatches).values())


def _all_bounds(costs: ChunkCosts, n_microbatches: int) -> dict[str, float]:
    costs = costs.without_pairs().above_fixed()
    if costs.parts:
        return bounds_on_lanes(costs, n_microbatches)
    stages = stages_of(costs, n_microbatches)
    return {name: max(map(bound, stages)) for name, bound in _BOUNDS.items()}
