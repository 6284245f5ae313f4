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

`improve_top_k`  the best plan is not always the best after moves: the moves of
                 the best three are worth more than all on one
`travel`         moves that may be worse for a while, alternately with other draws
`search_on`      the same until the time ends

Budgets are in passes placed, and bounded for large plans, whose moves take long each.
`benchmarks/planner/ablation.py` measures what each search gives.
"""

import ctypes
import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, count

from zbpp.schedules.planner.compiled import check, loops, pointer, whole
from zbpp.schedules.planner.problem import (
    Budget,
    PlacementProblem,
    Plan,
    Rows,
    joined,
)

_COST = 0.25  # of timing a pass, in passes of the list scheduler; measured in C


def timed(problem: PlacementProblem, rows: Rows) -> Plan:
    """Let every pass start as early as its row allows.

    Rows whose stages wait for one another have an infinite span.
    """
    plan = _run(problem, rows, Budget(0))
    return Plan(math.inf, rows) if plan is None else plan


def improve(
    problem: PlacementProblem,
    plan: Plan,
    budget: Budget,
    seed: int,
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
    better = _run(problem, plan.rows, budget, seed, threshold)
    assert better is not None, "rows of a plan cannot deadlock"
    return better if better.span < plan.span else plan


def _run(
    problem: PlacementProblem,
    rows: Rows,
    budget: Budget,
    seed: int = 0,
    threshold: float = 0.0,
) -> Plan | None:
    """Time rows, and improve them; None: their stages wait for one another."""
    passes, lengths = joined(rows), whole(map(len, rows))
    span, spent = ctypes.c_double(), ctypes.c_double(budget.spent)
    is_done = check(
        loops().zbpp_improve(
            problem.in_c.address,
            pointer(passes),
            pointer(lengths),
            ctypes.c_double(_COST),
            ctypes.c_double(budget.passes),
            ctypes.c_double(threshold),
            ctypes.c_uint64(seed),
            ctypes.byref(spent),
            ctypes.byref(span),
        )
    )
    if not is_done:
        return None
    budget.spent = spent.value
    ends = zip(accumulate(lengths), lengths, strict=True)
    return Plan(span.value, [passes[end - n : end] for end, n in ends])


def n_moves(n_passes: float) -> float:
    """Passes placed by moves of effort ``default``: .05 s for 500, .1 s for more."""
    return min(max(2e5, 200 * n_passes), 4e5)


_SMALL = 3000  # passes
_TURNS = 40  # of travel, in all
_FIRST_TURNS = 6  # of each plan, before the best has the others
_DETOURS = 0.025, 0.1
"""Shares by which a step may be longer than the best plan at first, alternately.

Large ones find what small plans lack: many passes that change places at once.
"""


def improve_top_k(
    problem: PlacementProblem, plans: Sequence[Plan], budget: Budget, k: int = 3
) -> list[Plan]:
    """Move the passes of the first k plans, best first; return what comes, best first.

    The plans share the budget; what one leaves is there for those after it. Plans of
    another span come before those that are as long as one of them.
    """
    first = {plan.span: plan for plan in reversed(plans)}
    chosen = sorted(first.values(), key=lambda plan: plan.span)
    chosen += [plan for plan in plans if all(plan.rows != x.rows for x in chosen)]
    del chosen[k:]
    for number, plan in enumerate(chosen):
        share = Budget((budget.passes - budget.spent) / (len(chosen) - number))
        chosen[number] = improve(problem, plan, share, number)
        budget.spend(share.spent)
        if chosen[number].span <= problem.target:
            break
    return sorted(chosen, key=lambda plan: plan.span)


def travel(problem: PlacementProblem, plans: Sequence[Plan]) -> Plan:
    """Move passes by record-to-record travel, which gets past what no move betters.

    Each plan has the first turns, as the best one may end where others go on, and the
    best then the rest. A large problem has two turns.
    """
    best = plans[0]
    if problem.n_passes >= _SMALL:
        return _travel(problem, best, range(2))
    for plan in plans:
        if best.span > problem.target:
            plan = _travel(problem, plan, range(_FIRST_TURNS))
            best = min(best, plan, key=lambda plan: plan.span)
    return _travel(problem, best, range(_FIRST_TURNS * len(plans), _TURNS))


def _travel(problem: PlacementProblem, plan: Plan, turns: Iterable[int]) -> Plan:
    for turn in turns:
        moves = Budget(n_moves(problem.n_passes))
        plan = improve(problem, plan, moves, turn, _DETOURS[turn % 2])
    return plan


def search_on(problem: PlacementProblem, plan: Plan, budget: Budget) -> Plan:
    """Travel with ever other draws, until the budget's time is over."""
    for turn in count(_TURNS):
        if plan.span <= problem.target or not budget.is_left:
            break
        moves = Budget(200 * problem.n_passes)
        plan = improve(problem, plan, moves, turn, _DETOURS[turn % 2])
    return plan
