"""Bound by all work, and by what a stage waits at first and at last."""

import math

from zbpp.core.bounds.stage import Stage, count

_MOST_COUNTED = 64  # above this number of chunks in memory, parts of one are no matter


def ramp(stage: Stage) -> float:
    """Bound by how little can be done at first, and how little be left at last.

    Front: before the first pass i only earlier kinds can run, within the memory, and it
    starts at start[i] or later. So up to start[i] the stage does no more than this; for
    the rest of that time it is idle. Before the first

    - F of c:   F's of chunks before c, all held beside its peak.
    - B of v-1: F's, all held beside its peak; every chunk has had one.
    - B of c:   F's of chunks up to c, all held beside its peak. Of later chunks d also
                B and W; if n micro-batches had their F of d, the last of these F's
                found n M_c held, and of its own micro-batch the chunks after c, up to
                d; and B of c finds n M_c held.

    Tail: when the last pass j ends, its micro-batch still has all passes after j before
    it, and so the way to the end of its B of chunk 0. All others have had j as well.
    What is left of their work holds memory, beside what the micro-batch of the last j
    holds: b + w hold m_b (F's may be left too if j is an F), and w holds m_w. Therefore
    the length is at least all work, less the most that can be left, plus that way.
    Right after a B of a chunk that keeps m_w > m_b, ``net`` bounds this sum (see
    `stage._relaxed`), and the limit one in which m_w counts as m_b.

    The idle time of the front adds to it if the last j ends after the first i starts.
    So it is for i <= j. For i > j it can be otherwise only if all micro-batches have
    had j while none has begun i; all hold M_c then, c being the last chunk of which F
    is not after j and B not before i. If this does not fit in memory, front and tail
    add. If it fits, then in that other case the first i starts after start[i] and after
    all passes up to j, and all passes from i on follow. The length is at least the
    smaller of both.

        stage 0 of a V:  0F0 0F1 0F2 idle  7F0 7B0 ...  7F9 7B9 W W W idle  0B9 0W9
                         |- way to 7F --|                   |-- way to 0B --|
    """
    idle = [max(0.0, start - _before(stage, i)) for i, start in enumerate(stage.start)]
    longest = 0.0
    for j in range(2 * stage.v):
        tail = stage.work - _left(stage, j) + stage.end(-1) - stage.end(j)
        for i, front in enumerate(idle):
            length = tail + front
            if i > j and _all_fit(stage, j, i):
                before = max(stage.start[i], stage.m * sum(stage.time[: j + 1]))
                length = min(length, before + stage.m * sum(stage.time[i:]))
            longest = max(longest, length)
    return max(stage.work + max(idle), longest + stage.around)


def _all_fit(stage: Stage, j: int, i: int) -> bool:
    """True if all micro-batches can have had pass j while none has begun pass i."""
    c = min(j, stage.v - 1)
    if i >= stage.v:
        c = min(c, stage.chunk(i))
    return stage.m * stage.held[c] <= stage.limit


def _before(stage: Stage, i: int) -> float:
    """Most work that fits in memory before the first pass i."""
    v, c = stage.v, stage.chunk(i)
    if i < v:
        return _forwards(stage, i, stage.limit - stage.peak_f[i])
    limit = stage.limit - stage.peak_b[c]
    if c == v - 1:
        once = sum(stage.f)
        more = _forwards(stage, v, limit - stage.held[-1])
        return min(stage.m * once, once + more)
    work = _forwards(stage, c + 1, limit)
    for d in range(c + 1, v):
        room = min(limit, stage.limit - (stage.held[d] - stage.held[c]))
        each = stage.f[d] + stage.b[d] + stage.w[d]
        work += min(count(room, stage.held[c]), stage.m) * each
    return work


def _forwards(stage: Stage, n: int, room: float) -> float:
    """Most time of F's of the first n chunks that are all held in some room.

    A micro-batch has had the F's of its first r chunks, r = 1, ..., n: no set of them
    is better for its memory, or for its number of F's, than the best r.
    """
    if n == 0 or room < 0:
        return 0.0
    times = [sum(stage.f[:r]) for r in range(1, n + 1)]
    most = stage.m * times[-1]
    if math.isinf(room):
        return most
    by_room = [
        time / held if held > 0 else math.inf
        for time, held in zip(times, stage.held, strict=False)
    ]
    if max(by_room) < math.inf:
        most = min(most, room * max(by_room))
    number = count(room, min(stage.m_b[:n]))
    if number < math.inf:
        most = min(most, number * max(t / r for r, t in enumerate(times, 1)))
    return most


def _left(stage: Stage, j: int) -> float:
    """Most work that is left at the end of the last pass j."""
    least = [min(both) for both in zip(stage.m_b, stage.m_w, strict=True)]
    if j < stage.v or least == stage.m_w:
        return _left_within(stage, j, stage.limit, stage.m_w)
    return min(
        _left_within(stage, j, stage.net, stage.m_w),
        _left_within(stage, j, stage.limit, least),
    )


def _left_within(stage: Stage, j: int, limit: float, m_w: list[float]) -> float:
    """Most work that is left if a limit bounds what is held then.

    The micro-batch of that pass has its own part; all others together have what fits
    beside it. The W's of its chunks whose B is done count among those of the others.
    Another one is right after pass q >= j: with n chunks held, its W's from there on
    can run, and its other work is left.
    """
    v, c = stage.v, stage.chunk(j)
    of_last = _rest(stage, j) + (stage.w[c] if j >= v else 0.0)
    others = stage.m - 1 if j < v else stage.m
    room = limit - stage.held[c]
    if others == 0 or room < 0:  # room: no schedule at all
        return of_last
    states = []
    for q in range(j, 2 * v):
        n_held = q + 1 if q < v else stage.chunk(q)
        memory = stage.held[n_held - 1] if n_held else 0.0
        states.append((_rest(stage, q), n_held, memory, v if q < v else n_held))

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
        # all chunks of the stage hold the same: whole ones are left
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
    n_held = q + 1 if q < stage.v else stage.chunk(q)
    rest = sum(stage.b[:n_held]) + sum(stage.w[:n_held])
    if q < stage.v:
        rest += sum(stage.f[n_held:]) + sum(stage.b[n_held:]) + sum(stage.w[n_held:])
    return rest
