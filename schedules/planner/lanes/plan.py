"""Plan passes in parts: list schedules by many rules, the best ones changed.

1. Rules are drawn, and the best few kept.
2. One to three of their settings are changed at a time; what is not worse is kept. So
   the best few, for a while, then the best two of them.
3. Orders of whole passes, laid out: the plan for passes in one piece, DualPipeV and
   combined 1F1B where they fit. No plan is longer than one of these.

Effort is counted in parts placed, so that a plan depends on nothing but the request;
``best:SECONDS`` goes on changing for a time.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from zbpp.core import (
    Costs,
    Placement,
    Schedule,
    longest_span,
    peaks,
    replay,
)
from zbpp.schedules.passes.lay_out import lay_out
from zbpp.schedules.patterns.combined_1f1b import plan_combined_1f1b
from zbpp.schedules.patterns.dual_pipe_v import plan_dual_pipe_v
from zbpp.schedules.planner.budget import Budget, parse_effort
from zbpp.schedules.planner.lanes.problem import LaneProblem, LaneRules, Rows
from zbpp.schedules.planner.lanes.scheduler import list_schedule, list_span
from zbpp.schedules.planner.limits import micro_batch
from zbpp.schedules.planner.search.problem import PlacementProblem

__all__ = ["plan_on_lanes"]

_PARTS = {"fast": 4e5, "default": 1e7, "best": 1e7}
"""Parts that list schedules place, by effort."""
_LEAST, _MOST = 20, 6_000  # runs, of any size: more gain a small plan nothing
_DRAWN = 0.3  # share of the runs whose rules are drawn
_KEPT, _LAST = 8, 2  # of those, the best are changed, then the best of these
_WORSE = 1.05  # a drawn one is given up beyond the best


@dataclass(frozen=True)
class _Settings:
    """Settings that are drawn and changed, by stage or by pass of a stage.

    Args:
        turn: of each F and B of a stage, in the order of the chain: rounds by which it
            comes later.
        slope: what is added to that from the first stage to the last.
        stretch: share of the way through the model that counts in a rank.
    """

    turn: tuple[float, ...]
    slope: tuple[float, ...]
    stretch: float
    go_on: float
    most: int
    cap: tuple[int, ...]
    most_f: tuple[int, ...]
    most_b: tuple[int, ...]
    most_w: tuple[int, ...]
    tolerance: tuple[float, ...]
    tail: tuple[float, ...]

    def rules(self, problem: LaneProblem) -> LaneRules:
        """The rules of a problem's list schedule."""
        starts = problem.base.chain_starts(self.stretch)
        rank, p = starts, problem.base.n_stages
        for stage, numbers in enumerate(problem.base.numbers):
            each = zip(numbers, self.turn, self.slope, strict=False)
            for q, turn, slope in each:
                rank[q] += problem.round * (turn + slope * stage / p)
        return LaneRules(
            rank=rank,
            cap=list(self.cap),
            most_f=list(self.most_f),
            most_b=list(self.most_b),
            most_w=list(self.most_w),
            tolerance=list(self.tolerance),
            tail=list(self.tail),
            go_on=self.go_on * problem.round,
            most=self.most,
        )


def plan_on_lanes(
    whole: Schedule, costs: Costs, base: PlacementProblem, *, effort: str
) -> Schedule:
    """Plan the parts of passes.

    Args:
        whole: a plan of the passes in one piece, under the same limit.
        costs: with parts.
        base: the same, with the limit to keep.
        effort: as that of `zbpp.schedules.plan_placement`.
    """
    problem = LaneProblem(base)
    kind, seconds = parse_effort(effort)
    plans = [*_laid_out(problem, costs, whole)]
    n_parts = _PARTS.get(kind, _PARTS["default"])
    rows = _search(problem, n_parts, seconds if kind == "best" else 0.0)
    if rows is not None:
        plans.append(problem.schedule(rows, whole.name))

    def span(schedule: Schedule) -> float:
        rows = schedule.rows_for(base.costs)
        held = peaks(rows, base.costs)
        if any(a > b for a, b in zip(held, base.limits, strict=True)):
            return math.inf
        m = base.n_microbatches
        return longest_span(replay(rows, base.costs, n_microbatches=m))

    return min(plans, key=span)


def _laid_out(
    problem: LaneProblem, costs: Costs, whole: Schedule
) -> Iterator[Schedule]:
    """Orders of whole passes on lanes; the first is the plan without overlap."""
    placement, m = problem.base.placement, problem.base.n_microbatches
    p = placement.n_stages
    yield whole
    yield lay_out(whole, costs)
    sizes = {"n_stages": p, "n_microbatches": m}
    if placement == Placement.wave(p):
        yield replace(lay_out(plan_dual_pipe_v(**sizes), costs), name=whole.name)
    if p > 1 and placement == Placement.interleaved(p, placement.n_chunks // p):
        chunks = placement.n_chunks // p
        combined = plan_combined_1f1b(**sizes, chunks_per_stage=chunks)
        yield replace(lay_out(combined, costs), name=whole.name)


def _search(problem: LaneProblem, n_parts: float, seconds: float) -> Rows | None:
    """The shortest rows of all rules that are tried; None: none comes to an end."""
    draws = random.Random(0)
    n_runs = min(_MOST, max(_LEAST, int(n_parts / problem.row_from[-1])))
    climbs: list[_Climb] = []
    best = math.inf
    for _ in range(max(_KEPT, int(_DRAWN * n_runs))):
        settings = _draw(problem, draws)
        span = list_span(problem, settings.rules(problem), below=_WORSE * best)
        best = min(best, span)
        if span < math.inf:
            climbs.append(_Climb(problem, draws, span, settings))
        if best <= problem.base.target:
            break
    if not climbs:
        return None
    n_steps = int((1 - _DRAWN) / 2 * n_runs)
    for n_kept in (_KEPT, _LAST):
        climbs = sorted(climbs, key=lambda climb: climb.span)[:n_kept]
        for climb in climbs:
            for _ in range(n_steps // n_kept):
                climb.step()
    best_climb = min(climbs, key=lambda climb: climb.span)
    longer = Budget(math.inf, seconds)
    while seconds and longer.is_left and best_climb.span > problem.base.target:
        best_climb.step()
    run = list_schedule(problem, best_climb.settings.rules(problem))
    assert run is not None
    return run[1]


@dataclass
class _Climb:
    """Settings that get better, and the span that they give."""

    problem: LaneProblem
    draws: random.Random
    span: float
    settings: _Settings

    def step(self) -> None:
        """Change settings; take the change if it is not worse."""
        if self.span <= self.problem.base.target:
            return
        changed = _change(self.settings, self.draws)
        rules = changed.rules(self.problem)
        span = list_span(self.problem, rules, below=self.span * (1 + 1e-12))
        if span <= self.span:
            self.span, self.settings = span, changed


def _draw(problem: LaneProblem, draws: random.Random) -> _Settings:
    """Draw settings, the same for all stages but for the caps."""
    p, m = problem.base.n_stages, problem.base.n_microbatches
    v = max(map(len, problem.base.numbers)) // 2
    share = draws.choice((0.5, 0.65, 0.75, 0.85, 0.95, 1.0, 1.2, 1.5))
    fall, more = draws.choice((0, 0.2, 0.3, 0.5, 0.8)), draws.choice((0, 0.5, 1))
    in_flight = [
        min(m, limit / held) if held > 0 else m
        for limit, held in zip(
            problem.costs.limit,
            micro_batch(problem.costs),
            strict=True,
        )
    ]
    cap = tuple(
        max(1, int(v * most * share * (1 - fall * stage / p) + more))
        for stage, most in enumerate(in_flight)
    )
    first, last = (0.0,) * (v - 1), (0.0,) * (v - 1)
    turn = draws.choice(
        (
            (0.0,) * (2 * v),
            (20.0, *first, *last, 0.0),
            (20.0, *first[:-1], -20.0, *last, 0.0) if v > 1 else (20.0, 0.0),
            (20.0, *first, *((-20.0,) * v)),
            (
                0.0,
                *first,
                *(draws.choice((-5.0, -1.0, 1.0, 3.0, 8.0)) for _ in range(v)),
            ),
        )
    )
    later = draws.choice((0.0, -12.0))
    return _Settings(
        turn=turn,
        slope=(*first, *last, 0.0, later),
        stretch=draws.choice((1.0, 1.0, 0.7, 1.3)),
        go_on=draws.choice((0.0, 0.5, 1.0, 20.0)),
        most=draws.choice((1, 2, 2, 2, 3, 4)),
        cap=cap,
        most_f=(draws.choice((1, 2, 2, 3)),) * p,
        most_b=(draws.choice((1, 2, 2)),) * p,
        most_w=(draws.choice((0, 1, 2, 3, 4, 6, 8, 99)),) * p,
        tolerance=(draws.choice((0.0, 0.5, 1.0)),) * p,
        tail=(draws.choice((0.0, 0.5, 1.0)),) * p,
    )


def _change(settings: _Settings, draws: random.Random) -> _Settings:
    """Change one to three settings, of a stage or of all from it on."""
    for _ in range(draws.choice((1, 1, 2, 3))):
        name = draws.choice(_NAMES)
        value = getattr(settings, name)
        changed: Any
        if not isinstance(value, tuple):
            changed = _other(name, value, draws)
        else:
            at = draws.randrange(len(value))
            one_pass = name in ("turn", "slope")
            end = at + 1 if one_pass else draws.choice((at + 1, at + 1, len(value)))
            new_value = _other(name, value[at], draws)
            by = new_value - value[at]
            moved = [
                max(1, x + by) if name == "cap" else x + by if one_pass else new_value
                for x in value[at:end]
            ]
            changed = (*value[:at], *moved, *value[end:])
        settings = replace(settings, **{name: changed})
    return settings


_NAMES = ("cap", "turn", "most_w", *(field.name for field in fields(_Settings)))


def _other(name: str, value: float, draws: random.Random) -> float:
    """Another value of a setting."""
    match name:
        case "cap":
            return value + draws.choice((-2, -1, 1, 2))
        case "most_w":
            return max(0, value + draws.choice((-2, -1, 1, 2, 99)))
        case "turn" | "slope":
            return value + draws.gauss(0.0, 2.0)
        case "stretch":
            return max(0.0, value + draws.gauss(0.0, 0.3))
        case "go_on":
            return draws.choice((0.0, 0.25, 0.5, 1.0, 2.0, 20.0))
        case "most":
            return draws.choice((1, 2, 2, 3, 4))
        case "most_f" | "most_b":
            return draws.choice((1, 1, 2, 2, 3))
    return draws.choice((0.0, 0.25, 0.5, 0.75, 1.0))  # tolerance, tail
