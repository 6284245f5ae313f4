"""Find good rules for the list scheduler: seeds, then small changes that do not hurt.

    hand-made orders --> seeds --> hill climbing from the best seeds --> fewest idle
          |                |            |
          +----------------+------------+--> stop as soon as a span meets its bound

Every run is cut when it is sure to be worse than the best so far; a bad idea costs
only a part of a run. Changes that are neither better nor worse are taken: they lead
out of places where no single change helps.
"""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

from zbpp.schedules.planner.budget import Budget, parse_effort
from zbpp.schedules.planner.single.compiled import list_schedule_line, time_orders
from zbpp.schedules.planner.single.list_scheduler import Rules
from zbpp.schedules.planner.single.problem import Kinds, Line
from zbpp.schedules.planner.single.seeds import seeds

__all__ = ["Found", "search"]

_MARGIN = 1e-9
_LATE = (0.0, 0.25, 0.5, 0.75, 1.0)
_SLACK = (0.0, 0.005, 0.01, 0.02, 0.05, math.inf)


@dataclass
class Found:
    """The best orders so far, and the rules that gave them (none if hand-made)."""

    kinds: Kinds
    span: float
    bound: float

    @property
    def is_optimal(self) -> bool:
        """True if the span meets its lower bound."""
        return self.span <= self.bound * (1 + _MARGIN)

    def offer(self, kinds: Kinds, span: float) -> None:
        """Keep orders that are better."""
        if span < self.span * (1 - _MARGIN):
            self.kinds, self.span = kinds, span


def search(line: Line, effort: str, start: Iterable[Kinds] = ()) -> Found:
    """Find orders of a short largest span; stop when it meets its lower bound.

    Args:
        line: the stages.
        effort: see `parse_effort`.
        start: orders to begin with; those that do not fit are ignored.
    """
    start = list(start)
    name, seconds = parse_effort(effort)
    n_jobs = 3 * line.n_stages * line.n_microbatches
    if name == "fast":
        return _search_limit(line, start, Budget(_fast(n_jobs)))
    found = _search_limit(line, start, Budget(_default(n_jobs)))
    _search_lower(line, found, start, Budget(min(3 * _default(n_jobs), 2e6)))
    if name == "best":
        _climb_again(line, found, Budget(math.inf, seconds))
    return found


def _search_limit(line: Line, start: list[Kinds], budget: Budget) -> Found:
    """Search under the limits of the line: hand-made orders, seeds, climbing."""
    found = Found([], math.inf, line.bound())
    for kinds in start:
        found.offer(kinds, time_orders(line, kinds))
        if found.is_optimal:
            return found
    ranked = _try_seeds(line, found, budget)
    _climb(line, found, ranked[0], budget, random.Random(0))
    return found


def _search_lower(line: Line, found: Found, start: list[Kinds], budget: Budget) -> None:
    """Search as if there were less memory: a larger limit must not give a worse plan.

    A plan under less memory is a plan under more. The limits are whole multiples of
    M_B, then quarters; one whose bound is not below the best span cannot help, nor can
    a smaller one. If the budget lasts, the plan is the best of what all these limits
    give, so it cannot get worse when a limit of quarters is raised.
    """
    useless = 0
    for quarters in _lower_limits(line):
        if found.is_optimal or not budget.is_left:
            return
        if quarters <= useless:
            continue
        caps = zip(line.limit, line.beyond, line.m_b, strict=True)
        limit = tuple(min(cap, more + quarters / 4 * held) for cap, more, held in caps)
        lower = replace(line, limit=limit)
        if lower.bound() >= found.span * (1 - _MARGIN):
            useless = quarters
            continue
        less = Budget(_default(3 * line.n_stages * line.n_microbatches))
        other = _search_limit(lower, start, less)
        budget.spend(less.spent)
        found.offer(other.kinds, other.span)


def _lower_limits(line: Line) -> list[int]:
    """List lower limits in quarters of M_B, from 1 M_B on, whole ones first."""
    ratios = zip(line.limit, line.beyond, line.m_b, strict=True)
    most = max(
        (limit - more) / held if held else math.inf for limit, more, held in ratios
    )
    below = math.ceil(4 * min(most, line.n_microbatches) * (1 - _MARGIN)) - 1
    return sorted(
        range(4, below + 1), key=lambda quarters: (quarters % 4 > 0, -quarters)
    )


def _climb_again(line: Line, found: Found, budget: Budget) -> None:
    """Climb again and again from other seeds, with other changes."""
    rng = random.Random(1)
    ranked = _try_seeds(line, found, Budget(math.inf), cut_at=1.1)
    n_jobs = 3 * line.n_stages * line.n_microbatches
    while budget.is_left and not found.is_optimal:
        one = ranked[min(int(rng.expovariate(0.3)), len(ranked) - 1)]
        _climb(line, found, one, Budget(600.0 * n_jobs, budget.seconds_left), rng)


def _fast(n_jobs: int) -> float:
    """Passes: about .01 s for 500 jobs, .2 s for 12,000, 1.5 s for 100,000."""
    return min(24.0 * n_jobs, max(2.2e6, 1.0 * n_jobs))


def _default(n_jobs: int) -> float:
    """Passes for one limit: about .05 s for 500 jobs, 1 s for 12,000, 3 s for 100,000.

    There are several limits to try if no plan meets the bound.
    """
    return min(150.0 * n_jobs, 1e6 + 30.0 * n_jobs, 2e7)


def _try_seeds(
    line: Line, found: Found, budget: Budget, cut_at: float = 1.0
) -> list[tuple[float, Rules]]:
    """Run the seeds; return those that were not cut, best first."""
    ranked = []
    best = math.inf
    for number, rules in enumerate(seeds(line)):
        run = list_schedule_line(line, rules, cut=best * cut_at)
        budget.spend(run.n_steps)
        if run.kinds:
            best = min(best, run.span)
            ranked.append((run.span, number, rules))
            found.offer(run.kinds, run.span)
        if found.is_optimal or (ranked and not budget.is_left):
            break
    return [(span, rules) for span, _, rules in sorted(ranked, key=lambda one: one[:2])]


def _climb(
    line: Line,
    found: Found,
    start: tuple[float, Rules],
    budget: Budget,
    rng: random.Random,
) -> None:
    """Change rules a little, again and again; keep what is not worse."""
    span, rules = start
    while budget.is_left and not found.is_optimal:
        tried = _changed(rules, line, rng)
        run = list_schedule_line(line, tried, cut=span)
        budget.spend(run.n_steps + line.n_stages)
        if run.kinds:
            span, rules = run.span, tried
            found.offer(run.kinds, run.span)


def _changed(rules: Rules, line: Line, rng: random.Random) -> Rules:
    """Change 1 to 4 numbers, some on one stage, some from a stage on."""
    p, m = line.n_stages, line.n_microbatches
    work = max(line.work(stage) for stage in range(p))
    if rng.random() < 0.05:
        rules = replace(rules, is_fair=not rules.is_fair)
    for _ in range(rng.randint(1, 4)):
        first = rng.randrange(p)
        stages = range(first, p if rng.random() < 0.3 else first + 1)
        match rng.randrange(4):
            case 0:
                step = rng.choice((-2, -1, -1, 1, 1, 2))
                ahead = _shifted(rules.ahead, stages, step, 1, m)
                rules = replace(rules, ahead=ahead)
            case 1:
                step = rng.choice((-1, 1, 1, 2))
                early = _shifted(rules.early, stages, step, 0, m)
                rules = replace(rules, early=early)
            case 2:
                late = _put(rules.late, stages, rng.choice(_LATE))
                rules = replace(rules, late=late)
            case _:
                slack = _put(rules.slack, stages, rng.choice(_SLACK) * work)
                rules = replace(rules, slack=slack)
    return rules


def _shifted(
    numbers: tuple[int, ...], stages: range, step: int, least: int, most: int
) -> tuple[int, ...]:
    changed = list(numbers)
    for stage in stages:
        changed[stage] = min(most, max(least, changed[stage] + step))
    return tuple(changed)


def _put(numbers: tuple[float, ...], stages: range, value: float) -> tuple[float, ...]:
    changed = list(numbers)
    changed[stages.start : stages.stop] = [value] * len(stages)
    return tuple(changed)
