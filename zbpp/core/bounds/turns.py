"""The bound ``turns``: memory lets few micro-batches into a loop at a time.

Take F of c and B of e; let M be the smaller and M' the larger of M_c and M_e.

Law: with K = 1 + floor((limit - M') / M), F of c of micro-batch i+K starts after the
end of B of e of micro-batch i.

Proof. Suppose that it starts before. If c >= e, then at its start i to i+K-1 hold M_e
each, and i+K holds M_c: too much. If c < e, look at F of e of i. If it comes after that
F of c, then at its own start i holds M_e, and i+1 to i+K hold M_c each. If it comes
before, then they do so at the start of F of c of i+K. Both is too much. If c <= e, all
this is still held when B of e of i starts: so the peak of B of e goes off the limit.

So F of c of i+K starts a loop or more after that of i: the time from the start of F of
c to the end of B of e. It also starts K F's later. Before the last micro-batch there
are as many such turns as fit in m - 1, and an F of c for each of the rest; its own way
through the stage is added. With one chunk this is the loop of ``cycle``.

From the F of c that the turns lead to, those that are left also go through every stage
on the way from there to B of chunk 0; the busiest ones are tried (`Stage.through`). One
turn less leaves more of them, which may take longer; so does none at all.

The wait: between that B of e of i and that F of c of i+K the stage has more to do.

- F of d of i+K for each d < c, if K of d and e is no larger: the law says so.
- If i+1 to i+K-1 all hold M when that F of c starts, then i holds at most what is left:
  limit - M_c - (K-1) M. What gave the rest back ran after B of e of i: a number of the
  B's of chunks before e, and of W's of chunks up to e at least those too large for it.
- Otherwise B of e of i+1 has ended too. It ran after that of i; and it ended a loop or
  more after F of c of i+1, which ran after F of c of i.

The first and the less of the others are added to the loop. Innermost stage of a V, the
limit holds two chunks; K = 1 for c = e = 4:

    stage 3 of 4:  3F0 4F0 . . . . . . 4B0 4W0 3B0 3W0 3F1 4F1 . . .
                       |------ loop -----||---- wait ----|
"""

import math

from zbpp.core.bounds.stage import Stage, count

__all__ = ["turns"]


def turns(stage: Stage) -> float:
    """Bound the span of a stage, or of an earlier one; see the module's text."""
    chunks = range(stage.v)
    return stage.around + max(_length(stage, c, e) for c in chunks for e in chunks)


def _length(stage: Stage, c: int, e: int) -> float:
    """The length that follows from F of c and B of e."""
    fits, f, last = _fits(stage, c, e), stage.f[c], stage.m - 1
    if fits > last:
        return stage.start[c] + _end(stage, c, last)
    most = last // int(fits)
    loop = stage.end(2 * stage.v - 1 - e) - stage.start[c]
    turn = max(loop + _wait(stage, c, e, int(fits)), fits * f)
    return max(
        n_turns * turn + stage.start[c] + _end(stage, c, last - n_turns * int(fits))
        for n_turns in {most, most - 1, 0}
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
