"""The list scheduler: one simulation of all stages that decides as it goes.

A stage is asked for its next pass when it becomes free or when an input reaches it.
Passes are never interrupted, so the arrival of an input is known as soon as its
producer *starts*: every rule below looks that far ahead.

1. Of the F's and B's that are ready, take the one with the smallest rank, that is the
   number of the micro-batch times the work of one, and `Settings.offset` of the number
   in the chain.
2. An F is not ready while memory lacks (see below), or if it would delay a better pass
   that is known to come: a B by more than the share ``delay_b`` of the F's time, or an
   F of a later chunk by more than ``delay_f``. Nor is the stage's first F ready while
   ``max_in_flight`` micro-batches are in flight, or while ``max_without_b`` of them
   have had no B on the stage. But ``early`` times in all, an F that is ready and fits
   goes first, whatever it delays.
3. Else take a W, if it ends before the next known input, or overruns it by at most
   ``overrun`` of its time (``overrun_tail`` when the stage has no first F left), or if
   an F or a B lacks only memory, or, with ``is_fair``, if waiting would make this stage
   the one that has waited longest (arXiv 2401.10241).
4. Else sleep until an input arrives.

With ``order``, rows of F's and B's, rules 1 and 2 are: the next pass of the row, as
soon as it is there and fits. So the same loop places the W's of a known order:

    0 | F0 F1 F2 .  B0 F3 B1 ...      given: the F's and B's of each stage
    0 | F0 F1 F2 .  B0 W0 F3 B1 ...   W's go where the stage waits, or memory lacks

No deadlock by ranks, for every limit that holds one micro-batch: an F is admitted only
if after it the first micro-batch with no B on this stage could still run all its F's,
once those before it have given back what they hold. It then comes to its B's, and
when it is through, it leaves as much memory as the next one may need.

Passes with peaks, and B's that add memory, need room beside that: as much as the most
of them is left free by every F (`PlacementProblem.forward_limits`). Where the limit is
too low for this, an F is admitted if all that is in flight can drain after it: the W's
first, then one micro-batch after the other. A B waits for W's if it, or a W after it,
would not fit.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from zbpp.schedules.planner.search.problem import PlacementProblem, Plan, Rows

__all__ = ["Settings", "list_schedule"]


@dataclass(frozen=True)
class Settings:
    """Ranks and limits of one run; tuples have one entry per stage.

    ``offset`` has one entry per F and B number, in the unit of the times.
    """

    offset: tuple[float, ...]
    max_in_flight: tuple[int, ...]
    max_without_b: tuple[int, ...]
    early: tuple[int, ...]
    overrun: tuple[float, ...]
    overrun_tail: float
    delay_b: float = 0.0
    delay_f: float = 0.0
    is_fair: bool = False
    order: "Rows | None" = None


def list_schedule(
    problem: PlacementProblem, settings: Settings, below: float
) -> tuple[Plan | None, int]:
    """Plan by the rules; give up as soon as the span cannot be under ``below``.

    So does an order that comes to a deadlock, or that does not fit the memory.

    Returns:
        The plan, or None if it was given up, and the passes that were placed.
    """
    draft = _Draft(problem, settings, below)
    first = problem.stage[0]
    wake = [math.inf] * problem.n_stages  # when the stage decides next
    wake[first] = 0.0
    heap = [(0.0, first)]
    while heap:
        now, stage = heappop(heap)
        if wake[stage] != now:  # it was woken earlier
            continue
        chosen = _choose(draft, stage, now)
        if chosen < 0:  # rule 4
            wake[stage] = draft.next_arrival(stage, now + problem.tiny)
            if wake[stage] < math.inf:
                heappush(heap, (wake[stage], stage))
            continue
        end = draft.run(chosen, now)
        if draft.slack[stage] < 0:
            return None, draft.n_placed
        wake[stage] = end
        heappush(heap, (end, stage))
        if chosen < 2 * problem.n_chunks - 1:
            target = problem.stage[chosen + 1]
            arrival = draft.arrivals[chosen + 1][-1]
            if draft.free[target] < wake[target] > arrival:  # asleep
                wake[target] = arrival
                heappush(heap, (arrival, target))
    if any(n < problem.n_microbatches for n in draft.done):
        return None, draft.n_placed
    span = max(end - start for start, end in zip(draft.start, draft.free, strict=True))
    return Plan(span, draft.rows), draft.n_placed


class _Draft:
    """The plan as it grows: counts by number, clocks and memory by stage."""

    def __init__(self, problem: PlacementProblem, settings: Settings, below: float):
        n_numbers, p = 2 * problem.n_chunks, problem.n_stages
        self.problem, self.settings = problem, settings
        self.done = [0] * n_numbers
        self.arrivals: list[list[float]] = [[] for _ in range(n_numbers)]
        self.arrivals[0] = [0.0] * problem.n_microbatches
        self.rows: Rows = [array("i") for _ in range(p)]
        self.n_placed = 0
        self.start, self.free, self.held = [math.inf] * p, [0.0] * p, [0.0] * p
        self.slack = [below - work - problem.tiny for work in problem.work]
        self.idle, self.most_idle = [0.0] * p, -math.inf
        self.n_early = list(settings.early)
        self.weights: list[list[int]] = [[] for _ in range(p)]
        self.n_weights = [0] * p  # of those that have run
        self.n_ordered = [0] * p  # passes of the given order that have run

    def arrival(self, q: int) -> float:
        """Time at which the input of a number's next pass is there; inf: not known."""
        i, arrivals = self.done[q], self.arrivals[q]
        return arrivals[i] if i < len(arrivals) else math.inf

    def next_arrival(self, stage: int, after: float) -> float:
        """Time of the next input that a stage knows of."""
        arrivals = map(self.arrival, self.problem.numbers[stage])
        return min((at for at in arrivals if at > after), default=math.inf)

    def pending(self, stage: int) -> list[int]:
        """The W's that can run, first in, first out."""
        return self.weights[stage][self.n_weights[stage] :]

    def candidates(self, stage: int) -> Sequence[int]:
        """The numbers that may be next."""
        if self.settings.order is None:
            return self.problem.numbers[stage]
        at = self.n_ordered[stage]
        return self.settings.order[stage][at : at + 1]

    def run(self, q: int, now: float) -> float:
        """Let the next pass of a number run as early as it can; return its end."""
        problem, stage = self.problem, self.problem.stage[q]
        n, last = problem.n_chunks, 2 * problem.n_chunks - 1
        # The rule of core/clock.py, inlined for speed
        if q <= last:
            now = max(now, self.arrival(q))
        if self.start[stage] == math.inf:
            self.start[stage] = now
        else:
            self.slack[stage] -= now - self.free[stage]
            self.idle[stage] += now - self.free[stage]
            self.most_idle = max(self.most_idle, self.idle[stage])
        end = now + problem.time[q]
        self.free[stage] = end
        self.held[stage] += problem.change[q]
        self.rows[stage].append(q)
        self.n_placed += 1
        if q > last:
            self.n_weights[stage] += 1
            return end
        self.done[q] += 1
        self.n_ordered[stage] += 1
        if q >= n and not problem.joint[stage]:
            self.weights[stage].append(q + n)
        if q < last:
            self.arrivals[q + 1].append(end + problem.delay[q])
        return end


class _Known(NamedTuple):
    """A pass that is known to come; the smaller comes first."""

    rank: float
    q: int
    arrival: float


def _choose(draft: _Draft, stage: int, now: float) -> int:
    """Choose the next pass of a stage by rules 1 to 3; -1: none."""
    problem, settings = draft.problem, draft.settings
    soon = now + problem.tiny
    candidates = []
    starved = False
    for q in draft.candidates(stage):
        arrival = draft.arrival(q)
        if arrival == math.inf or _waits(draft, q):
            continue
        if not _has_room(draft, q):
            starved = starved or arrival <= soon
            continue
        rank = 0.0
        if settings.order is None:
            rank = draft.done[q] * problem.unit + settings.offset[q]
        candidates.append(_Known(rank, q, arrival))
    candidates.sort()
    chosen = _best_ready(draft, now, candidates)
    if not 0 <= chosen < problem.n_chunks and draft.n_early[stage]:
        forwards = [
            coming.q
            for coming in candidates
            if coming.q < problem.n_chunks and coming.arrival <= soon
        ]
        if forwards:
            draft.n_early[stage] -= 1
            return forwards[0]
    n_done, weights = draft.n_weights[stage], draft.weights[stage]
    if chosen >= 0 or n_done == len(weights):
        return chosen
    weight = weights[n_done]
    is_tail = draft.done[problem.numbers[stage][0]] == problem.n_microbatches
    share = settings.overrun_tail if is_tail else settings.overrun[stage]
    end = now + problem.time[weight] * (1 - share)
    arrivals = [coming.arrival for coming in candidates if coming.arrival > soon]
    coming = min(arrivals, default=math.inf)
    if starved or end <= coming + problem.tiny:
        return weight
    waited = draft.idle[stage] + coming - now
    return weight if settings.is_fair and waited > draft.most_idle else -1


def _waits(draft: _Draft, q: int) -> bool:
    """True if a stage's first F is held back by the number of those before it."""
    settings, stage = draft.settings, draft.problem.stage[q]
    numbers, done = draft.problem.numbers[stage], draft.done
    if q != numbers[0] or settings.order is not None:
        return False
    first_b, last_b = numbers[len(numbers) // 2], numbers[-1]
    return (
        done[q] - done[last_b] >= settings.max_in_flight[stage]
        or done[q] - done[first_b] >= settings.max_without_b[stage]
    )


def _has_room(draft: _Draft, q: int) -> bool:
    """True if memory allows a pass."""
    problem, stage = draft.problem, draft.problem.stage[q]
    if q >= problem.n_chunks or draft.settings.order is not None:
        if draft.held[stage] + problem.needs[q] <= problem.limits[stage]:
            return True
        return draft.settings.order is None and not draft.pending(stage)
    change, numbers = problem.change, problem.numbers[stage]
    n_back = draft.done[numbers[len(numbers) // 2]]
    need = max(0.0, _reserve(numbers, draft.done, change, n_back))
    if draft.done[q] != n_back:
        need += change[q]
    room = problem.forward_limits[stage] - draft.held[stage]
    if change[q] <= room and need <= room:
        return True
    return problem.forward_limits[stage] < 0 and _can_drain(draft, q)


def _reserve(
    numbers: Sequence[int], done: Sequence[int], change: Sequence[float], n_back: int
) -> float:
    """Memory that the first micro-batch with no B yet needs for its other F's.

    Less what the ones before it hold, for they give it back first.
    """
    need = 0.0
    for place in range(len(numbers) // 2):
        forward, backward = numbers[place], numbers[-1 - place]
        if done[forward] <= n_back:
            need += change[forward]
        need -= change[forward] * (n_back - done[backward])
    return need


def _can_drain(draft: _Draft, forward: int) -> bool:
    """True if all in flight on a stage can be finished in turn after one more F.

    F | W W | B W B W B W | F B W B W     one more F, the W's that are pending, then
              first         second        one micro-batch after the other
    """
    problem, stage, done = draft.problem, draft.problem.stage[forward], draft.done
    numbers, n_chunks = problem.numbers[stage], problem.n_chunks
    row = [forward, *draft.pending(stage)]
    for i in range(done[numbers[-1]], done[numbers[0]] + (forward == numbers[0])):
        for q in numbers:
            if done[q] + (q == forward) <= i:
                row.append(q)
                if q >= n_chunks and not problem.joint[stage]:
                    row.append(q + n_chunks)
    held = draft.held[stage]
    for q in row:
        if held + problem.peak[q] > problem.limits[stage]:
            return False
        held += problem.change[q]
    return True


def _best_ready(draft: _Draft, now: float, ranked: list[_Known]) -> int:
    """Choose the best ready pass that delays no better one by too much; -1: none."""
    problem, settings = draft.problem, draft.settings
    n_chunks, tiny = problem.n_chunks, problem.tiny
    for place, (rank, q, arrival) in enumerate(ranked):
        if arrival > now + tiny:
            continue
        if q >= n_chunks:
            return q
        b_from = now + (1 - settings.delay_b) * problem.time[q] - tiny
        f_from = now + (1 - settings.delay_f) * problem.time[q] - tiny
        if not any(
            better.rank < rank
            and better.q > q
            and now + tiny
            < better.arrival
            < (b_from if better.q >= n_chunks else f_from)
            for better in ranked[:place]
        ):
            return q
    return -1
