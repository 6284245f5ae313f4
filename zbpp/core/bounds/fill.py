"""The bound ``fill``: how little can be done at first, and how little be left at last.

Front: before the first pass i only earlier kinds can run, within the memory, and it
starts at start[i] or later. So up to start[i] the stage does no more than this; for the
rest of that time it is idle. Before the first

- F of c:   F's of chunks before c, all held beside its peak.
- B of v-1: F's, all held beside its peak; every chunk has had one.
- B of c:   F's of chunks up to c, all held beside its peak. Of later chunks d also B
            and W; if n micro-batches had their F of d, the last of these F's found
            n M_c held, and of its own micro-batch the chunks after c, up to d; and B
            of c finds n M_c held.

Tail: when the last pass j ends, its micro-batch still has all passes after j before it,
and so the way to the end of its B of chunk 0. All others have had j as well. What is
left of their work holds memory, beside what the micro-batch of the last j holds: b + w
hold m_b (F's may be left too if j is an F), and w holds m_w. Therefore the length is at
least all work, less the most that can be left, plus that way. Right after a B of a
chunk that keeps m_w > m_b, ``net`` bounds this sum (see `relaxed`), and the limit one
in which m_w counts as m_b.

The idle time of the front adds to it if the last j ends after the first i starts. So it
is for i <= j. For i > j it can be otherwise only if all micro-batches have had j while
none has begun i; all hold M_c then, c being the last chunk of which F is not after j
and B not before i. If this does not fit in memory, front and tail add. If it fits, then
in that other case the first i starts after start[i] and after all passes up to j, and
all passes from i on follow. The length is at least the smaller of both.

    stage 0 of a V:  0F0 0F1 0F2 idle  7F0 7B0 ...  7F9 7B9 W W W idle  0B9 0W9
                     |- way to 7F --|                   |-- way to 0B --|
"""

import math
from dataclasses import dataclass, replace

from zbpp.core.bounds.stage import Stage, count

__all__ = ["fill"]

_MOST_COUNTED = 64  # above this number of chunks in memory, parts of one are no matter


def fill(stage: Stage) -> float:
    """Bound the span of a stage, or of an earlier one; see the module's text."""
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
    if j < stage.v or all(w <= b for b, w in zip(stage.m_b, stage.m_w, strict=True)):
        return _left_within(stage, j)
    least = [min(both) for both in zip(stage.m_b, stage.m_w, strict=True)]
    return min(
        _left_within(replace(stage, limit=stage.net), j),
        _left_within(replace(stage, m_w=least), j),
    )


def _left_within(stage: Stage, j: int) -> float:
    """The same if the limit of the stage bounds what is held then.

    The micro-batch of that pass has its own part; all others together have what fits
    beside it. The own W's of chunks whose B is done count among those of the others.
    """
    c = stage.chunk(j)
    own = _rest(stage, j)
    if j >= stage.v:
        own += stage.w[c]
    others = stage.m - 1 if j < stage.v else stage.m
    if others == 0:
        return own
    states = [_State.after(stage, q) for q in range(j, 2 * stage.v)]
    room = stage.limit - stage.held[c]
    if room < 0:  # no schedule at all
        return own
    left = min(
        _at_price(stage, states, room, others, price)
        for price in _prices(stage, states, room)
    )
    return own + min(left, _in_parts(stage, states, room))


def _rest(stage: Stage, q: int) -> float:
    """Work of a micro-batch after pass q, but for the W's that can run already."""
    n_held = q + 1 if q < stage.v else stage.chunk(q)
    rest = sum(stage.b[:n_held]) + sum(stage.w[:n_held])
    if q < stage.v:
        rest += sum(stage.f[n_held:]) + sum(stage.b[n_held:]) + sum(stage.w[n_held:])
    return rest


@dataclass(frozen=True)
class _State:
    """Progress of a micro-batch: ``n_held`` chunks hold m_b; the W's from ``w_from``
    on can run; ``rest`` is the work left without them."""

    rest: float
    n_held: int
    memory: float
    w_from: int

    @classmethod
    def after(cls, stage: Stage, q: int) -> "_State":
        n_held = q + 1 if q < stage.v else stage.chunk(q)
        memory = stage.held[n_held - 1] if n_held else 0.0
        w_from = stage.v if q < stage.v else n_held
        return cls(_rest(stage, q), n_held, memory, w_from)


def _prices(stage: Stage, states: list[_State], room: float) -> set[float]:
    """Prices of memory to try: no matter which, each gives a bound."""
    if math.isinf(room):
        return {0.0}
    gains = [(w, m_w) for w, m_w in zip(stage.w, stage.m_w, strict=True)]
    gains += [
        (b, m_b - m_w)
        for b, m_b, m_w in zip(stage.b, stage.m_b, stage.m_w, strict=True)
    ]
    gains += [
        (b + w, m_b) for b, w, m_b in zip(stage.b, stage.w, stage.m_b, strict=True)
    ]
    gains += [(state.rest, state.memory) for state in states]
    return {0.0, *(work / memory for work, memory in gains if memory > 0)}


def _at_price(
    stage: Stage, states: list[_State], room: float, number: int, price: float
) -> float:
    """Most work left in some room: the room's price, and what is left beyond it.

    Each micro-batch leaves at most the price of its memory and the largest excess over
    it; all memory is no more than the room.
    """
    excess = [
        max(0.0, w - price * held) for w, held in zip(stage.w, stage.m_w, strict=True)
    ]
    largest = max(
        state.rest - price * state.memory + sum(excess[state.w_from :])
        for state in states
    )
    return (price * room if price else 0.0) + number * largest


def _in_parts(stage: Stage, states: list[_State], room: float) -> float:
    """The same in whole parts, where all chunks of the stage hold the same."""
    m_b, m_w = stage.m_b[0], stage.m_w[0]
    same = {*stage.m_b} == {m_b} and {*stage.m_w} == {m_w} and min(m_b, m_w) > 0
    if not same or not room <= _MOST_COUNTED * m_b:
        return math.inf
    each = max(
        (state.rest / state.n_held for state in states if state.n_held), default=0
    )
    most = int(room / m_b) if each else 0
    return max(
        n * each + max(stage.w) * math.floor((room - n * m_b) / m_w)
        for n in range(most + 1)
    )
