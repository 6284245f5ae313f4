"""The bound ``cycle``: memory lets few micro-batches into a loop at a time.

Let a be the stage's first chunk. At most K micro-batches are in their loop of a, from
its F to its B (`Ways.in_loop`). So the (i+K)-th F of a starts a loop or more after the
i-th. If K activations leave no room for a pending W, it starts min(W, max(F, B)) later
still (proof below). It also starts K F's later. Count the steps to the m-th F; a whole
loop and a W follow it.

From the last F that such turns lead to, the micro-batches that are left also go through
every later stage (`Ways.through`), and a W follows. With p = 8 equal stages, K = 4 and
m = 24, that takes 3 longer than the last loop. As K micro-batches may be in their loop
no more than any K' > K may, turns of K' count too; of all K' with the same number of
turns the least leaves the most for the end.

Proof of the term for W. Micro-batches are identical, so let each kind run in order.
When the (i+K)-th F starts, B_i has ended: no K + 1 are in their loop. Either K - 1
others are in flight; then no W may be pending, so W_i ran after B_i, on this stage: W
later. Or fewer are; then B_(i+1) has ended as well. It ran after B_i, on this stage: B
later. And it ended a loop or more after F_(i+1), which ran after F_i: F later. With
K = 1 no fewer are in flight: W later.
"""

from zbpp.core.bounds.ways import MARGIN, Ways

__all__ = ["cycle"]

_MOST_TURNS = 64  # fewer than the most by more are not tried: they hardly ever pay


def cycle(ways: Ways, stage: int) -> float:
    """Bound the span of a stage by the loops of its first chunk."""
    times, memory = ways.times, ways.memory
    chunk, last = ways.chunks_of[stage][0], ways.m - 1
    f, b, w = times.f[chunk], times.b[chunk], times.w[chunk]
    fits, loop = ways.in_loop(stage, chunk), ways.loop(chunk)
    longest = last * f + loop
    if not 0 < fits <= last:
        return longest + w
    full = fits * memory.m_b[chunk] + memory.m_w[chunk]
    is_full = full > memory.limit[stage] * (1 + MARGIN)
    most = int(last // fits)
    for n_turns in range(max(1, most - _MOST_TURNS), most + 1):
        k = max(int(fits), last // (n_turns + 1) + 1)
        wait = 0.0
        if is_full or k > fits:
            wait = min(w, max(f, b)) if k > 1 else w
        rest = last - n_turns * k
        if rest < 0:  # no number of micro-batches gives so many turns
            continue
        end = max(rest * f + loop, ways.through(chunk, rest + 1))
        longest = max(longest, n_turns * max(loop + wait, k * f) + end)
    return longest + w
