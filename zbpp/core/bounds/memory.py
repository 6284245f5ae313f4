"""Bounds by memory, which lets few micro-batches into a loop at a time."""

import math

from zbpp.core.bounds.stage import Stage, count


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
