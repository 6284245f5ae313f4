"""Seeds of the search: known orders, and list schedules by priority rules.

The orders of hand-made schedules are taken as they stand, or their F's and B's with the
W's placed by time. What is planned so is never worse than a hand-made order that fits.

The rules are rows of numbers for the list scheduler.

Several chunks a stage. If nothing ever waited, micro-batch i would start pass q of the
chain at time i T + start(q), with T the work of a micro-batch on the busiest stage. A
rule *stretches* these starts: the longer a micro-batch takes from F to B, the more of
them are in flight. For two stages with two chunks each, F = B = W = 1, T = 6:

    q          0   1   2   3   4   5   6   7
    start      0   1   2   3   4   5   6   7      V-Min: memory about p/3
    stretch 2  0   2   4   6   8  10  12  14      V-Half: about p/2 (arXiv 2405.15362)

The rank of a pass is that time; then the F's come ``ahead``, as far as the caps and the
memory let them.

One chunk a stage. B's come before F's, but for the first ones: F's run ahead of B's by
``slope * x + offset`` micro-batches, where x is either of

    d   the stages p - s from here to the end: d is 1F1B and ZB-H1, 2d - 1 is ZB-H2
    r   the F's that fill the time until the first B can arrive, for the given times;
        equal to 2d - 1 if all times are equal

Both tables stand in the order in which their rows were picked, each for what it gains
over those before it on random requests: the first out of some 3,000 on hundreds (2 to
12 stages, p/2 to 6p micro-batches, memory from p/10 to 2p), the second out of 336 on
some 50 (memory from p/2 to 2p), and four for lines of 8 to 32 stages below p/2. What
half of them gives, and each setting, is measured by `benchmarks/planner/ablation.py`.
"""

import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, count, starmap
from typing import NamedTuple, TypeAlias

from zbpp.core import Placement, Schedule
from zbpp.schedules.passes.parts import lay_out
from zbpp.schedules.patterns import Phases
from zbpp.schedules.patterns.interleaved import plan_combined_1f1b, vpp_phases
from zbpp.schedules.patterns.one_chunk import one_f_one_b_phases, zb_h_phases
from zbpp.schedules.patterns.waves import plan_dual_pipe_v, zb_v_phases
from zbpp.schedules.planner.critical_path import timed
from zbpp.schedules.planner.list_scheduler import Settings, list_schedule
from zbpp.schedules.planner.problem import (
    Budget,
    PlacementProblem,
    Plan,
    Rows,
    micro_batch,
)

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
) -> list[Seed]:
    """Plan by all of them, best first; stop at the lower bound.

    A run is given up when it falls behind the best by more than the margin, a share.
    """
    kept_seeds: list[Seed] = []
    below = math.inf
    for attempt in _attempts(problem):
        seed = _planned(problem, attempt, below * (1 + margin), budget)
        if seed is None:
            continue
        kept_seeds.append(seed)
        below = min(below, seed.plan.span)
        if below <= problem.target or not budget.is_left:
            break
    return sorted(kept_seeds, key=lambda seed: seed.plan.span)


def _planned(
    problem: PlacementProblem, attempt: Attempt, below: float, budget: Budget
) -> Seed | None:
    if isinstance(attempt, Settings):
        plan = list_schedule(problem, attempt, below, budget)
        if plan is None:
            return None
        if problem.costs.parts:
            return Seed(plan, attempt)
        is_known = attempt.order is not None
        return Seed(timed(problem, plan.rows), None if is_known else attempt)
    budget.spend(problem.n_passes / 3)  # it is only timed
    if not problem.fits(attempt):
        return None
    plan = timed(problem, attempt)
    return Seed(plan, None) if plan.span < below else None


def _attempts(problem: PlacementProblem) -> Iterator[Attempt]:
    """All seeds, the most useful first."""
    if problem.costs.parts:
        yield from _rules_of_parts(problem)
        return
    for rows in hand_made_rows(problem):
        if not is_line(problem):
            yield _known_order(problem, rows)
        yield rows
    yield from rules(problem)


def _known_order(problem: PlacementProblem, rows: Rows) -> Settings:
    """Keep the F's and B's of rows, and place the W's."""
    p, n = problem.n_stages, 2 * problem.n_chunks
    order = [array("i", [q for q in row if q < n]) for row in rows]
    early, overrun = (0,) * p, (0.25,) * p
    return Settings((), (), (), early, overrun, overrun, is_fair=True, order=order)


def rules(problem: PlacementProblem) -> Iterator[Settings]:
    """The settings of all rules for the placement."""
    if is_line(problem):
        little = _has_little(problem)
        # below p M_B, those of at most d forwards first
        for line_rule in sorted(LINE_RULES, key=lambda rule: little and rule.is_deep):
            yield line_settings_of(problem, line_rule)
        return
    for rule in RULES:
        yield settings_of(problem, rule)


_OPEN = (
    (2, 2, 1, 1.0),
    (2, 2, 99, 0.0),
    (3, 2, 4, 0.5),
    (2, 1, 2, 20.0),
    (1, 1, 99, 0.0),
)
"""``most_open``, ``most_b``, ``most_w`` and ``go_on``, in rounds, of each rule."""


def _rules_of_parts(problem: PlacementProblem) -> Iterator[Settings]:
    """The rules for passes in one piece, each with settings of what is open."""
    p = problem.n_stages
    for most_open, most_b, most_w, go_on in _OPEN:
        for settings in rules(problem):
            yield replace(
                settings,
                most_open=most_open,
                most_b=(most_b,) * p,
                most_w=(most_w,) * p,
                go_on=go_on * problem.unit,
            )


def _has_little(problem: PlacementProblem) -> bool:
    p, memory = problem.n_stages, problem.costs
    pairs = zip(memory.limit, problem.beyond, memory.m_b, strict=True)
    return any(limit - beyond < p * m_b for limit, beyond, m_b in pairs)


@dataclass(frozen=True)
class Rule:
    """One setting; times in T.

    The cap of stage s is limit * cap_scale * (1 - cap_slope s/p) + cap_more.
    ``ahead_later`` adds to ``ahead`` for the F's of a stage's later chunks;
    ``max_without_b`` is in micro-batches per M_B of the limit.
    """

    stretch: float
    ahead: float
    ahead_later: float
    cap_scale: float
    cap_slope: float
    cap_more: float
    overrun: float
    overrun_tail: float
    delay_b: float
    delay_f: float
    max_without_b: float = math.inf


RULES = (
    Rule(1.25, 0.5, 1.0, 0.95, 0.3, 1.0, 0.75, 0.25, 1.0, 0.5, 1.0),
    Rule(1.0, -20.0, 20.0, 0.85, 0.0, 0.0, 0.5, 0.25, 1.0, 0.0, 1.0),
    Rule(2.0, 0.5, 0.5, 0.85, 0.3, 0.0, 0.5, 0.25, 0.5, 0.0, math.inf),
    Rule(3.0, 0.5, 0.0, 0.9, 0.5, 0.5, 0.5, 0.5, 1.0, 0.0, math.inf),
    Rule(2.0, -20.0, 1.0, 1.0, 0.0, 1.0, 0.75, 0.25, 1.0, 0.5, 1.0),
    Rule(1.25, -2.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.5, 0.0, 0.5, 0.5),
    Rule(3.0, 0.5, 0.5, 0.75, 0.15, 0.5, 0.75, 0.25, 1.0, 0.5, math.inf),
    Rule(1.0, -20.0, 40.0, 0.85, 0.5, 0.5, 0.75, 0.0, 0.5, 1.0, math.inf),
    Rule(1.0, 3.0, 1.0, 0.9, 0.5, 1.0, 0.75, 0.5, 0.5, 1.0, math.inf),
    Rule(3.0, 1.0, 0.5, 1.0, 0.15, 1.0, 1.0, 1.0, 1.0, 1.0, math.inf),
    Rule(1.0, -20.0, 20.0, 0.85, 0.0, 1.0, 0.25, 0.25, 1.0, 0.0, 1.0),
    Rule(1.25, 1.5, -0.5, 0.95, 0.3, 0.0, 0.5, 0.0, 1.0, 0.0, 1.25),
    Rule(2.0, -20.0, 40.0, 0.75, 0.15, 1.0, 0.25, 0.0, 0.5, 0.5, 1.0),
    Rule(1.5, 2.0, 0.0, 0.9, 0.5, 0.5, 0.75, 0.0, 0.0, 0.0, 1.5),
    Rule(1.25, 3.0, 0.0, 0.9, 0.0, 0.5, 0.75, 0.0, 0.5, 0.0, 1.0),
    Rule(1.0, 3.0, 21.0, 0.9, 0.0, 1.0, 0.75, 0.0, 1.0, 0.0, 1.0),
    Rule(1.25, 0.5, 1.0, 0.95, 0.3, 1.0, 0.75, 0.25, 1.0, 0.5, 0.75),
    Rule(1.0, 3.0, 0.0, 0.85, 0.0, 0.5, 0.5, 0.0, 0.0, 0.0, 1.0),
    Rule(2.0, 1.0, 0.0, 0.85, 0.5, 0.5, 0.5, 0.25, 0.5, 0.0, 1.5),
    Rule(1.0, 3.0, 0.0, 0.75, 0.0, 0.5, 0.75, 0.0, 1.0, 0.0, 1.0),
    Rule(1.5, -20.0, 40.0, 0.85, 0.5, 0.5, 0.75, 0.0, 0.5, 1.0, math.inf),
    Rule(3.0, -20.0, 22.0, 1.0, 0.3, 0.5, 0.25, 0.0, 1.0, 0.0, 1.0),
    Rule(1.5, 20.0, 2.0, 0.9, 0.5, 0.5, 0.25, 0.0, 1.0, 0.5, 0.75),
    Rule(1.5, 4.0, 0.0, 0.75, 0.5, 1.0, 0.75, 0.5, 1.0, 0.5, math.inf),
)


@dataclass(frozen=True)
class LineRule:
    """One setting for one chunk a stage: see above, and `Settings`."""

    slope: float
    of: str
    offset: float
    overrun: float
    early: int = 0
    is_fair: bool = False

    @property
    def is_deep(self) -> bool:
        """True if more than about d forwards are in flight."""
        return self.slope > (1.0 if self.of == "d" else 0.5)


LINE_RULES = (
    LineRule(2.0, "d", -1.0, 0.75),
    LineRule(0.75, "r", -0.25, 0.25),
    LineRule(0.5, "r", 0.0, 0.5),
    LineRule(2.0, "d", -1.0, 0.0, is_fair=True),
    LineRule(1.0, "d", -1.0, 0.75),
    LineRule(0.35, "r", 0.0, 0.0, is_fair=True),
    LineRule(1.5, "d", 0.0, 0.75),
    LineRule(1.0, "d", 0.0, 0.75),
    LineRule(0.75, "d", 0.0, 0.0),
    LineRule(0.0, "d", 1.0, 0.0),
    LineRule(1.0, "r", 0.0, 1.0),
    LineRule(1.0, "d", 0.0, 1.0),
    LineRule(1.0, "d", -1.0, 0.0, is_fair=True),
    LineRule(1.0, "r", -1.0, 0.25),
    LineRule(2.0, "d", -1.0, 0.0, early=1),
    LineRule(0.5, "d", 0.0, 0.0),
    LineRule(2.0, "d", -1.0, 0.5),
    LineRule(1.0, "r", -0.5, 0.0, early=1, is_fair=True),
    LineRule(1.2, "d", 1.0, 0.5),
    LineRule(0.5, "r", 0.5, 0.5),
    LineRule(1.0, "d", 0.0, 0.0, is_fair=True),
    LineRule(1.0, "r", -1.0, 0.0, is_fair=True),
    LineRule(0.5, "r", 0.5, 0.75),
    LineRule(1.0, "r", 0.0, 0.0, is_fair=True),
    LineRule(0.75, "r", 0.25, 0.0, is_fair=True),
    LineRule(0.75, "r", 0.75, 1.0, early=1),
    LineRule(0.0, "d", 1.0, 0.0, early=1),
    LineRule(0.25, "d", 0.0, 0.0),
    LineRule(0.0, "d", 1.0, 0.0, early=2),
    LineRule(0.25, "d", 0.0, 0.0, early=1),
    LineRule(0.35, "r", 0.0, 0.5),
    LineRule(1.5, "d", 0.0, 0.25),
    LineRule(1.0, "d", 0.0, 0.25),
    LineRule(1.0, "d", 0.0, 0.0),
)


def is_line(problem: PlacementProblem) -> bool:
    """True if every stage has one chunk."""
    return problem.placement == Placement.single(problem.n_stages)


def settings_of(problem: PlacementProblem, rule: Rule) -> Settings:
    """Give a rule its numbers."""
    p, unit, numbers = problem.n_stages, problem.unit, problem.numbers
    offset = problem.chain_starts(rule.stretch)
    for q in range(problem.n_chunks):
        is_first = q == numbers[problem.stage[q]][0]
        offset[q] -= unit * (rule.ahead + (0.0 if is_first else rule.ahead_later))
    return Settings(
        offset=tuple(offset),
        max_in_flight=tuple(_caps(problem, rule)),
        max_without_b=tuple(_without_b(problem, rule)),
        early=(0,) * p,
        overrun=(rule.overrun,) * p,
        overrun_tail=(rule.overrun_tail,) * p,
        delay_b=rule.delay_b,
        delay_f=rule.delay_f,
    )


def line_settings_of(problem: PlacementProblem, rule: LineRule) -> Settings:
    """Give a rule for one chunk a stage its numbers."""
    m, p, unit = problem.n_microbatches, problem.n_stages, problem.unit or 1.0
    below = _returns(problem) if rule.of == "r" else [float(p - s) for s in range(p)]
    aheads = [max(1.0, rule.slope * x + rule.offset - 1e-9) for x in below]
    # half a micro-batch less than the rule's number: no F has the rank of a B
    offset = [(0.5 - math.ceil(min(m, ahead))) * unit for ahead in aheads]
    return Settings(
        offset=(*offset, *[0.0] * p),
        max_in_flight=(m,) * p,
        max_without_b=(m,) * p,
        early=(rule.early,) * p,
        overrun=(rule.overrun,) * p,
        overrun_tail=(rule.overrun,) * p,
        is_fair=rule.is_fair,
    )


def _returns(problem: PlacementProblem) -> list[float]:
    """Count the F's of a stage that take the time until its first B can arrive."""
    starts, last = problem.chain_starts(), 2 * problem.n_chunks - 1
    return [
        (starts[last - s] - starts[s]) / f if (f := problem.time[s]) > 0 else math.inf
        for s in range(problem.n_stages)
    ]


def hand_made_rows(problem: PlacementProblem) -> Iterator[Rows]:
    """Rows of all passes by hand; they may not fit the memory."""
    p, m, placement = problem.n_stages, problem.n_microbatches, problem.placement
    if is_line(problem):
        yield _rows(problem, lambda s: zb_h_phases(s, p, m, arms=2))
        yield _rows(problem, lambda s: zb_h_phases(s, p, m, arms=1))
        yield _rows(problem, lambda s: one_f_one_b_phases(s, p, m))
    elif placement == Placement.wave(p):
        least = max(m, 2 * p - 1)
        yield _rows(problem, lambda s: zb_v_phases(s, p, least), n_left_out=least - m)
    elif placement == Placement.interleaved(p, problem.n_chunks // p):
        yield _rows(problem, lambda s: vpp_phases(s, placement, m))


def laid_out(problem: PlacementProblem, whole: Schedule) -> Iterator[Schedule]:
    """Orders of whole passes on lanes; the first is the plan without overlap."""
    costs, placement = problem.costs, problem.placement
    p, m = problem.n_stages, problem.n_microbatches
    yield whole
    yield lay_out(whole, costs)
    sizes = {"n_stages": p, "n_microbatches": m}
    if placement == Placement.wave(p):
        yield replace(lay_out(plan_dual_pipe_v(**sizes), costs), name=whole.name)
    if p > 1 and placement == Placement.interleaved(p, placement.n_chunks // p):
        chunks = placement.n_chunks // p
        combined = plan_combined_1f1b(**sizes, chunks_per_stage=chunks)
        yield replace(lay_out(combined, costs), name=whole.name)


def _rows(
    problem: PlacementProblem, phases: Callable[[int], Phases], n_left_out: int = 0
) -> Rows:
    """Write phases as numbers, without the first passes of each number."""
    n, rows = problem.n_chunks, []
    for stage, splits in enumerate(problem.costs.splits):
        row = array("i")
        for times, cells in phases(stage):
            numbers = chain.from_iterable(starmap(problem.numbers_of, cells))
            row += array("i", [q for q in numbers if splits or q < 2 * n]) * times
        if n_left_out:
            number: dict[int, Iterator[int]] = defaultdict(count)
            row = array("i", [q for q in row if next(number[q]) >= n_left_out])
        rows.append(row)
    return rows


def _caps(problem: PlacementProblem, rule: Rule) -> Iterator[int]:
    p, m = problem.n_stages, problem.n_microbatches
    for stage, chunks in enumerate(problem.placement.chunks_of):
        first = problem.costs.m_b[chunks[0]]
        room = problem.costs.limit[stage] - problem.beyond[stage]
        n_fit = room / first if first > 0 else math.inf
        cap = n_fit * rule.cap_scale * (1 - rule.cap_slope * stage / p) + rule.cap_more
        yield m if cap >= m else max(1, math.floor(cap + 1e-9))


def _without_b(problem: PlacementProblem, rule: Rule) -> Iterator[int]:
    m, memory = problem.n_microbatches, problem.costs
    amounts = micro_batch(memory)
    for limit, more, whole in zip(memory.limit, problem.beyond, amounts, strict=True):
        most = math.inf
        if whole > 0 and rule.max_without_b < math.inf:  # else 0 times infinity
            most = rule.max_without_b * (limit - more) / whole
        yield m if most >= m else max(1, math.ceil(most - 1e-9))
