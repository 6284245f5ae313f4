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

from zbpp.schedules.planner.budget import Budget
from zbpp.schedules.planner.draws import Draws
from zbpp.schedules.planner.multi.problem import PlacementProblem, Plan, Rows
from zbpp.schedules.planner.multi.timing import Times, time_again, time_rows

__all__ = ["COST", "DETOUR", "improve"]

COST = 0.25  # of timing a pass, in passes of the list scheduler
DETOUR = 0.02  # a heat, for plans that moves without one have brought to an end

_CYCLES = 2

Block = tuple[int, int, int]
"""A stage, and the first and the last place of the block in its row."""


def improve(
    problem: PlacementProblem,
    plan: Plan,
    budget: Budget,
    draws: Draws,
    heat: float = 0.0,
) -> Plan:
    """Climb from a plan; stop at the lower bound, or when the budget is spent.

    A step spends what it times: the passes from the first changed one on, until they
    are sure to take too long, and the row that it changes.

    With ``heat``, a share, steps may be that much worse than the best plan at first,
    less and less, and twice so (Dueck, "New optimization heuristics: the great deluge
    algorithm and the record-to-record travel", J. Comput. Phys. 104, 1993).
    """
    if plan.span <= problem.target or not budget.is_left:
        return plan
    rows, best = list(plan.rows), plan
    times = time_rows(problem, rows)
    assert times is not None
    blocks = list(_blocks(problem, rows, times))
    slack = 1e-9 * times.span
    best_span, start = times.span, budget.spent
    while blocks and budget.is_left and best_span > problem.target:
        stage, row = _changed(rows, blocks, draws)
        n_timed = len(row) + 4 * problem.n_chunks
        old = rows[stage]
        left = _CYCLES * ((budget.spent - start) / (budget.passes - start))
        left = 1 - (left - math.floor(left))
        most = best_span * (1 + heat * left * left) + slack
        at = next((i for i, q in enumerate(old) if q != row[i]), -1)
        if at >= 0 and _is_valid(problem, stage, row):
            trial = [row if s == stage else one for s, one in enumerate(rows)]
            result, n_more = time_again(
                problem,
                trial,
                known=times,
                since=times.starts[stage][at],
                most=most,
            )
            n_timed += n_more
            if result is not None and result.span <= most:
                rows, times = trial, result
                blocks = list(_blocks(problem, rows, times))
                if times.span < best_span - slack:
                    best_span = times.span
                    best = Plan(times.span, rows)
        budget.spend(COST * n_timed)
    return best


def _blocks(problem: PlacementProblem, rows: Rows, times: Times) -> Iterator[Block]:
    """Go back from the end of the longest stage; give blocks of two passes and more."""
    stage = max(range(problem.n_stages), key=lambda s: times.spans[s])
    at = high = len(rows[stage]) - 1
    slack = 1e-9 * times.span
    while True:
        row, starts = rows[stage], times.starts[stage]
        while at and starts[at - 1] + problem.time[row[at - 1]] >= starts[at] - slack:
            at -= 1
        if high > at:
            yield stage, at, high
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


def _changed(
    rows: Rows, blocks: Sequence[Block], draws: Draws
) -> tuple[int, list[int]]:
    stage, low, high = blocks[draws.below(len(blocks))]
    row = list(rows[stage])
    kind = draws.below(100)
    at = low + draws.below(high - low)
    if kind < 15:
        _swap_again(row, at, (2, 4, 8, len(row))[draws.below(4)])
    elif kind < 45:
        row.insert(high - 1 if draws.below(2) else at, row.pop(high))
    elif kind < 80:
        passed = (0, 0, 1, 2, 4, 8)[draws.below(6)]
        row.insert(high + passed, row.pop(at))
    else:
        at += draws.below(2)
        to = at + (-3, -2, -1, 1, 2, 3)[draws.below(6)]
        row.insert(max(0, to), row.pop(at))
    return stage, row


def _swap_again(row: list[int], at: int, times: int) -> None:
    pair = row[at : at + 2]
    if pair[0] == pair[1]:
        return
    while times > 0 and at < len(row) - 1:
        if row[at : at + 2] == pair:
            row[at : at + 2] = reversed(pair)
            times -= 1
            at += 1
        at += 1


def _is_valid(problem: PlacementProblem, stage: int, row: list[int]) -> bool:
    """True if a row fits the memory, and each W comes after its B."""
    if problem.peak_of(row) > problem.memory.limit[stage] * (1 + 1e-9):
        return False
    pending = dict.fromkeys(row, 0)
    n_chunks = problem.n_chunks
    for q in row:
        pending[q] += 1
        if q >= 2 * n_chunks and pending[q] > pending[q - n_chunks]:
            return False
    return True
