"""Seeds of the search: known orders, and list schedules by priority rules.

The orders of hand-made schedules are taken as they stand, or their F's and B's with the
W's placed by time. What is planned so is never worse than a hand-made order that fits.
"""

import math
from array import array
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from zbpp.schedules.patterns.v_patterns import v_half_rows, v_min_rows
from zbpp.schedules.planner.budget import Budget
from zbpp.schedules.planner.search.compiled import list_schedule, timed
from zbpp.schedules.planner.search.list_scheduler import Settings
from zbpp.schedules.planner.search.problem import PlacementProblem, Plan, Rows
from zbpp.schedules.planner.search.rules import (
    LINE_RULES,
    RULES,
    is_interleaved,
    is_line,
    is_v,
    known_order,
    line_rows,
    line_settings_of,
    settings_of,
    stretched_order,
    vpp_rows,
    zb_v_rows,
)

__all__ = ["Seed", "first_rule", "seeds"]

Attempt: TypeAlias = "Settings | Rows"
"""Settings for the list scheduler, or rows of all passes that are only timed."""


class Seed(NamedTuple):
    """A plan, and the settings of the list scheduler that gave it, if it was that."""

    plan: Plan
    settings: Settings | None


def seeds(
    problem: PlacementProblem,
    budget: Budget,
    *,
    margin: float = 0.0,
    below: float = math.inf,
) -> list[Seed]:
    """Plan by all of them, best first; stop at the lower bound.

    A run is given up when it falls behind the best, or behind the span ``below``, by
    more than the margin, a share. If all are, the first rule is run to its end.
    """
    found: list[Seed] = []
    for attempt in _attempts(problem):
        seed = _planned(problem, attempt, below * (1 + margin), budget)
        if seed is None:
            continue
        found.append(seed)
        below = min(below, seed.plan.span)
        if seed.plan.span <= problem.target or not budget.is_left:
            break
    if not found:
        seed = _planned(problem, first_rule(problem), math.inf, budget)
        assert seed is not None, "a list schedule by a rule comes to its end"
        found.append(seed)
    return sorted(found, key=lambda seed: seed.plan.span)


def first_rule(problem: PlacementProblem) -> Settings:
    """The settings of the rule that is best by itself."""
    return next(_rules(problem))


def _planned(
    problem: PlacementProblem, attempt: Attempt, below: float, budget: Budget
) -> Seed | None:
    if isinstance(attempt, Settings):
        plan = list_schedule(problem, attempt, below, budget)
        if plan is None:
            return None
        is_known = attempt.order is not None
        return Seed(timed(problem, plan.rows).plan, None if is_known else attempt)
    budget.spend(problem.n_passes / 3)  # it is only timed
    if not problem.fits(attempt):
        return None
    plan = timed(problem, attempt).plan
    return Seed(plan, None) if plan.span < below else None


def _attempts(problem: PlacementProblem) -> Iterator[Attempt]:
    """All seeds, the most useful first."""
    if is_line(problem):
        yield from line_rows(problem)
    elif is_v(problem):
        yield from _v_orders(problem)
    elif is_interleaved(problem):
        yield vpp_rows(problem)
    if not is_line(problem):
        yield known_order(stretched_order(problem, 1.0), 1.0)
    yield from _rules(problem)


def _v_orders(problem: PlacementProblem) -> Iterator[Attempt]:
    m, last = problem.n_microbatches, 2 * problem.n_chunks - 1
    rows = zb_v_rows(problem)
    zb_v = [array("i", [q for q in row if q <= last]) for row in rows]
    v_min = [array("i", row) for row in v_min_rows(problem.numbers, m)]
    v_half = [array("i", row) for row in v_half_rows(problem.numbers, m)]
    yield known_order(zb_v, 0.5)
    yield known_order(zb_v, 0.25, is_fair=True)
    yield known_order(zb_v, 0.75)
    yield known_order(v_min, 0.0)
    yield known_order(v_half, 0.75)
    yield rows


def _rules(problem: PlacementProblem) -> Iterator[Settings]:
    if not is_line(problem):
        yield from (settings_of(problem, rule) for rule in RULES)
        return
    p, memory = problem.n_stages, problem.costs
    pairs = zip(memory.limit, problem.beyond, memory.m_b, strict=True)
    has_little = any(limit - beyond < p * m_b for limit, beyond, m_b in pairs)
    # below p M_B, those of at most d forwards first
    for rule in sorted(LINE_RULES, key=lambda rule: has_little and rule.is_deep):
        yield line_settings_of(problem, rule)
