"""A line of stages with one chunk each, as plain numbers for the planner's inner loop.

    stage 0 --hop 0--> stage 1 --hop 1--> stage 2        F goes right
    stage 0 <--hop 0-- stage 1 <--hop 1-- stage 2        B goes left

The micro-batches are identical, so exchanging two of them changes nothing: every kind
runs in the order 0, 1, 2, ... An order is then a row of kinds, one byte a pass, and a
pass is named by counting. That is what makes plans of millions of jobs affordable.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from zbpp.core import (
    Costs,
    MemoryModel,
    Order,
    PassKind,
    Placement,
    Step,
    lower_bound,
)
from zbpp.core.bulk import gc_paused
from zbpp.core.jobs import passes

__all__ = [
    "B",
    "F",
    "Kinds",
    "Line",
    "W",
    "line_of",
    "memory_by_kind",
    "most_held",
    "named",
    "time_orders",
]

F, B, W = range(3)
Kinds = list[bytearray]
"""A row of kinds per stage; B is a BW on a stage that cannot split its backward."""

_MARGIN = 1e-9  # relative, for sums of memory; a part of what `Schedule` tolerates


@dataclass(frozen=True)
class Line:
    """Times, memory and limits, one entry per stage (``hop``: to the next stage).

    Limits are above what is always there. On a stage that cannot split its backward,
    ``b`` is the time of both parts, and ``w`` and ``m_w`` are 0.
    """

    n_microbatches: int
    f: tuple[float, ...]
    b: tuple[float, ...]
    w: tuple[float, ...]
    hop: tuple[float, ...]
    m_b: tuple[float, ...]
    m_w: tuple[float, ...]
    limit: tuple[float, ...]
    splits: tuple[bool, ...]
    peak_f: tuple[float, ...]
    peak_b: tuple[float, ...]
    peak_w: tuple[float, ...]

    @property
    def n_stages(self) -> int:
        """Number of stages."""
        return len(self.f)

    def work(self, stage: int) -> float:
        """Time that a stage is busy."""
        return self.n_microbatches * (self.f[stage] + self.b[stage] + self.w[stage])

    @cached_property
    def works(self) -> list[float]:
        """`work` of every stage."""
        return [self.work(stage) for stage in range(self.n_stages)]

    @cached_property
    def beyond(self) -> list[float]:
        """Memory that one micro-batch needs on each stage beyond m_b."""
        return [self._beyond(stage) for stage in range(self.n_stages)]

    def _beyond(self, stage: int) -> float:
        """Most above m_b inside the passes of a micro-batch that is alone."""
        m_b = self.m_b[stage]
        weight = self.m_w[stage] + self.peak_w[stage]
        return max(self.peak_f[stage], m_b + self.peak_b[stage], weight) - m_b

    @cached_property
    def forward_room(self) -> list[list[int]]:
        """Most W's pending, by micro-batches in flight, with which F may start.

        -1: with none. F needs its peak; then the W's must be able to run, and then B
        and W of all micro-batches in flight.
        """
        return [self._forward_room(stage) for stage in range(self.n_stages)]

    def _forward_room(self, stage: int) -> list[int]:
        m_b, m_w = self.m_b[stage], self.m_w[stage]
        peak_w, most = self.peak_w[stage], self._most(stage)
        room = _most_pending(m_b, m_w, self.n_microbatches, most - self.peak_f[stage])
        if m_b + peak_w > self.peak_f[stage]:
            after = _most_pending(m_b, m_w, self.n_microbatches, most - (m_b + peak_w))
            room = [min(one, max(0, two)) for one, two in zip(room, after, strict=True)]
        back = max(self.peak_b[stage], m_w - m_b + peak_w)
        if back > 0:
            for n in range(len(room)):
                if (n + 1) * m_b > most - back:
                    room[n:] = [-1] * (len(room) - n)
                    break
        return room

    @cached_property
    def backward_room(self) -> list[list[int]]:
        """The same with which B may start: its peak fits, and a W after it."""
        return [self._backward_room(stage) for stage in range(self.n_stages)]

    def _backward_room(self, stage: int) -> list[int]:
        m_b, m_w, m = self.m_b[stage], self.m_w[stage], self.n_microbatches
        more = max(self.peak_b[stage], m_w - m_b + self.peak_w[stage])
        if more <= 0:
            return [m] * (m + 1)
        room = _most_pending(m_b, m_w, m, self._most(stage) - more)
        return [max(0, n) for n in room]

    def _most(self, stage: int) -> float:
        return self.limit[stage] * (1 + _MARGIN)

    def bound(self) -> float:
        """Lower bound of the largest span."""
        return lower_bound(
            Placement.single(self.n_stages),
            self.n_microbatches,
            Costs(self.f, self.b, self.w, self.hop),
            MemoryModel(
                self.m_b,
                self.m_w,
                None if math.inf in self.limit else self.limit,
                peak_f=self.peak_f,
                peak_b=self.peak_b,
                peak_w=self.peak_w,
            ),
        )


def line_of(
    n_stages: int, n_microbatches: int, costs: Costs, memory: MemoryModel
) -> Line:
    """Give every stage its numbers.

    Raises:
        RequestError: costs or memory have not one entry per stage.
    """
    placement = Placement.single(n_stages)
    times = costs.on(placement)
    held = memory.on(placement, times.splits).above_fixed()
    return Line(
        n_microbatches=n_microbatches,
        f=times.f,
        b=times.b,
        w=times.w,
        hop=times.hops,
        m_b=held.m_b,
        m_w=held.m_w,
        limit=held.limit,
        splits=times.splits,
        peak_f=held.peak_f,
        peak_b=held.peak_b,
        peak_w=held.peak_w,
    )


def _most_pending(m_b: float, m_w: float, m: int, most: float) -> list[int]:
    """Most W's pending beside 0, ..., m micro-batches in flight; -1: not even none."""
    room = []
    pending = m
    for n in range(m + 1):
        while pending >= 0 and n * m_b + pending * m_w > most:
            pending -= 1
        room.append(pending)
    return room


@gc_paused()
def named(line: Line, kinds: Kinds) -> tuple[Order, ...]:
    """Name the passes of every stage, and let each stage step at its end."""
    return tuple(
        _name(stage, row, splits=line.splits[stage]) for stage, row in enumerate(kinds)
    )


def _name(stage: int, row: bytearray, *, splits: bool) -> Order:
    kinds = (PassKind.F, PassKind.B if splits else PassKind.BW, PassKind.W)
    left = [iter(passes(kind, stage, row.count(i))) for i, kind in enumerate(kinds)]
    return (*[next(left[kind]) for kind in row], Step(stage))


def time_orders(line: Line, kinds: Kinds) -> float:
    """Time given orders as the simulator would; return the largest span.

    A stage runs until it lacks an input, then its neighbours are tried. Orders that
    wait for one another, or exceed a limit, give infinity.
    """
    p = line.n_stages
    if any(_peak(line, s, kinds[s]) > most_held(line, s) for s in range(p)):
        return math.inf
    inputs: list[list[float]] = [[0.0] * line.n_microbatches]
    inputs += [[] for _ in range(1, p)]  # when each F's input arrives
    gradients: list[list[float]] = [[] for _ in range(p)]  # and each B's
    free, first, place = [0.0] * p, [math.inf] * p, [0] * p
    done = [[0, 0, 0] for _ in range(p)]
    to_try = list(range(p - 1, -1, -1))
    while to_try:
        s = to_try.pop()
        row, counts, t = kinds[s], done[s], free[s]
        f, b, w = line.f[s], line.b[s], line.w[s]
        arrive = inputs[s], gradients[s]
        after = (inputs[s + 1] if s < p - 1 else gradients[s]).append
        before = gradients[s - 1].append if s > 0 else None
        f_hop = line.hop[s] if s < p - 1 else 0.0
        b_hop = line.hop[s - 1] if s > 0 else 0.0
        for at in range(place[s], len(row)):
            kind = row[at]
            if kind == W:
                t += w
                continue
            i, arrivals = counts[kind], arrive[kind]
            if i >= len(arrivals):
                break
            # The rule of core/clock.py, inlined for speed
            if arrivals[i] > t:
                t = arrivals[i]
            counts[kind] = i + 1
            if kind == F:
                if i == 0:
                    first[s] = t
                t += f
                after(t + f_hop)
            else:
                t += b
                if before is not None:
                    before(t + b_hop)
        else:
            at = len(row)
        if at > place[s]:
            place[s], free[s] = at, t
            to_try += [n for n in (s - 1, s + 1) if 0 <= n < p]
    if any(place[s] < len(kinds[s]) for s in range(p)):
        return math.inf
    return max(free[s] - first[s] for s in range(p))


def memory_by_kind(line: Line, stage: int) -> tuple[Sequence[float], Sequence[float]]:
    """Changes of memory by F, B and W, and what is held within them."""
    m_b, m_w = line.m_b[stage], line.m_w[stage]
    inside = (line.peak_f[stage], line.peak_b[stage], line.peak_w[stage])
    return (m_b, m_w - m_b, -m_w), inside


def most_held(line: Line, stage: int) -> float:
    """The limit of a stage, and room for sums that were rounded."""
    return line.limit[stage] * (1 + _MARGIN)


def _peak(line: Line, stage: int, row: bytearray) -> float:
    change, inside = memory_by_kind(line, stage)
    held = peak = 0.0
    for kind in row:
        if held + inside[kind] > peak:
            peak = held + inside[kind]
        held += change[kind]
    return peak
