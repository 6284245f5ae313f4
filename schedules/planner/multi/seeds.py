"""Seeds of the search: list schedules by priority rules, rounds, known orders.

Of the rules of `rules` each gives a list schedule. Some orders are kept as they are,
with the W's placed by time: the one that is not stretched, and for a V those of ZB-V,
V-Min and V-Half. A V is planned in rounds too. The plan that is best so far cuts the
others short.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

from zbpp.schedules.patterns.v_patterns import v_half_rows, v_min_rows
from zbpp.schedules.planner.budget import Budget
from zbpp.schedules.planner.multi.compiled import list_schedule, place_weights, retime
from zbpp.schedules.planner.multi.list_scheduler import Settings
from zbpp.schedules.planner.multi.problem import PlacementProblem, Plan, Rows
from zbpp.schedules.planner.multi.rounds import plan_rounds
from zbpp.schedules.planner.multi.rules import (
    RULES,
    Ranks,
    Rule,
    is_interleaved,
    is_v,
    order_of,
    ranks_of,
    settings_of,
    vpp_rows,
    zb_v_rows,
)

__all__ = ["Seed", "seeds"]


@dataclass(frozen=True)
class Seed:
    """A plan, and the settings that a search may go on from, if there are any."""

    plan: Plan
    settings: Settings | None


Attempt = Callable[[float], Seed | None]
"""Makes a plan whose span is below a number, or gives up."""


def seeds(
    problem: PlacementProblem,
    budget: Budget,
    *,
    margin: float = 0.0,
    below: float = math.inf,
) -> list[Seed]:
    """Plan by all of them, best first; stop at the lower bound.

    A run is given up when it falls behind the best, or behind the span ``below``, by
    more than the margin, a share. If all are, the first one is run to its end.
    """
    found: list[Seed] = []
    for attempt in _attempts(problem, budget):
        seed = attempt(below * (1 + margin))
        if seed is None:
            continue
        found.append(seed)
        below = min(below, seed.plan.span)
        if seed.plan.span <= problem.target or not budget.is_left:
            break
    if not found:
        last = _by_rule(
            problem,
            RULES[0],
            partial(ranks_of, problem, partial(order_of, problem)),
            budget,
            math.inf,
        )
        assert last is not None
        found.append(last)
    return sorted(found, key=lambda seed: seed.plan.span)


def _attempts(problem: PlacementProblem, budget: Budget) -> Iterator[Attempt]:
    v, size = is_v(problem), (problem.numbers, problem.n_microbatches)
    order = lru_cache(partial(order_of, problem))
    ranks = lru_cache(partial(ranks_of, problem, order))
    if v:
        yield partial(_known_order, problem, partial(order, 0.0), 0.5, budget)
        yield partial(_in_rounds, problem, budget)
        yield partial(_known_order, problem, partial(order, 0.0), 0.75, budget)
        yield partial(_known_order, problem, partial(v_min_rows, *size), 0.0, budget)
        yield partial(_known_order, problem, partial(v_half_rows, *size), 0.75, budget)
        yield partial(_as_it_stands, problem, partial(zb_v_rows, problem), budget)
    if is_interleaved(problem):
        yield partial(_as_it_stands, problem, partial(vpp_rows, problem), budget)
    yield partial(_known_order, problem, partial(order, 1.0), 1.0, budget)
    for rule in RULES:
        if v or rule.stretch > 0:
            yield partial(_by_rule, problem, rule, ranks, budget)


def _known_order(
    problem: PlacementProblem,
    rows: Callable[[], Rows],
    late: float,
    budget: Budget,
    below: float,
) -> Seed | None:
    budget.spend(2 * problem.n_chunks * problem.n_microbatches)
    plan = place_weights(problem, rows(), [late] * problem.n_stages, below)
    return None if plan is None else Seed(retime(problem, plan), None)


def _as_it_stands(
    problem: PlacementProblem,
    rows: Callable[[], Rows],
    budget: Budget,
    below: float,
) -> Seed | None:
    """Take a hand-made order, W's included, if it fits the memory."""
    budget.spend(problem.n_chunks * problem.n_microbatches)
    found = rows()
    for row, limit in zip(found, problem.limits, strict=True):
        if problem.peak_of(row) > limit:
            return None
    plan = retime(problem, Plan(0.0, found))
    return Seed(plan, None) if plan.span < below else None


def _in_rounds(problem: PlacementProblem, budget: Budget, below: float) -> Seed | None:
    budget.spend(9 * problem.n_chunks * problem.n_microbatches)
    plan = plan_rounds(problem)
    return None if plan is None else Seed(retime(problem, plan), None)


def _by_rule(
    problem: PlacementProblem,
    rule: Rule,
    ranks: Ranks,
    budget: Budget,
    below: float,
) -> Seed | None:
    settings = settings_of(problem, rule, ranks)
    plan = list_schedule(problem, settings, below, budget)
    return None if plan is None else Seed(retime(problem, plan), settings)
