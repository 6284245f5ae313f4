"""Where the search for a wave begins: plans from rules, and from known orders.

*Rules.* Ranks grow evenly from micro-batch to micro-batch and along the chain; a
setting shifts classes of passes, caps what is in flight, and says how W's may be late.
The three best first settings stand first; the others were picked one by one, each
for what it gains over those before it on random cases.

*Orders.* ZB-V and the patterns of `v_patterns` give the F's and B's an order. It is
either kept, with the W's placed by time, or it only ranks them for the greedy planner,
which then follows the real times and uses all the memory there is.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain

from zbpp.core import PassKind
from zbpp.schedules.v_patterns import pattern_rows
from zbpp.schedules.wave_fixed import place_weights, retime
from zbpp.schedules.wave_greedy import Knobs, chain_offsets, greedy
from zbpp.schedules.wave_problem import Plan, Rows, WaveProblem
from zbpp.schedules.zb_v import plan_zb_v

__all__ = ["Seed", "seeds"]

# Shifts of the first chunk's F, other F's, other B's and the first chunk's B, in units
# of a micro-batch's work on the busiest stage; the last number: times stage / p.
CLASSES = {
    "chain": (0.0, 0.0, 0.0, 0.0, 0.0),
    "F0 last": (20.0, 0.0, 0.0, 0.0, -12.0),
    "F1 first": (20.0, -20.0, 0.0, 0.0, -12.0),
    "B first": (20.0, 0.0, -20.0, -20.0, 0.0),
}


@dataclass(frozen=True)
class Rule:
    """One setting; the cap of stage s is limit kappa (1 - sigma s / p) + delta."""

    kappa: float
    sigma: float
    delta: float
    favour: str
    late: float
    late_tail: float
    hold: float
    hold_later: float
    alternate: float = 0.0


RULES = (
    Rule(0.85, 0.3, 0.0, "F1 first", 0.0, 0.0, 1.0, 0.5),
    Rule(0.85, 0.5, 0.5, "F0 last", 0.75, 0.25, 0.0, 0.5, 1.0),
    Rule(0.5, 0.0, 1.0, "B first", 0.5, 0.5, 0.0, 0.0, 1.0),
    Rule(0.85, 0.5, 0.5, "F1 first", 0.75, 0.0, 1.0, 0.5, 0.0),
    Rule(0.75, 0.3, 0.0, "F0 last", 0.0, 0.5, 1.0, 0.5, 1.0),
    Rule(0.85, 0.5, 0.5, "B first", 0.0, 0.25, 1.0, 0.5, 1.0),
    Rule(0.85, 0.5, 1.0, "chain", 0.75, 0.0, 0.5, 0.5, 1.0),
    Rule(0.75, 0.3, 1.0, "B first", 1.0, 0.0, 1.0, 1.0, 1.0),
    Rule(0.75, 0.5, 0.5, "B first", 0.5, 0.25, 1.0, 1.0, 0.0),
    Rule(0.75, 0.0, 1.0, "chain", 0.75, 0.0, 0.5, 0.0, 1.0),
    Rule(0.85, 0.5, 1.0, "F1 first", 0.75, 0.5, 1.0, 0.5, 1.0),
    Rule(0.85, 0.3, 0.5, "B first", 0.0, 0.0, 1.0, 0.0, 0.0),
    Rule(0.85, 0.5, 0.0, "F0 last", 0.75, 1.0, 1.0, 1.0, 0.0),
    Rule(0.85, 0.3, 0.5, "B first", 1.0, 0.25, 1.0, 0.5, 1.0),
    Rule(0.85, 0.0, 0.0, "B first", 0.75, 0.0, 1.0, 0.5, 1.0),
)


@dataclass(frozen=True)
class Seed:
    """A plan, and the settings that a search may go on from, if there are any."""

    plan: Plan
    knobs: Knobs | None


Attempt = Callable[[float], Seed | None]
"""Makes a plan whose span is below a number, or gives up."""


def seeds(problem: WaveProblem, target: float, margin: float) -> list[Seed]:
    """Plan by all of them, best first; stop at the target span.

    A run is given up when it falls behind the best by more than the margin, a share.
    """
    found: list[Seed] = []
    below = math.inf
    for attempt in chain(_from_orders(problem), _from_rules(problem)):
        seed = attempt(below)
        if seed is None:
            continue
        found.append(seed)
        below = min(below, seed.plan.span * (1 + margin))
        if seed.plan.span <= target:
            break
    return sorted(found, key=lambda seed: seed.plan.span)


def _from_rules(problem: WaveProblem) -> Iterator[Attempt]:
    for rule in RULES:
        yield partial(_run, problem, rule)


def _from_orders(problem: WaveProblem) -> Iterator[Attempt]:
    p = problem.n_stages
    is_v = problem.placement.stage_of == (*range(p), *reversed(range(p)))
    if not is_v:
        return
    rows = _zb_v_rows(problem)
    yield from _kept(problem, rows)
    ranks = _ranks_of(problem, rows)
    unit = max(problem.work) / problem.n_microbatches
    for ahead in (0.0, unit):
        shifted = [
            [rank - ahead for rank in row] if q < problem.n_chunks else row
            for q, row in enumerate(ranks)
        ]
        for hold in (0.0, 1.0):
            for late in (0.0, 0.5, 1.0):
                knobs = _even(problem, shifted, late, hold)
                yield partial(_run, problem, knobs)
    if _is_short(problem):
        for rows in pattern_rows(problem):
            yield from _kept(problem, rows)


def _run(problem: WaveProblem, how: Knobs | Rule, below: float) -> Seed | None:
    knobs = _knobs(problem, how) if isinstance(how, Rule) else how
    plan = greedy(problem, knobs, below)
    if plan is None:
        return None
    return Seed(retime(problem, plan.rows, math.inf) or plan, knobs)


def _kept(problem: WaveProblem, rows: Rows) -> Iterator[Attempt]:
    for late in (0.0, 0.5, 1.0):
        yield partial(_place, problem, rows, late)


def _place(problem: WaveProblem, rows: Rows, late: float, below: float) -> Seed | None:
    plan = place_weights(problem, rows, [late] * problem.n_stages, below)
    return None if plan is None else Seed(plan, None)


def _is_short(problem: WaveProblem) -> bool:
    """Is there a stage whose memory does not hold p micro-batches?"""
    memory, p = problem.memory, problem.n_stages
    return any(
        limit < p * sum(memory.m_b[chunk] for chunk in chunks)
        for limit, chunks in zip(memory.limit, problem.placement.chunks_of, strict=True)
    )


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


def _ranks_of(problem: WaveProblem, rows: Rows) -> list[list[float]]:
    """Rank every pass by its place in its row."""
    ranks: list[list[float]] = [[] for _ in range(2 * problem.n_chunks)]
    for row, numbers in zip(rows, problem.numbers, strict=True):
        step = max(problem.work) / problem.n_microbatches / len(numbers)
        for place, q in enumerate(row):
            ranks[q].append(place * step)
    return ranks


def _even(
    problem: WaveProblem, ranks: list[list[float]], late: float, hold: float
) -> Knobs:
    p, m = problem.n_stages, problem.n_microbatches
    lates, holds = (late,) * p, (hold,) * p
    return Knobs((m,) * p, ranks, lates, lates, holds, holds)


def _knobs(problem: WaveProblem, rule: Rule) -> Knobs:
    p, m = problem.n_stages, problem.n_microbatches
    unit = max(problem.work) / m
    ranks = [
        [i * unit + way + unit * shift for i in range(m)]
        for way, shift in zip(
            chain_offsets(problem), _shifts(problem, rule.favour), strict=True
        )
    ]
    return Knobs(
        caps=tuple(_caps(problem, rule)),
        ranks=ranks,
        late=(rule.late,) * p,
        late_tail=(rule.late_tail,) * p,
        hold=(rule.hold,) * p,
        hold_later=(rule.hold_later,) * p,
        alternate=rule.alternate * unit,
    )


def _shifts(problem: WaveProblem, favour: str) -> Iterator[float]:
    f_first, f_later, b_later, b_first, per_stage = CLASSES[favour]
    for q in range(2 * problem.n_chunks):
        stage = problem.stage[q]
        numbers = problem.numbers[stage]
        if q < problem.n_chunks:
            yield f_first if q == numbers[0] else f_later
        elif q == numbers[-1]:
            yield b_first + per_stage * stage / problem.n_stages
        else:
            yield b_later


def _caps(problem: WaveProblem, rule: Rule) -> Iterable[int]:
    p, m = problem.n_stages, problem.n_microbatches
    for stage, chunks in enumerate(problem.placement.chunks_of):
        first = problem.memory.m_b[chunks[0]]
        fits = problem.memory.limit[stage] / first if first > 0 else math.inf
        cap = fits * rule.kappa * (1 - rule.sigma * stage / p) + rule.delta
        yield m if cap >= m else max(1, math.floor(cap + 1e-9))
