"""One list schedule on two lanes a stage.

All stages are simulated at once. A lane that is free takes, of the parts that are ready
on it, the one with the least rank: the next part of a pass in flight, or the first one
of a pass whose input has arrived, where the rules and the memory admit it.

    compute  0F0.0        0F1.0 0F0.2     0F1.2        F1 starts while F0 exchanges data
    network        0F0.1~       0F1.1~ 0F0.3~

A W waits until nothing else can go and its next part ends before anything else comes,
but for a tolerance; or until memory is short, or too many W's wait.

An F is admitted only if, when all W's that wait are done, its chunk fits beside the
chunks that the first micro-batch without all its F's still needs: so that one can take
all its passes, and no limit that holds one micro-batch ends in a deadlock.
"""

import ctypes
import math
from array import array
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, chain, pairwise

from zbpp.schedules.planner.compiled.library import (
    Structure,
    check,
    doubles,
    kept,
    library,
    pointer,
    whole,
)
from zbpp.schedules.planner.lanes.problem import LaneProblem, LaneRules, Rows

__all__ = ["list_schedule", "list_span"]

_COMPUTE, _NETWORK = 0, 1


def list_schedule(
    problem: LaneProblem, rules: LaneRules, *, below: float = math.inf
) -> tuple[float, Rows] | None:
    """Make rows of parts; None if a stage's idle time rules a span of ``below`` out.

    Returns:
        The longest span of a stage, and the rows.
    """
    if library is None:
        return _Stages(problem, rules).run(below)
    run = _in_c(problem, rules, below)
    if run is None:
        return None
    span, parts, microbatches = run
    rows = [
        list(zip(parts[begin:end], microbatches[begin:end], strict=True))
        for begin, end in pairwise(problem.row_from)
    ]
    return span, rows


def list_span(problem: LaneProblem, rules: LaneRules, *, below: float) -> float:
    """The longest span of `list_schedule`; infinite where that gives None."""
    run = (
        _in_c(problem, rules, below) if library else _Stages(problem, rules).run(below)
    )
    return math.inf if run is None else run[0]


@dataclass(slots=True)
class _Flight:
    """An F or B that has started, its next part, and when that is ready."""

    number: int
    microbatch: int
    part: int
    ready: float = 0.0


class _Stages:
    """State of all stages; the loop in C has the same, with the same names."""

    def __init__(self, problem: LaneProblem, rules: LaneRules) -> None:
        base = problem.base
        self.problem, self.rules = problem, rules
        n, m, p = base.n_chunks, base.n_microbatches, base.n_stages
        self.n, self.m = n, m
        self.ends = [[math.inf] * m for _ in range(2 * n)]
        self.sources = [[math.inf] * m for _ in problem.parts]
        self.started = [0] * (3 * n)
        self.w_part = [0] * (3 * n)  # of the next W; None: it runs
        self.w_ready = [0.0] * (3 * n)
        self.free = [[0.0, 0.0] for _ in range(p)]
        self.begun: list[float] = [-1.0] * p
        self.idle = [0.0] * p
        self.memory = [0.0] * p
        self.last_end = [0.0] * p
        self.rows: Rows = [[] for _ in range(p)]
        self.flights: list[list[_Flight]] = [[] for _ in range(p)]
        self.n_f, self.n_b, self.n_w = [0] * p, [0] * p, [0] * p
        self.room = base.forward_limits

    def run(self, below: float) -> tuple[float, Rows] | None:
        """Run until nothing happens any more."""
        events = [(0.0, stage) for stage in range(len(self.rows))]
        work = [self.m * compute for compute, _ in self.problem.lane_work]
        while events:
            now, stage = heappop(events)
            self._end_flights(stage, now)
            moved = True
            while moved:
                moved = False
                for lane in (_NETWORK, _COMPUTE):
                    if self.free[stage][lane] > now:
                        continue
                    chosen = self._choose(stage, lane, now)
                    if chosen is None:
                        continue
                    self._start(events, stage, lane, now, *chosen)
                    if self.idle[stage] + work[stage] > below:
                        return None
                    moved = True
        spans = [
            end - begun for end, begun in zip(self.last_end, self.begun, strict=True)
        ]
        n_parts = [len(row) for row in self.rows]
        limits = self.problem.row_from
        if any(n < limits[s + 1] - limits[s] for s, n in enumerate(n_parts)):
            return None
        return max(spans), self.rows

    def _end_flights(self, stage: int, now: float) -> None:
        """Give back the memory of what has ended."""
        first, change, n = self.problem.first, self.problem.base.change, self.n
        kept = []
        for flight in self.flights[stage]:
            q = flight.number
            if flight.part < first[q + 1] or flight.ready > now:
                kept.append(flight)
            elif q < n:
                self.n_f[stage] -= 1
            else:
                self.n_b[stage] -= 1
                self.memory[stage] += change[q]
                self.n_w[stage] += 1
        self.flights[stage] = kept
        for q in self.problem.base.numbers[stage]:
            w = q + n
            if q >= n and self.w_part[w] == -1 and self.w_ready[w] <= now:
                self.memory[stage] += change[w]
                self.w_part[w] = 0
                self.started[w] += 1

    def _choose(
        self, stage: int, lane: int, now: float
    ) -> tuple[int, _Flight | None] | None:
        """The number of the part that goes next on a lane, and its flight, if any."""
        problem, rules, m, n = self.problem, self.rules, self.m, self.n
        first, lanes, times = problem.first, problem.lane, problem.time
        started, rank, turn = self.started, rules.rank, problem.round
        numbers = problem.base.numbers[stage]
        best, upcoming = math.inf, math.inf
        chosen: tuple[int, _Flight | None] | None = None
        is_short = lane == _COMPUTE and self.n_w[stage] > rules.most_w[stage]
        for flight in self.flights[stage]:
            q, part, at = flight.number, flight.part, flight.ready
            stop = first[q + 1]
            while part < stop and lanes[part] != lane:
                at += times[part]
                part += 1
            if part == stop:
                continue
            if part > flight.part or at > now:
                upcoming = min(upcoming, at)
                continue
            key = flight.microbatch * turn + rank[q] - rules.go_on
            if key < best:
                best, chosen = key, (q, flight)
        for q in numbers:
            i = started[q]
            if i == m or lanes[first[q]] != lane:
                continue
            if len(self.flights[stage]) >= rules.most:
                continue
            arrival = 0.0 if q == 0 else self.ends[q - 1][i]
            if arrival == math.inf:
                continue
            if q > 0:
                arrival += problem.base.delay[q - 1]
            if q < n:
                if self.n_f[stage] >= rules.most_f[stage]:
                    continue
                is_first = q == numbers[0]
                in_flight = started[q] - started[numbers[-1]]
                if is_first and in_flight >= rules.cap[stage]:
                    continue
                if self._need(stage, q) > self.room[stage]:
                    is_short = is_short or arrival <= now
                    continue
            elif self.n_b[stage] >= rules.most_b[stage]:
                continue
            if arrival > now:
                upcoming = min(upcoming, arrival)
                continue
            key = i * turn + rank[q]
            if key < best:
                best, chosen = key, (q, None)
        if chosen is None or is_short:
            w = self._choose_w(stage, lane, now)
            if w is not None:
                tail = started[numbers[0]] == m
                allowed = (rules.tail if tail else rules.tolerance)[stage]
                left = times[first[w] + self.w_part[w]] * (1.0 - allowed)
                if is_short or (chosen is None and now + left <= upcoming):
                    chosen = (w, None)
        return chosen

    def _need(self, stage: int, q: int) -> float:
        """Memory after an F, and what the first one without all F's needs then."""
        change, started = self.problem.base.change, self.started
        numbers = self.problem.base.numbers[stage]
        need = self.memory[stage] + change[q]
        oldest = started[numbers[len(numbers) // 2 - 1]]
        for forward in numbers[: len(numbers) // 2]:
            if forward != q and started[forward] <= oldest and oldest < self.m:
                need += change[forward]
        return need

    def _choose_w(self, stage: int, lane: int, now: float) -> int | None:
        """The W whose next part can go, first in, first out."""
        problem, n = self.problem, self.n
        best, chosen = math.inf, None
        for q in problem.base.numbers[stage]:
            w = q + n
            if q < n or self.started[w] == self.m or self.w_part[w] < 0:
                continue
            part = problem.first[w] + self.w_part[w]
            if problem.first[w] == problem.first[w + 1] or problem.lane[part] != lane:
                continue
            i = self.started[w]
            at = max(self.w_ready[w], self.sources[problem.source[part]][i])
            if at > now:
                continue
            key = i * problem.round + self.rules.rank[q]
            key -= problem.round if self.w_part[w] else 0.0
            if key < best:
                best, chosen = key, w
        return chosen

    def _start(
        self,
        events: list[tuple[float, int]],
        stage: int,
        lane: int,
        now: float,
        q: int,
        flight: _Flight | None,
    ) -> None:
        """Start a part; what it makes ready wakes its stage, or the next one."""
        problem, n = self.problem, self.n
        i, part = self.started[q], problem.first[q]
        if flight is not None:
            i, part = flight.microbatch, flight.part
        elif q >= 2 * n:
            part += self.w_part[q]
        end, free = now + problem.time[part], self.free[stage]
        if self.begun[stage] < 0.0:
            self.begun[stage] = now
        elif lane == _COMPUTE:
            self.idle[stage] += now - max(free[_COMPUTE], self.begun[stage])
        free[lane] = end
        self.last_end[stage] = max(self.last_end[stage], end)
        self.rows[stage].append((part, i))
        heappush(events, (end, stage))
        is_last = part + 1 == problem.first[q + 1]
        if q >= 2 * n:
            self.w_ready[q] = end
            self.n_w[stage] -= self.w_part[q] == 0
            self.w_part[q] = -1 if is_last else self.w_part[q] + 1
            return
        self.sources[part][i] = end
        if flight is None:
            self.started[q] += 1
            if q < n:
                self.n_f[stage] += 1
                self.memory[stage] += problem.base.change[q]
            else:
                self.n_b[stage] += 1
            flight = _Flight(q, i, part)
            self.flights[stage].append(flight)
        flight.part, flight.ready = part + 1, end
        if is_last:
            self.ends[q][i] = end
            if q + 1 < 2 * n:
                delay = problem.base.delay[q]
                heappush(events, (end + delay, problem.base.stage[q + 1]))


def _in_c(
    problem: LaneProblem, rules: LaneRules, below: float
) -> "tuple[float, array[int], array[int]] | None":
    """Schedule in C; return the span, and the rows end to end."""
    settings = Structure(
        rank=doubles(rules.rank),
        cap=whole(rules.cap),
        most_f=whole(rules.most_f),
        most_b=whole(rules.most_b),
        most_w=whole(rules.most_w),
        tolerance=doubles(rules.tolerance),
        tail=doubles(rules.tail),
        go_on=float(rules.go_on),
        most=rules.most,
    )
    row_from = whole(problem.row_from)
    parts, microbatches = (array("q", bytes(8 * row_from[-1])) for _ in "pm")
    span = ctypes.c_double()
    assert library is not None
    is_done = check(
        library.zbpp_schedule_lanes(
            kept(problem, _flatten).address,
            settings.address,
            ctypes.c_double(below),
            pointer(row_from),
            pointer(parts),
            pointer(microbatches),
            ctypes.byref(span),
        )
    )
    return (span.value, parts, microbatches) if is_done else None


def _flatten(problem: LaneProblem) -> Structure:
    """`Lanes` of lane_scheduler.c."""
    base = problem.base
    return Structure(
        n_microbatches=base.n_microbatches,
        n_chunks=base.n_chunks,
        n_stages=base.n_stages,
        round=float(problem.round),
        first=whole(problem.first),
        lane=whole(problem.lane),
        time=doubles(problem.time),
        source=whole(problem.source),
        delay=doubles(base.delay),
        change=doubles(base.change),
        stage=whole(base.stage),
        held=whole(chain.from_iterable(base.numbers)),
        held_from=whole(accumulate(map(len, base.numbers), initial=0)),
        room=doubles(base.forward_limits),
    )
