"""Priority rules for the list scheduler.

If nothing ever waited, micro-batch i would start pass q of the chain at time
i T + way(q), with T the work of a micro-batch on the busiest stage. A rule *stretches*
the way: the longer a micro-batch takes from F to B, the more of them are in flight. For
two stages with two chunks each, F = B = W = 1, T = 6:

    q          0   1   2   3   4   5   6   7
    way        0   1   2   3   4   5   6   7      V-Min: memory about p/3
    stretch 2  0   2   4   6   8  10  12  14      V-Half: about p/2 (arXiv 2405.15362)
    stretch 0  stands for the order of ZB-V       memory p (arXiv 2401.10241)

The rank of a pass is that time, or its place in the order that the times give; then
the F's come ``ahead``, as far as the caps and the memory let them.

The rules stand in the order in which they were picked out of some 3,000, each for what
it gains over those before it on hundreds of random requests: 2 to 12 stages, p/2 to 6p
micro-batches, equal and unequal times, memory from p/10 to 2p.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from zbpp.core import PassKind
from zbpp.schedules.patterns.vpp import plan_vpp
from zbpp.schedules.patterns.zb_v import zb_v_cells
from zbpp.schedules.planner.limits import micro_batch
from zbpp.schedules.planner.multi.list_scheduler import Settings, chain_offsets
from zbpp.schedules.planner.multi.problem import PlacementProblem, Rows
from zbpp.schedules.planner.multi.timing import rows_by_starts

__all__ = [
    "RULES",
    "Ranks",
    "Rule",
    "is_interleaved",
    "is_v",
    "order_of",
    "ranks_of",
    "settings_of",
    "vpp_rows",
    "zb_v_rows",
]


Ranks = Callable[[float, bool], Sequence[Sequence[float]]]


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


def is_v(problem: PlacementProblem) -> bool:
    """True if two chunks a stage go down the stages and up again."""
    stages = range(problem.n_stages)
    return problem.placement.stage_of == (*stages, *reversed(stages))


def is_interleaved(problem: PlacementProblem) -> bool:
    """True if several chunks a stage go down the stages again and again."""
    p, each = problem.n_stages, problem.n_chunks // problem.n_stages
    return each > 1 and problem.placement.stage_of == (*range(p),) * each


def order_of(problem: PlacementProblem, stretch: float) -> Rows:
    """Order the F's and B's of every stage by i T + the stretched way; 0: as ZB-V."""
    if stretch == 0:
        return _zb_v_rows(problem)
    m = problem.n_microbatches
    unit = max(problem.work) / m
    ways = [stretch * way for way in chain_offsets(problem)]
    starts = [[i * unit + way for i in range(m)] for way in ways]
    return rows_by_starts(problem, starts)


def settings_of(problem: PlacementProblem, rule: Rule, ranks: Ranks) -> Settings:
    """Give a rule its numbers; ``ranks`` is `ranks_of` the problem."""
    p = problem.n_stages
    unit = max(problem.work) / problem.n_microbatches
    return Settings(
        caps=tuple(_caps(problem, rule)),
        fresh=tuple(_fresh(problem, rule)),
        ranks=ranks(rule.stretch, rule.by_place),
        shift=tuple(-unit * ahead for ahead in _aheads(problem, rule)),
        late=(rule.late,) * p,
        late_tail=(rule.late_tail,) * p,
        hold=(rule.hold,) * p,
        hold_later=(rule.hold_later,) * p,
        alternate=rule.alternate * unit,
    )


def ranks_of(
    problem: PlacementProblem,
    order: Callable[[float], Rows],
    stretch: float,
    by_place: bool,
) -> Sequence[Sequence[float]]:
    """Rank every F and B; ``order`` is `order_of` the problem."""
    m = problem.n_microbatches
    unit = max(problem.work) / m
    if not by_place:
        ways = [stretch * way for way in chain_offsets(problem)]
        return [[i * unit + way for i in range(m)] for way in ways]
    ranks = [array("d")] * (2 * problem.n_chunks)
    rows = order(stretch)
    for row, numbers in zip(rows, problem.numbers, strict=True):
        step = unit / len(numbers)
        places: dict[int, list[float]] = {q: [] for q in numbers}
        for place, q in enumerate(row):
            places[q].append(place * step)
        for q in numbers:
            ranks[q] = array("d", places[q])
    return ranks


def _zb_v_rows(problem: PlacementProblem) -> Rows:
    last = 2 * problem.n_chunks - 1
    return [[q for q in row if q <= last] for row in zb_v_rows(problem)]


def zb_v_rows(problem: PlacementProblem) -> Rows:
    """Order all passes of every stage as ZB-V does, for a V."""
    size = problem.n_stages, problem.n_microbatches
    return [
        _numbered(
            problem, s, ((kind, chunk) for kind, chunk, _ in zb_v_cells(s, *size))
        )
        for s in range(problem.n_stages)
    ]


def vpp_rows(problem: PlacementProblem) -> Rows:
    """Order all passes as VPP does, for interleaved chunks; W's follow their B's."""
    p = problem.n_stages
    schedule = plan_vpp(
        n_stages=p,
        n_microbatches=problem.n_microbatches,
        chunks_per_stage=problem.n_chunks // p,
    )
    return [
        _numbered(
            problem,
            stage,
            (
                (kind, job.chunk)
                for job in problem.passes(order)
                for kind in (
                    (job.kind,)
                    if job.kind is not PassKind.BW
                    else (PassKind.B, PassKind.W)
                )
            ),
        )
        for stage, order in enumerate(schedule.orders)
    ]


def _numbered(
    problem: PlacementProblem, stage: int, cells: Iterable[tuple[PassKind, int]]
) -> list[int]:
    """Write kinds and chunks as numbers, without W's where B's are joint."""
    n = problem.n_chunks
    row = [
        chunk if kind is PassKind.F else (2 + (kind is PassKind.W)) * n - 1 - chunk
        for kind, chunk in cells
    ]
    return [q for q in row if q < 2 * n] if stage in problem.joint else row


def _aheads(problem: PlacementProblem, rule: Rule) -> Iterator[float]:
    for q in range(2 * problem.n_chunks):
        if q >= problem.n_chunks:
            yield 0.0
        elif q == problem.numbers[problem.stage[q]][0]:
            yield rule.ahead
        else:
            yield rule.ahead + rule.ahead_later


def _caps(problem: PlacementProblem, rule: Rule) -> Iterator[int]:
    p, m = problem.n_stages, problem.n_microbatches
    for stage, chunks in enumerate(problem.placement.chunks_of):
        first = problem.memory.m_b[chunks[0]]
        room = problem.memory.limit[stage] - problem.beyond[stage]
        fits = room / first if first > 0 else math.inf
        cap = fits * rule.kappa * (1 - rule.sigma * stage / p) + rule.delta
        yield m if cap >= m else max(1, math.floor(cap + 1e-9))


def _fresh(problem: PlacementProblem, rule: Rule) -> Iterator[int]:
    m, memory = problem.n_microbatches, problem.memory
    held = micro_batch(memory, problem.placement)
    for limit, more, whole in zip(memory.limit, problem.beyond, held, strict=True):
        most = math.inf
        if whole > 0 and rule.fresh < math.inf:  # no room times no limit is no number
            most = rule.fresh * (limit - more) / whole
        yield m if most >= m else max(1, math.ceil(most - 1e-9))
