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

import ctypes
import math
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import TypeAlias

from zbpp.schedules.planner.budget import Budget
from zbpp.schedules.planner.compiled.binding import (
    check,
    loops,
    pointer,
    whole,
)
from zbpp.schedules.planner.search.problem import (
    PlacementProblem,
    Plan,
    Rows,
    joined,
)

__all__ = ["Starts", "XorShift64", "improve", "timed"]

_COST = 0.25  # of timing a pass, in passes of the list scheduler; measured in C

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


Starts: TypeAlias = Sequence[Sequence[float]]
"""Starts of F's and B's, by number and micro-batch."""


def timed(problem: PlacementProblem, rows: Rows) -> tuple[Plan, Starts]:
    """Let every pass start as early as its row allows.

    Rows whose stages wait for one another have an infinite span, and no starts.
    """
    m = problem.n_microbatches
    begins = array("d", bytes(8 * problem.n_passes))
    plan = _run(problem, rows, Budget(0), XorShift64(0), 0.0, begins)
    if plan is None:
        return Plan(math.inf, rows), ()
    numbers = range(2 * problem.n_chunks)
    return plan, [begins[q * m : (q + 1) * m] for q in numbers]


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
    better = _run(problem, plan.rows, budget, draws, threshold, None)
    assert better is not None, "rows of a plan cannot come to a deadlock"
    return better if better.span < plan.span else plan


def _run(
    problem: PlacementProblem,
    rows: Rows,
    budget: Budget,
    draws: XorShift64,
    threshold: float,
    begins: "array[float] | None",
) -> Plan | None:
    """Improve rows, or only time them if there is an array for starts."""
    passes, lengths = joined(rows), whole(map(len, rows))
    state, span = ctypes.c_uint64(draws.state), ctypes.c_double()
    spent = ctypes.c_double(budget.spent)
    is_done = check(
        loops().zbpp_improve(
            problem.in_c.address,
            pointer(passes),
            pointer(lengths),
            ctypes.c_double(_COST),
            ctypes.c_double(budget.passes),
            ctypes.c_double(threshold),
            ctypes.byref(spent),
            ctypes.byref(state),
            pointer(begins),
            ctypes.byref(span),
        )
    )
    if not is_done:
        return None
    draws.state, budget.spent = state.value, spent.value
    ends = zip(accumulate(lengths), lengths, strict=True)
    return Plan(span.value, [passes[end - n : end] for end, n in ends])
