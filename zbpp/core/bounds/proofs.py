"""Bounds for passes in one piece: by work and waits, and by memory."""

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


def rounds(stage: Stage) -> float:
    """Bound by memory, which lets few micro-batches into a loop at a time.

    Take F of c and B of e; let M be the smaller and M' the larger of M_c and M_e.

    Law: with K = 1 + floor((limit - M') / M), F of c of micro-batch i+K starts after
    the end of B of e of micro-batch i.

    Proof. Suppose that it starts before. If c >= e, then at its start i to i+K-1 hold
    M_e each, and i+K holds M_c: too much. If c < e, look at F of e of i. If it comes
    after that F of c, then at its own start i holds M_e, and i+1 to i+K hold M_c each.
    If it comes before, then they do so at the start of F of c of i+K. Both is too much.
    If c <= e, all this is still held when B of e of i starts: so the peak of B of e
    goes off the limit.

    So F of c of i+K starts a loop or more after that of i: the time from the start of F
    of c to the end of B of e. It also starts K F's later. Before the last micro-batch
    there are as many such rounds as fit in m - 1, and an F of c for each of the rest;
    its own way through the stage is added.

    From the F of c that the rounds lead to, those that are left also go through every
    stage on the way from there to B of chunk 0; the busiest ones are tried
    (`Stage.through`). One round less leaves more of them, which may take longer; so
    does none at all.

    The wait: between that B of e of i and that F of c of i+K the stage has more to do.

    - F of d of i+K for each d < c, if K of d and e is no larger: the law says so.
    - If i+1 to i+K-1 all hold M when that F of c starts, then i holds at most what is
      left: limit - M_c - (K-1) M. What gave the rest back ran after B of e of i: a
      number of the B's of chunks before e, and of W's of chunks up to e at least those
      too large for it.
    - Otherwise B of e of i+1 has ended too. It ran after that of i; and it ended a loop
      or more after F of c of i+1, which ran after F of c of i.

    The first and the less of the others are added to the loop. Innermost stage of a V,
    the limit holds two chunks; K = 1 for c = e = 4:

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
    more = count(limit - stage.held[max(c, e)], stage.held[min(c, e)])
    return 1 + more


def _wait(stage: Stage, c: int, e: int, fits: int) -> float:
    """Work of the stage between B of e and F of c, K micro-batches later."""
    room = stage.limit - stage.held[c] - (fits - 1) * stage.held[min(c, e)]
    if room < 0:  # no schedule at all
        return 0.0
    forwards = sum(stage.f[d] for d in range(c) if _fits(stage, d, e) <= fits)
    full = math.inf
    for n_held in range(e + 1):  # of the earlier micro-batch; the rest had its B's
        held = stage.held[n_held - 1] if n_held else 0.0
        if held <= room:
            done = sum(stage.b[n_held:e])
            for d in range(n_held, e + 1):
                if held + stage.m_w[d] > room:
                    done += stage.w[d]
            full = min(full, done)
    wait = full + forwards
    if fits > 1:
        wait = min(wait, max(stage.f[c], stage.b[e] + forwards))
    return wait


def slots(stage: Stage) -> float:
    """Bound by memory that holds a whole number of chunks, and fills up one by one.

    A chunk of a micro-batch is *held* from the start of its F to the end of its B. A
    stage holds at most K at a time, as each takes the least m_b of its chunks. If a
    pending W does not fit beside K, at most K - 1 are held while a W runs: then the W
    counts as held too. Let time be counted from the start of the first F, and E be the
    length. All that is held, over time, is at least all loops, one for each chunk and
    micro-batch, and the W's that run before E where they count. It is at most K E, less
    what cannot be in use at both ends:

        held   .   .   F F F B B B W F F B B W ... B W W      three slots, one chunk
        K = 3  |idle   |                      |   idle|
               0   t_1 t_2                E-u_2 E-u_1 E

    First. More than j are held only from t_j on, after j F's. These are of chunk 0; or
    one of them, or the next, is of another chunk, and none of those starts before
    start[1]. All K are held only from start[v-1] on: else no B is done, no micro-batch
    has had all its F's, and there is no room for any more. And when a W runs, its B has
    ended: so more F's have run than are held.

    Last. The same backwards: more than j are held only until u_j before E, as each of
    them has a B to end, and at least j of these B's run whole. They are of chunk 0; or
    one is of another chunk, and ends before E by the way from B of chunk 1 to that of
    chunk 0. Where W's do not count, all K are held only while a B of chunk v-1 is to
    end: else look at the last of those B's of the micro-batches that hold one of the K.
    Just before its end all K were held, and its own chunk too. And while a W runs, the
    B's of all that is held are to run whole.

    What is idle at both ends adds up if they do not meet: t_(K-1) + u_(K-1) is at most
    E. After E the way back and a W remain (`Stage`), and W's that count may run
    meanwhile, as many as are pending within the memory at E.
    """
    v, m, least = stage.v, stage.m, min(stage.m_b)
    fits = count(stage.limit, least)
    if not 1 <= fits < v * m:  # no schedule at all, or all fits at once
        return 0.0
    k = int(fits)
    used = m * sum(stage.end(2 * v - 1 - c) - stage.start[c] for c in range(v))
    first, last = _Queue(stage.f, stage.start[1]), _Queue(stage.b, _way(stage, 1))
    up = max(first.wait(k - 1), stage.start[v - 1])
    down = last.wait(k - 1)
    if k * least + min(stage.m_w) > stage.net:  # no W beside k
        # at least one, of a BW, for which nothing is kept
        after = max(stage.w) * max(1.0, count(stage.net, min(stage.m_w)))
        used += m * sum(stage.w) - min(stage.around, after)
    else:
        down = max(down, _way(stage, v - 1))
    ends = up + first.total(k - 1), down + last.total(k - 1)
    meet = up + down > max(stage.end(-1), m * sum(stage.time))
    used += max(ends) if meet else sum(ends)
    return stage.around + used / k


def _way(stage: Stage, c: int) -> float:
    """Time from the end of B of a chunk to that of chunk 0."""
    return stage.end(-1) - stage.end(2 * stage.v - 1 - c)


class _Queue:
    """F's, or B's backwards: of chunk 0, and after some time of any chunk."""

    def __init__(self, times: list[float], way: float) -> None:
        self.first, self.least, self.way = times[0], min(times), way

    def wait(self, j: int) -> float:
        """Least time before pass j, from 0."""
        return min(j * self.first, max(self.way, j * self.least))

    def total(self, n: int) -> float:
        """Sum of the waits of 0 to n - 1."""
        slow = fast = n  # j first up to slow, then the way, from fast on j least
        if self.first > 0:
            slow = min(n, math.floor(min(self.way / self.first, n)) + 1)
        if self.least > 0:
            fast = max(slow, math.ceil(min(self.way / self.least, n)))
        before = self.first * slow * (slow - 1) / 2
        after = self.least * (n * (n - 1) - fast * (fast - 1)) / 2
        return before + (fast - slow) * self.way + after
