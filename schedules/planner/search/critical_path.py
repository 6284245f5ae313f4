"""Improve any plan by moving single passes on its critical path.

    0 | F0 F1 .  .  B0 W0 B1 W1    the path that decides when a stage ends goes back
    1 | .  F0 B0 F1 B1 W0 W1       from pass to pass: to the one before on the stage,
                                   or, after a wait, to the one that was waited for

Nothing but a change on this path can shorten the span. It falls into blocks, runs of
passes of one stage without a wait. A step takes one block and either moves its last
pass, for which another stage waits, to the front; or moves a pass behind the block; or
moves any pass of it a little; or, as the steady state repeats, swaps two neighbours
there and the same two at their next 1, 3, 7 or all later meetings. Every result that is
valid and not worse is taken: steps that change nothing lead to those that do (Balas and
Vazacopoulos, Management Science 44, 1998, for the job shop).
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from zbpp.schedules.planner.budget import Budget
from zbpp.schedules.planner.search.problem import PlacementProblem, Plan, Row, Rows

__all__ = ["COST", "Times", "XorShift64", "improve", "time_rows"]

COST = 0.25  # of timing a pass, in passes of the list scheduler; measured in C

_CYCLES = 2  # times that the threshold of a search goes from its start down to 0
_MASK = 2**64 - 1


class XorShift64:
    """Whole numbers at random that C draws alike (Marsaglia, "Xorshift RNGs", 2003).

    >>> draws = XorShift64(0)
    >>> [draws.below(6) for _ in range(8)]
    [5, 2, 2, 1, 1, 3, 3, 5]
    """

    def __init__(self, seed: int) -> None:
        self.state = 0x9E3779B97F4A7C15 * (2 * seed + 1) & _MASK

    def below(self, n: int) -> int:
        """Draw one of 0 to n - 1, for n up to 2**32."""
        x = self.state
        x ^= x << 13 & _MASK
        x ^= x >> 7
        x ^= x << 17 & _MASK
        self.state = x
        return (x >> 32) * n >> 32


@dataclass(frozen=True)
class Times:
    """Starts of all passes, row by row, and the end of each stage.

    ``begins[q]`` lists the same starts by number, in the order of the micro-batches.
    """

    starts: list[list[float]]
    ends: list[float]
    begins: list[list[float]]

    @cached_property
    def spans(self) -> list[float]:
        """Per stage the time from its first start to its end."""
        return [end - row[0] for row, end in zip(self.starts, self.ends, strict=True)]

    @cached_property
    def span(self) -> float:
        """The largest of them."""
        return max(self.spans)


def time_rows(
    problem: PlacementProblem,
    rows: Rows,
    *,
    before: Times | None = None,
    since: float = 0.0,
    most: float = math.inf,
) -> tuple[Times | None, int]:
    """Start every pass as early as its row allows; the memory is not looked at.

    A stage runs until it lacks an input; whoever computes that input wakes it. No times
    if all stages lack one, or once the span of a stage is sure to exceed ``most``.

    Args:
        problem: times and delays.
        rows: all passes, W's included.
        before: times of other rows, which differ only in passes that start at ``since``
            or later. A pass starts no earlier than those that it waits for, so all
            earlier ones start as they did.
        since: see ``before``.
        most: largest span that is of use.

    Returns:
        The times, and the number of passes that were timed.
    """
    n_stages, last = problem.n_stages, 2 * problem.n_chunks - 1
    time, delay, stage_of = problem.time, problem.delay, problem.stage
    if before is None:
        begins: list[list[float]] = [[] for _ in range(3 * problem.n_chunks)]
        starts: list[list[float]] = [[] for _ in range(n_stages)]
    else:
        begins = [begun[: bisect_left(begun, since)] for begun in before.begins]
        starts = [begun[: bisect_left(begun, since)] for begun in before.starts]
    slack = [most - work + problem.tiny for work in problem.work]
    for q, begun in enumerate(begins):
        slack[stage_of[q]] += len(begun) * time[q]
    ends = [0.0] * n_stages
    for stage, begun in enumerate(starts):
        if begun:
            ends[stage] = begun[-1] + time[rows[stage][len(begun) - 1]]
            slack[stage] -= ends[stage] - begun[0]
    awake = list(range(n_stages))
    is_awake = [True] * n_stages
    n_timed = 0
    while awake:
        stage = awake.pop()
        is_awake[stage] = False
        row, begun, now = rows[stage], starts[stage], ends[stage]
        n_before = len(begun)
        for at in range(n_before, len(row)):
            q = row[at]
            mine = begins[q]
            if 0 < q <= last:
                inputs = begins[q - 1]
                if len(mine) >= len(inputs):
                    break
                # The rule of core/clock.py, inlined for speed
                arrival = inputs[len(mine)] + time[q - 1] + delay[q - 1]
                if arrival > now:
                    if at:
                        slack[stage] -= arrival - now
                        if slack[stage] < 0:
                            return None, n_timed + at - n_before
                    now = arrival
            begun.append(now)
            mine.append(now)
            now += time[q]
            if q < last:
                target = stage_of[q + 1]
                n_there, there = len(starts[target]), rows[target]
                if (
                    target != stage
                    and not is_awake[target]
                    and len(begins[q + 1]) == len(mine) - 1
                    and n_there < len(there)
                    and there[n_there] == q + 1
                ):
                    is_awake[target] = True
                    awake.append(target)
        n_timed += len(begun) - n_before
        ends[stage] = now
    if any(len(begun) < len(row) for begun, row in zip(starts, rows, strict=True)):
        return None, n_timed
    return Times(starts, ends, begins), n_timed


def improve(
    problem: PlacementProblem,
    plan: Plan,
    budget: Budget,
    draws: XorShift64,
    threshold: float = 0.0,
) -> Plan:
    """Climb from a plan; stop at the lower bound, or when the budget is spent.

    A step spends what it times: the passes from the first changed one on, until they
    are sure to take too long, and the row that it changes.

    With a ``threshold``, a share, steps may be that much worse than the best plan at
    first, less and less, and twice so (Dueck, "New optimization heuristics: the great
    deluge algorithm and the record-to-record travel", J. Comput. Phys. 104, 1993).
    """
    if plan.span <= problem.target or not budget.is_left:
        return plan
    rows, best = list(plan.rows), plan
    times, _ = time_rows(problem, rows)
    assert times is not None
    blocks = list(_blocks_of(problem, rows, times))
    slack = 1e-9 * times.span
    best_span, start = times.span, budget.spent
    while blocks and budget.is_left and best_span > problem.target:
        block = blocks[draws.below(len(blocks))]
        old = rows[block.stage]
        row = _changed(old, block, draws)
        n_timed = len(row) + 4 * problem.n_chunks
        left = _CYCLES * ((budget.spent - start) / (budget.passes - start))
        left = 1 - (left - math.floor(left))
        most = best_span * (1 + threshold * left * left) + slack
        at = next((i for i, q in enumerate(old) if q != row[i]), -1)
        if at >= 0 and _is_valid(problem, block.stage, row):
            trial = [row if s == block.stage else old for s, old in enumerate(rows)]
            result, n_more = time_rows(
                problem,
                trial,
                before=times,
                since=times.starts[block.stage][at],
                most=most,
            )
            n_timed += n_more
            if result is not None and result.span <= most:
                rows, times = trial, result
                blocks = list(_blocks_of(problem, rows, times))
                if times.span < best_span - slack:
                    best_span = times.span
                    best = Plan(times.span, rows)
        budget.spend(COST * n_timed)
    return best


class _Block(NamedTuple):
    """Passes of a stage without a wait between: the first and last place in its row."""

    stage: int
    low: int
    high: int


def _blocks_of(problem: PlacementProblem, rows: Rows, times: Times) -> Iterator[_Block]:
    """Go back from the end of the longest stage; give blocks of two passes and more."""
    stage = max(range(problem.n_stages), key=lambda s: times.spans[s])
    at = high = len(rows[stage]) - 1
    slack = 1e-9 * times.span
    while True:
        row, starts = rows[stage], times.starts[stage]
        while at and starts[at - 1] + problem.time[row[at - 1]] >= starts[at] - slack:
            at -= 1
        if high > at:
            yield _Block(stage, at, high)
        q = row[at]
        if not 0 < q < 2 * problem.n_chunks:
            return
        i = row[:at].count(q)
        stage, begun = problem.stage[q - 1], times.begins[q - 1]
        row = rows[stage]
        at = bisect_left(times.starts[stage], begun[i]) - 1
        for _ in range(bisect_left(begun, begun[i]), i + 1):
            at = row.index(q - 1, at + 1)
        high = at


def _changed(old: Row, block: _Block, draws: XorShift64) -> Row:
    row, (_, low, high) = old[:], block
    kind = draws.below(100)
    at = low + draws.below(high - low)
    if kind < 15:
        _swap_again(row, at, (2, 4, 8, len(row))[draws.below(4)])
    elif kind < 45:
        row.insert(high - 1 if draws.below(2) else at, row.pop(high))
    elif kind < 80:
        n_passed = (0, 0, 1, 2, 4, 8)[draws.below(6)]
        row.insert(high + n_passed, row.pop(at))
    else:
        at += draws.below(2)
        to = at + (-3, -2, -1, 1, 2, 3)[draws.below(6)]
        row.insert(max(0, to), row.pop(at))
    return row


def _swap_again(row: Row, at: int, times: int) -> None:
    first, second = row[at], row[at + 1]
    if first == second:
        return
    while times > 0 and at < len(row) - 1:
        if row[at] == first and row[at + 1] == second:
            row[at], row[at + 1] = second, first
            times -= 1
            at += 1
        at += 1


def _is_valid(problem: PlacementProblem, stage: int, row: Sequence[int]) -> bool:
    """True if a row fits the memory, and each W comes after its B."""
    if problem.peak_of(row) > problem.limits[stage]:
        return False
    n_done = dict.fromkeys(row, 0)
    n_chunks = problem.n_chunks
    for q in row:
        n_done[q] += 1
        if q >= 2 * n_chunks and n_done[q] > n_done[q - n_chunks]:
            return False
    return True
