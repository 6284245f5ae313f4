"""The bound ``cycle``: memory lets few micro-batches into a loop at a time.

Let a be the stage's first chunk. At most K micro-batches are in their loop of a, from
its F to its B (`Ways.in_loop`). So the (i+K)-th F of a starts a loop or more after the
i-th. If K activations leave no room for a pending W, it starts min(W, max(F, B)) later
still (proof below). It also starts K F's later. Count the steps to the m-th F; a whole
loop and a W follow it.

Proof of the term for W. Micro-batches are identical, so let each kind run in order.
When the (i+K)-th F starts, B_i has ended: no K + 1 are in their loop. Either K - 1
others are in flight; then no W may be pending, so W_i ran after B_i, on this stage: W
later. Or fewer are; then B_(i+1) has ended as well. It ran after B_i, on this stage: B
later. And it ended a loop or more after F_(i+1), which ran after F_i: F later. With
K = 1 no fewer are in flight: W later.
"""

from zbpp.core.bounds.ways import MARGIN, Ways

__all__ = ["cycle"]


def cycle(ways: Ways, stage: int) -> float:
    """Bound the span of a stage by the loops of its first chunk."""
    times, memory = ways.times, ways.memory
    chunk = ways.chunks_of[stage][0]
    fits = ways.in_loop(stage, chunk)
    loops, rest = 0, ways.m - 1
    if 0 < fits < ways.m:
        loops, rest = divmod(ways.m - 1, int(fits))
    f, b, w = times.f[chunk], times.b[chunk], times.w[chunk]
    loop, wait = ways.loop(chunk), 0.0
    full = fits * memory.m_b[chunk] + memory.m_w[chunk]
    if loops and full > memory.limit[stage] * (1 + MARGIN):
        wait = min(w, max(f, b)) if fits > 1 else w
    turn = max(loop + wait, fits * f) if loops else 0.0
    return loops * turn + rest * f + loop + w
