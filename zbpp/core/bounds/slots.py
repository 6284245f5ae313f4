"""The bound ``slots``: memory holds a whole number of chunks, and fills up one by one.

A chunk of a micro-batch is *held* from the start of its F to the end of its B. A stage
holds at most K at a time, as each takes the least m_b of its chunks. If a pending W
does not fit beside K, at most K - 1 are held while a W runs: then the W counts
as held too. Let time be counted from the start of the first F, and E be the length. All
that is held, over time, is at least all loops, one for each chunk and micro-batch, and
the W's that run before E where they count. It is at most K E, less what cannot be in
use at both ends:

    held   .   .   F F F B B B W F F B B W ... B W W      three slots, one chunk
    K = 3  |idle   |                      |   idle|
           0   t_1 t_2                E-u_2 E-u_1 E

First. More than j are held only from t_j on, after j F's. These are of chunk 0; or one
of them, or the next, is of another chunk, and none of those starts before start[1]. All
K are held only from start[v-1] on: else no B is done, no micro-batch has had all its
F's, and there is no room for any more. And when a W runs, its B has ended: so more F's
have run than are held.

Last. The same backwards: more than j are held only until u_j before E, as each of them
has a B to end, and at least j of these B's run whole. They are of chunk 0; or one is of
another chunk, and ends before E by the way from B of chunk 1 to that of chunk 0. Where
W's do not count, all K are held only while a B of chunk v-1 is to end: else look at the
last of those B's of the micro-batches that hold one of the K. Just before its end all K
were held, and its own chunk too. And while a W runs, the B's of all that is held are to
run whole.

What is idle at both ends adds up if they do not meet: t_(K-1) + u_(K-1) is at most E.
After E the way back and a W remain (`stage`), and W's that count may run meanwhile, as
many as are pending within the memory at E.
"""

import math

from zbpp.core.bounds.stage import Stage, count

__all__ = ["slots"]


def slots(stage: Stage) -> float:
    """Bound the span of a stage, or of an earlier one; see the module's text."""
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
        after = max(stage.w) * count(stage.net, min(stage.m_w))
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
