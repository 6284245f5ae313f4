"""Bounds of a stage's work, and of the loops of its first chunk."""

import math

from zbpp.core.bounds.paths import MARGIN, PathLengths, Stage

__all__ = ["bottleneck", "cycle", "front_and_tail", "memory_area", "work"]

_MOST_ROUNDS = 64  # fewer than the most by more are not tried: they hardly ever pay


def work(stage: Stage) -> float:
    """Bound by all that a stage does: m (F + B + W)."""
    times = zip(stage.f, stage.b, stage.w, strict=True)
    return stage.m * sum(f + b + w for f, b, w in times)


def bottleneck(stage: Stage) -> float:
    """Bound by a slow stage further down.

    The stage's span starts with an F of its first chunk a (all other jobs need one).
    All m micro-batches go through every stage whose first chunk is not before a
    (`PathLengths.through`), and a W of a remains.

        stage        F-.                            .-B W
        slow stage      F F F B F B F B ... F B B B
                        |------- m (F + B) -------|
    """
    return stage.paths.through(stage.chunks[0], stage.m) + stage.w[0]


def front_and_tail(stage: Stage) -> float:
    """Bound by the work, and what a stage waits at first and at last.

        F F F idle B W B F W ... F B W B W idle B W
        |front ---|                 |tail ------|

    Front: up to its first B, one of its last chunk, a stage can only do F's, no more
    than memory holds beside the peak of that B. Yet it cannot start before one
    micro-batch has gone the way from F of the stage's first chunk to the B of its last
    one. The rest is idle.

    Tail: with one chunk a stage and more micro-batches than fit, the same at the end.
    From the last F's end to its own B lies the loop; then only B's of the x - 1 other
    micro-batches in flight and their W's, and y pending W's can fill it, where
    x m_b + y m_w fit in memory. It adds to front, since the last F comes after the
    first B.
    """
    return work(stage) + _front(stage) + _tail(stage)


def _front(stage: Stage) -> float:
    paths = stage.paths
    times, last_chunk = paths.costs, paths.last_chunk
    forwards = stage.m * sum(stage.f)
    fits = stage.fits(min(stage.m_b), stage.peak_b[-1])
    if fits < stage.m * stage.v:
        forwards = min(forwards, fits * max(stage.f))
    first, last = stage.chunks[0], stage.chunks[-1]
    way = paths.down[last_chunk] - paths.down[first] + times.f[last_chunk]
    way += paths.up[last_chunk] - paths.up[last] + times.b[last_chunk]
    way -= times.b[last]
    return max(0.0, way - forwards)


def _tail(stage: Stage) -> float:
    paths = stage.paths
    if paths.last_chunk >= len(paths.chunks_of):
        return 0.0
    in_flight = stage.in_loop()
    if in_flight >= stage.m:
        return 0.0
    b, w, m_w = stage.b[0], stage.w[0], stage.m_w[0]
    fill = 0.0
    for x in range(1, int(in_flight) + 1):
        left = stage.limit - x * stage.m_b[0]
        pending = left / m_w if m_w > 0 else math.inf
        y = min(stage.m - x, math.floor(min(pending, stage.m)))
        fill = max(fill, (x - 1) * (b + w) + y * w)
    return max(0.0, paths.loop(stage.chunks[0]) - stage.f[0] - b - fill)


def cycle(stage: Stage) -> float:
    """Bound by memory, which lets few micro-batches into a loop at a time.

    Let a be the stage's first chunk. At most K micro-batches are in their loop of a,
    from its F to its B (`Stage.in_loop`). So the (i+K)-th F of a starts a loop or more
    after the i-th. If K activations leave no room for a pending W, it starts
    min(W, max(F, B)) later still (proof below). It also starts K F's later. Count the
    steps to the m-th F; a whole loop and a W follow it. With K = 2:

        F0 F1 ........ B0 W0 F2 B1 F3 ........ B2 W2 B3 W3
        |---- loop ----||W0|  |---- loop ----|

    From the last F that such rounds lead to, the micro-batches that are left also go
    through every later stage (`PathLengths.through`), and a W follows. With p = 8 equal
    stages, K = 4 and m = 24, that takes 3 longer than the last loop. As K micro-batches
    may be in their loop no more than any K' > K may, rounds of K' count too; of all K'
    with the same number of rounds the least leaves the most for the end.

    Proof of the term for W. Micro-batches are identical, so let each kind run in order.
    When the (i+K)-th F starts, B_i has ended: no K + 1 are in their loop. Either K - 1
    others are in flight; then no W may be pending, so W_i ran after B_i, on this stage:
    W later. Or fewer are; then B_(i+1) has ended as well. It ran after B_i, on this
    stage: B later. And it ended a loop or more after F_(i+1), which ran after F_i: F
    later. With K = 1 no fewer are in flight: W later.
    """
    paths, chunk, last = stage.paths, stage.chunks[0], stage.m - 1
    f, b, w = stage.f[0], stage.b[0], stage.w[0]
    fits, loop = stage.in_loop(), paths.loop(chunk)
    longest = last * f + loop
    if not 0 < fits <= last:
        return longest + w
    is_full = fits * stage.m_b[0] + stage.m_w[0] > stage.limit
    most = int(last // fits)
    for n_rounds in range(max(1, most - _MOST_ROUNDS), most + 1):
        k = max(int(fits), last // (n_rounds + 1) + 1)
        wait = 0.0
        if is_full or k > fits:
            wait = min(w, max(f, b)) if k > 1 else w
        rest = last - n_rounds * k
        if rest < 0:  # no number of micro-batches gives so many rounds
            continue
        end = max(rest * f + loop, paths.through(chunk, rest + 1))
        longest = max(longest, n_rounds * max(loop + wait, k * f) + end)
    return longest + w


def memory_area(stage: Stage) -> float:
    """Bound by the memory that is held, over time.

    Each micro-batch holds m_b of each chunk for its loop or longer, and m_w for its W;
    and each pass its peak above that, while it runs. A BW holds m_b and its peak
    instead. The sum over all is at most limit x span.

        limit  |  .--------------.  .-----
               |  | m_b          |__| m_w |     area of all micro-batches
            0  |__|______________|________|__   <= limit x span
                  F   loop     B     W
    """
    paths = stage.paths
    limit = paths.costs.limit[stage.index]
    if not 0 < limit < math.inf:
        return 0.0
    held = sum(_held(paths, chunk) for chunk in stage.chunks)
    return stage.m * held / (limit * (1 + MARGIN))


def _held(paths: PathLengths, c: int) -> float:
    """Memory of a micro-batch on a chunk, times the time that it is held at least."""
    costs = paths.costs
    b, w = costs.b[c], costs.w[c]
    split = costs.peak_b[c] * b + (costs.m_w[c] + costs.peak_w[c]) * w
    joint = costs.m_b[c] * w + costs.peak_bw[c] * (b + w)
    inside = (costs.peak_f[c] - costs.m_b[c]) * costs.f[c]
    return costs.m_b[c] * paths.loop(c) + min(split, joint) + inside
