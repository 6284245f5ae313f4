"""Find good rules for the greedy planner: seeds, then small changes that do not hurt.

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

from zbpp.schedules.effort import Budget, parse_effort
from zbpp.schedules.greedy import Rules, run_greedy
from zbpp.schedules.line import Kinds, Line, play
from zbpp.schedules.seeds import seeds

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
        """Does the span meet its lower bound?"""
        return self.span <= self.bound * (1 + _MARGIN)

    def offer(self, kinds: Kinds, span: float) -> None:
        """Keep orders that are better."""
        if span < self.span * (1 - _MARGIN):
            self.kinds, self.span = kinds, span


def search(line: Line, bound: float, effort: str, start: Iterable[Kinds] = ()) -> Found:
    """Find orders of a short largest span.

    Args:
        line: the stages.
        bound: a lower bound of the span; the search stops when it is met.
        effort: see `parse_effort`.
        start: orders to begin with; those that do not fit are ignored.
    """
    found = Found([], math.inf, bound)
    for kinds in start:
        found.offer(kinds, play(line, kinds))
        if found.is_optimal:
            return found
    name, seconds = parse_effort(effort)
    n_jobs = 3 * line.n_stages * line.n_microbatches
    few = Budget(_fast(n_jobs))
    ranked = _try_seeds(line, found, few)
    match name:
        case "fast":
            budget = few
        case "default":
            budget = Budget(_default(n_jobs))
        case _:
            budget = Budget(math.inf, seconds)
    _climb(line, found, ranked, budget)
    return found


def _fast(n_jobs: int) -> float:
    """Passes: about .01 s for 500 jobs, .2 s for 12,000, 1.5 s for 100,000."""
    return min(24.0 * n_jobs, max(2.2e6, 1.5 * n_jobs))


def _default(n_jobs: int) -> float:
    """Passes: about .1 s for 500 jobs, 2 s for 12,000, 7 s for 100,000."""
    return min(250.0 * n_jobs, 2e6 + 80.0 * n_jobs, 4e7)


def _try_seeds(line: Line, found: Found, budget: Budget) -> list[tuple[float, Rules]]:
    """Run the seeds; return those that were not cut, best first."""
    ranked = []
    cut = math.inf
    for number, rules in enumerate(seeds(line)):
        run = run_greedy(line, rules, cut=cut)
        budget.spend(run.n_steps)
        if run.kinds:
            cut = min(cut, run.span)
            ranked.append((run.span, number, rules))
            found.offer(run.kinds, run.span)
        if found.is_optimal or not (budget.is_left or not ranked):
            break
    return [(span, rules) for span, _, rules in sorted(ranked)]


def _climb(
    line: Line, found: Found, ranked: list[tuple[float, Rules]], budget: Budget
) -> None:
    """Change the best rules a little, again and again."""
    rng = random.Random(0)
    span, rules = ranked[0]
    while budget.is_left and not found.is_optimal:
        tried = _changed(rules, line, rng)
        run = run_greedy(line, tried, cut=span)
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
