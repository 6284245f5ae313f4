"""Where the search for a wave begins: greedy plans by a few rules, and known orders.

A rule ranks the passes. If nothing ever waited, micro-batch i would start pass q of
the chain at time i T + way(q), with T the work of a micro-batch on the busiest stage. A
rule *stretches* the way: the longer a micro-batch takes from F to B, the more of them
are in flight. In units for two stages with two chunks each, F = B = W = 1, T = 6:

    q          0   1   2   3   4   5   6   7
    way        0   1   2   3   4   5   6   7      V-Min: memory about p/3
    stretch 2  0   2   4   6   8  10  12  14      V-Half: about p/2 (arXiv 2405.15362)

The rank is that time, or the place in the order that it gives; then the F's come
``ahead``, as far as the caps and the memory let them. The rules stand in the order in
which they were picked out of some 3,000, each for what it gains over those before it on
hundreds of random requests (2 to 12 stages, .5 p to 6 p micro-batches, equal and
unequal times, memory from p/10 to 2 p).

Stretch 0 stands for the order of ZB-V. Two orders are also kept as they are, with the
W's placed by time: that of ZB-V, and the unstretched one. A V is planned in rounds too.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from zbpp.core import PassKind
from zbpp.schedules.effort import Budget
from zbpp.schedules.wave_fixed import place_weights
from zbpp.schedules.wave_greedy import Knobs, chain_offsets, greedy
from zbpp.schedules.wave_problem import Plan, Rows, WaveProblem
from zbpp.schedules.wave_rounds import plan_rounds
from zbpp.schedules.wave_times import retime
from zbpp.schedules.zb_v import plan_zb_v

__all__ = ["Seed", "seeds"]


@dataclass(frozen=True)
class Rule:
    """One setting; times in T. The cap of stage s: limit kappa (1 - sigma s/p) + delta.

    ``ahead_later`` adds to ``ahead`` for the F's of a stage's later chunks. ``fresh``
    is in micro-batches per M_B of the limit.
    """

    stretch: float
    by_place: bool
    ahead: float
    ahead_later: float
    kappa: float
    sigma: float
    delta: float
    late: float
    late_tail: float
    hold: float
    hold_later: float
    alternate: float
    fresh: float = math.inf


RULES = (
    Rule(1.25, True, 0.5, 1.0, 0.95, 0.3, 1.0, 0.75, 0.25, 1.0, 0.5, 1.0, 1.0),
    Rule(1.0, True, -20.0, 20.0, 0.85, 0.0, 0.0, 0.5, 0.25, 1.0, 0.0, 0.0, 1.0),
    Rule(2.0, True, 0.5, 0.5, 0.85, 0.3, 0.0, 0.5, 0.25, 0.5, 0.0, 1.0, math.inf),
    Rule(0.0, True, 4.0, 0.0, 1.0, 0.3, 0.0, 0.75, 0.25, 0.0, 1.0, 0.0, 0.75),
    Rule(3.0, False, 0.5, 0.0, 0.9, 0.5, 0.5, 0.5, 0.5, 1.0, 0.0, 1.0, math.inf),
    Rule(2.0, True, -20.0, 1.0, 1.0, 0.0, 1.0, 0.75, 0.25, 1.0, 0.5, 1.0, 1.0),
    Rule(1.25, False, -2.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.5, 0.0, 0.5, 0.0, 0.5),
    Rule(0.0, True, 1.5, 0.0, 0.85, 0.5, 1.0, 0.5, 0.25, 0.0, 0.0, 0.0, math.inf),
    Rule(3.0, True, 0.5, 0.5, 0.75, 0.15, 0.5, 0.75, 0.25, 1.0, 0.5, 0.0, math.inf),
    Rule(1.0, False, -20.0, 40.0, 0.85, 0.5, 0.5, 0.75, 0.0, 0.5, 1.0, 0.0, math.inf),
    Rule(1.0, False, 3.0, 1.0, 0.9, 0.5, 1.0, 0.75, 0.5, 0.5, 1.0, 0.0, math.inf),
    Rule(0.0, True, -20.0, 20.0, 1.0, 0.3, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0, math.inf),
    Rule(3.0, True, 1.0, 0.5, 1.0, 0.15, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, math.inf),
    Rule(1.0, True, -20.0, 20.0, 0.85, 0.0, 1.0, 0.25, 0.25, 1.0, 0.0, 0.0, 1.0),
    Rule(1.25, False, 1.5, -0.5, 0.95, 0.3, 0.0, 0.5, 0.0, 1.0, 0.0, 1.0, 1.25),
    Rule(2.0, True, -20.0, 40.0, 0.75, 0.15, 1.0, 0.25, 0.0, 0.5, 0.5, 1.0, 1.0),
    Rule(1.5, True, 2.0, 0.0, 0.9, 0.5, 0.5, 0.75, 0.0, 0.0, 0.0, 0.0, 1.5),
    Rule(1.25, True, 3.0, 0.0, 0.9, 0.0, 0.5, 0.75, 0.0, 0.5, 0.0, 1.0, 1.0),
    Rule(0.0, True, -20.0, 22.0, 0.85, 0.3, 0.5, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0),
    Rule(0.0, True, 20.0, 1.0, 0.9, 0.3, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0),
    Rule(1.0, True, 3.0, 21.0, 0.9, 0.0, 1.0, 0.75, 0.0, 1.0, 0.0, 1.0, 1.0),
    Rule(1.25, True, 0.5, 1.0, 0.95, 0.3, 1.0, 0.75, 0.25, 1.0, 0.5, 0.0, 0.75),
    Rule(1.0, True, 3.0, 0.0, 0.85, 0.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 1.0),
    Rule(2.0, True, 1.0, 0.0, 0.85, 0.5, 0.5, 0.5, 0.25, 0.5, 0.0, 0.0, 1.5),
    Rule(1.0, True, 3.0, 0.0, 0.75, 0.0, 0.5, 0.75, 0.0, 1.0, 0.0, 1.0, 1.0),
    Rule(1.5, False, -20.0, 40.0, 0.85, 0.5, 0.5, 0.75, 0.0, 0.5, 1.0, 0.0, math.inf),
    Rule(3.0, True, -20.0, 22.0, 1.0, 0.3, 0.5, 0.25, 0.0, 1.0, 0.0, 0.0, 1.0),
    Rule(0.0, True, 1.5, 0.0, 0.85, 0.3, 0.0, 0.75, 0.5, 0.5, 0.0, 0.0, math.inf),
    Rule(1.5, False, 20.0, 2.0, 0.9, 0.5, 0.5, 0.25, 0.0, 1.0, 0.5, 0.0, 0.75),
    Rule(1.5, True, 4.0, 0.0, 0.75, 0.5, 1.0, 0.75, 0.5, 1.0, 0.5, 0.0, math.inf),
)


@dataclass(frozen=True)
class Seed:
    """A plan, and the settings that a search may go on from, if there are any."""

    plan: Plan
    knobs: Knobs | None


Attempt = Callable[[float], Seed | None]
"""Makes a plan whose span is below a number, or gives up."""


def seeds(
    problem: WaveProblem,
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
        last = _obey(problem, RULES[0], partial(_order, problem), budget, math.inf)
        assert last is not None
        found.append(last)
    return sorted(found, key=lambda seed: seed.plan.span)


def _attempts(problem: WaveProblem, budget: Budget) -> Iterator[Attempt]:
    p = problem.n_stages
    is_v = problem.placement.stage_of == (*range(p), *reversed(range(p)))
    order = lru_cache(partial(_order, problem))
    if is_v:
        yield partial(_keep, problem, order, 0.0, 0.5, budget)
        yield partial(_round, problem, budget)
    yield partial(_keep, problem, order, 1.0, 1.0, budget)
    for rule in RULES:
        if is_v or rule.stretch > 0:
            yield partial(_obey, problem, rule, order, budget)


def _keep(
    problem: WaveProblem,
    order: Callable[[float], Rows],
    stretch: float,
    late: float,
    budget: Budget,
    below: float,
) -> Seed | None:
    budget.spend(2 * problem.n_chunks * problem.n_microbatches)
    plan = place_weights(problem, order(stretch), [late] * problem.n_stages, below)
    return None if plan is None else Seed(retime(problem, plan), None)


def _round(problem: WaveProblem, budget: Budget, below: float) -> Seed | None:
    budget.spend(9 * problem.n_chunks * problem.n_microbatches)
    plan = plan_rounds(problem)
    return None if plan is None else Seed(retime(problem, plan), None)


def _obey(
    problem: WaveProblem,
    rule: Rule,
    order: Callable[[float], Rows],
    budget: Budget,
    below: float,
) -> Seed | None:
    knobs = _knobs(problem, rule, order)
    plan = greedy(problem, knobs, below, budget)
    return None if plan is None else Seed(retime(problem, plan), knobs)


def _zb_v_rows(problem: WaveProblem) -> Rows:
    schedule = plan_zb_v(
        n_stages=problem.n_stages, n_microbatches=problem.n_microbatches
    )
    last = 2 * problem.n_chunks - 1
    return [
        [
            job.chunk if job.kind is PassKind.F else last - job.chunk
            for job in problem.passes(order)
            if job.kind is not PassKind.W
        ]
        for order in schedule.orders
    ]


def _order(problem: WaveProblem, stretch: float) -> Rows:
    """Order the F's and B's of every stage by i T + the stretched way; 0: as ZB-V."""
    if stretch == 0:
        return _zb_v_rows(problem)
    m = problem.n_microbatches
    unit = max(problem.work) / m
    ways = [stretch * way for way in chain_offsets(problem)]
    return [
        [
            q
            for _, q in sorted(
                (i * unit + ways[q], q) for q in numbers for i in range(m)
            )
        ]
        for numbers in problem.numbers
    ]


def _ranks(
    problem: WaveProblem, rule: Rule, order: Callable[[float], Rows]
) -> Sequence[Sequence[float]]:
    m = problem.n_microbatches
    unit = max(problem.work) / m
    if not rule.by_place:
        ways = [rule.stretch * way for way in chain_offsets(problem)]
        return [[i * unit + way for i in range(m)] for way in ways]
    ranks: list[list[float]] = [[] for _ in range(2 * problem.n_chunks)]
    rows = order(rule.stretch)
    for row, numbers in zip(rows, problem.numbers, strict=True):
        step = unit / len(numbers)
        for place, q in enumerate(row):
            ranks[q].append(place * step)
    return ranks


def _knobs(problem: WaveProblem, rule: Rule, order: Callable[[float], Rows]) -> Knobs:
    p = problem.n_stages
    unit = max(problem.work) / problem.n_microbatches
    return Knobs(
        caps=tuple(_caps(problem, rule)),
        fresh=tuple(_fresh(problem, rule)),
        ranks=_ranks(problem, rule, order),
        shift=tuple(-unit * ahead for ahead in _aheads(problem, rule)),
        late=(rule.late,) * p,
        late_tail=(rule.late_tail,) * p,
        hold=(rule.hold,) * p,
        hold_later=(rule.hold_later,) * p,
        alternate=rule.alternate * unit,
    )


def _aheads(problem: WaveProblem, rule: Rule) -> Iterator[float]:
    for q in range(2 * problem.n_chunks):
        if q >= problem.n_chunks:
            yield 0.0
        elif q == problem.numbers[problem.stage[q]][0]:
            yield rule.ahead
        else:
            yield rule.ahead + rule.ahead_later


def _caps(problem: WaveProblem, rule: Rule) -> Iterator[int]:
    p, m = problem.n_stages, problem.n_microbatches
    for stage, chunks in enumerate(problem.placement.chunks_of):
        first = problem.memory.m_b[chunks[0]]
        fits = problem.memory.limit[stage] / first if first > 0 else math.inf
        cap = fits * rule.kappa * (1 - rule.sigma * stage / p) + rule.delta
        yield m if cap >= m else max(1, math.floor(cap + 1e-9))


def _fresh(problem: WaveProblem, rule: Rule) -> Iterator[int]:
    m, memory = problem.n_microbatches, problem.memory
    for limit, chunks in zip(memory.limit, problem.placement.chunks_of, strict=True):
        whole = sum(memory.m_b[chunk] for chunk in chunks)
        most = rule.fresh * limit / whole if whole > 0 else math.inf
        yield m if most >= m else max(1, math.ceil(most - 1e-9))
