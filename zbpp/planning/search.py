"""Plans of modes for costs of chunks; `auto` is the best of many of them.

`auto` plans each placement under as much memory as it may have. Where several orders
take the same time, one that holds less may be had, and hand-made orders are no worse
than themselves. So every mode is planned too, under the memory that it promises,
unless its lower bound shows that it is slower.

======================  =============  =======================================
placement               memory, M_B    tried where lists of costs have
======================  =============  =======================================
one chunk a stage       2p, or limit   p entries, or there are no lists
wave (V)                p, or limit    kp entries; with no lists: k = 2
interleaved             2p, or limit   the same
======================  =============  =======================================
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import pairwise, product

from zbpp.core import (
    Costs,
    LimitError,
    Parts,
    PassKind,
    Placement,
    RequestError,
    Schedule,
    format_memory,
    lower_bound_on,
    passes_in,
    peaks,
)
from zbpp.planning.answer import Plan, Rejected
from zbpp.planning.modes import AUTO, JOINT_WORDS, MODES, Mode
from zbpp.planning.request import PlanRequest, count_chunks
from zbpp.schedules import lay_out, plan_placement
from zbpp.schedules.planner.figures import ROUNDING
from zbpp.schedules.planner.limits import capped, check_limits, check_sizes

__all__ = [
    "Candidate",
    "Problem",
    "best_of",
    "choice_text",
    "placements",
    "searched_name",
    "within_limit",
]

_EVERY = tuple(mode for mode in MODES.values() if mode.name != AUTO)
_IN_TURN = sorted(_EVERY, key=lambda mode: mode.order is not None)
"""Searches first: hand-made orders that their bounds rule out are not made."""


@dataclass(frozen=True)
class Candidate:
    """A plan that may be the best, and a lower bound of its time."""

    name: str
    plan: Callable[[], Plan]
    bound: Callable[[], float] = lambda: 0.0


def best_of(candidates: Iterable[Candidate], *, trust: float = 0.0) -> Plan:
    """Plan what can be the best; return the best plan, and why the others lost.

    Args:
        candidates: in the order in which they are planned; of equal plans the first
            one wins.
        trust: share of the time to which predictions are trusted: of plans that are
            as near to the shortest one, those with the fewest messages win.
    """
    best: Plan | None = None
    entries: list[tuple[str, Plan | str]] = []
    errors: list[RequestError] = []
    for candidate in candidates:
        entry: Plan | str
        try:
            bound = candidate.bound()
            if best is not None and bound > best.time * (1 + trust + ROUNDING):
                entry = f"{bound / best.time - 1:+.1%} at least"
            else:
                entry = candidate.plan()
                if best is None or entry.is_better_than(best):
                    best = entry
        except RequestError as error:
            errors.append(error)
            entry = str(error).partition(";")[0].partition("\n")[0]
        entries.append((candidate.name, entry))
    if best is None:
        limits = [error for error in errors if isinstance(error, LimitError)]
        raise min(limits, key=lambda error: error.smallest) if limits else errors[0]
    if trust:
        plans = [entry for _, entry in entries if isinstance(entry, Plan)]
        near = [plan for plan in plans if plan.time <= best.time * (1 + trust)]
        fewest = min(map(_n_messages, near))
        few = [plan for plan in near if _n_messages(plan) == fewest]
        best = reduce(lambda a, b: b if b.is_better_than(a) else a, few)
    winner = next(name for name, entry in entries if entry is best)
    rejected = [
        Rejected(name, entry)
        if isinstance(entry, str)
        else Rejected(name, _difference(best, entry), is_planned=True)
        for name, entry in entries
        if name != winner
    ]
    return replace(best, mode=winner, rejected=tuple(rejected))


def _n_messages(plan: Plan) -> int:
    """Edges between chunks that cross stages, for each micro-batch and direction."""
    return sum(a != b for a, b in pairwise(plan.schedule.placement.stage_of))


def _difference(best: Plan, lost: Plan) -> str:
    """Describe how much more than the best plan another one takes."""
    if abs(lost.time - best.time) > best.time * ROUNDING:
        more = " with more messages" if lost.time < best.time else ""
        return f"{lost.time / best.time - 1:+.1%}{more}"
    if lost.barrier_step > best.barrier_step * (1 + ROUNDING):
        return f"{lost.barrier_step / best.barrier_step - 1:+.1%} (O)"
    return f"as fast with {format_memory(lost.peak)}"


def choice_text(plan: Plan) -> str:
    """Describe in one line what auto has chosen, and why others lost."""
    split = plan.split or ()
    chosen = plan.mode
    if split:
        chosen += f", layers {'-'.join(map(str, split))}"
    if plan.recompute:
        chosen += f", {len(plan.recompute)} of {sum(split)} layers recomputed"
    memory = format_memory(plan.peak)
    return (
        f"auto: {chosen}; predicted step {plan.step:.4g}, memory {memory}; "
        f"{', '.join(map(str, plan.rejected))}"
    )


@dataclass(frozen=True)
class Problem:
    """The parts of a request that all its plans share.

    Args:
        n_microbatches: in a step.
        costs: of the chunks.
        effort: of each search.
    """

    n_microbatches: int
    costs: Costs
    effort: str

    def plan(self, mode: Mode | None, placement: Placement) -> Schedule:
        """Plan a mode on one of its placements; None: any under all its memory."""
        if mode is not None and mode.order is not None:
            schedule = mode.order_on(placement, self.n_microbatches)
            if mode.pairs and self.costs.parts is not None:
                schedule = lay_out(schedule, self.costs)
            return within_limit(schedule, self.costs)
        most = mode.memory(placement.n_stages) if mode else _allowance(placement)
        assert most is not None, mode
        return plan_placement(
            placement=placement,
            n_microbatches=self.n_microbatches,
            costs=self.costs,
            effort=self.effort,
            name=mode.name if mode else AUTO,
            memory_cap=most if mode and mode.promise else math.inf,
            default_limit=most,
        )

    def auto(self, placements: Sequence[Placement]) -> Plan:
        """The best of all modes on these placements."""
        best = best_of(self._candidates(placements))
        limited = None if self.costs.memory_limit is None else self.costs
        name = f"{AUTO}: {best.mode}"
        return replace(best, schedule=replace(best.schedule, name=name, costs=limited))

    def _candidates(self, placements: Sequence[Placement]) -> Iterator[Candidate]:
        """Every placement under all its memory, then every mode under its limit.

        A search that has been planned for another name is left out.
        """
        costs = self.costs
        searched: set[object] = set()
        for mode, placement in product((None, *_IN_TURN), placements):
            if mode is None:
                name, most = searched_name(placement), math.inf
            else:
                name = mode.name
                most = mode.memory(placement.n_stages) or math.inf
                in_vain = mode.pairs and costs.fb is None and costs.parts is None
                if in_vain or not _has(mode, placement):
                    continue
            limited, bound = self, partial(float, 0)
            with suppress(RequestError):  # the plan raises it again
                allowance = _allowance(placement)
                times = capped(
                    costs.on(placement), memory_cap=most, default_limit=allowance
                )
                if mode is None or mode.order is None:
                    if (placement, times.limit) in searched:
                        continue
                    searched.add((placement, times.limit))
                if mode is not None:
                    limit = times.limit
                    limited = replace(self, costs=replace(costs, memory_limit=limit))
                m = self.n_microbatches
                bound = partial(lower_bound_on, times.without_pairs(), m)
            yield Candidate(
                name, partial(limited._as_plan, mode, placement, self), bound
            )

    def _as_plan(self, mode: Mode | None, placement: Placement, of: "Problem") -> Plan:
        """Plan under these limits, for the costs of another problem."""
        return Plan(self.plan(mode, placement), of.costs, AUTO)


def placements(mode: Mode, request: PlanRequest) -> list[Placement]:
    """Placements that a mode is planned on; auto has several, of few chunks first."""
    n_stages, n_microbatches = request.sizes(mode.name)
    chunks = count_chunks(mode, request)
    if mode.place is not None:
        check_sizes(n_stages, n_microbatches, chunks or 2)
        return [mode.place(n_stages, chunks or 2)]
    check_sizes(n_stages, n_microbatches, chunks or 1)
    if request.placement is not None:
        return [request.placement]
    deal = [chunks] if chunks else [2, *_more_chunks(request)]
    options = [Placement.single(n_stages)] if chunks in (None, 1) else []
    if chunks != 1:
        for n in deal:
            options.append(Placement.wave(n_stages, n))
            options.append(Placement.interleaved(n_stages, n))
    return options


def _more_chunks(request: PlanRequest) -> list[int]:
    """Chunks a stage that are tried beyond 2: 4, where costs tell parts of layers.

    Layers that exchange data in between take long on their way through the model, and
    smaller chunks let more of them overlap.
    """
    costs = request.costs
    parts = costs.parts if isinstance(costs, Costs) else None
    return [4] if isinstance(parts, Parts) and parts.layers % 4 == 0 else []


def searched_name(placement: Placement) -> str:
    """Name the search of a placement under all its memory."""
    if placement.n_chunks == placement.n_stages:
        return "ZB"
    return "ZBV" if placement.stage_of[-1] == 0 else "interleaved ZB"


def _allowance(placement: Placement) -> int:
    """Memory of a stage in M_B that a placement may have without a limit."""
    n_stages = placement.n_stages
    chunks = placement.n_chunks // n_stages
    is_wave = chunks > 1 and placement == Placement.wave(n_stages, chunks)
    return n_stages if is_wave else 2 * n_stages


def _has(mode: Mode, placement: Placement) -> bool:
    """True if a mode plans a placement."""
    chunks = placement.n_chunks // placement.n_stages
    if mode.place is None or mode.chunks not in (None, chunks):
        return False
    if mode.order is not None and mode.chunks is None and chunks == 1:
        return False  # VPP of one chunk a stage is 1F1B
    return mode.place(placement.n_stages, chunks) == placement


def within_limit(schedule: Schedule, costs: Costs) -> Schedule:
    """Return a schedule that keeps the memory limit."""
    on_chunks = costs.on(schedule.placement)
    for stage, order in enumerate(schedule.orders):
        for job in () if on_chunks.splits[stage] else order:
            kinds = {part.kind for part in passes_in(job)}
            if not kinds.isdisjoint((PassKind.B, PassKind.W)):
                raise RequestError(
                    f"{schedule.name} runs {job}, but stage {stage} cannot split its "
                    f"backward (splits[{stage}] of the costs is false, or w has no "
                    f"parts); plan again with these costs, or choose {JOINT_WORDS}"
                )
    if costs.memory_limit is None:
        return schedule
    needs = peaks(schedule.rows_for(on_chunks), on_chunks)
    check_limits(schedule.name, needs, on_chunks, schedule.n_microbatches)
    return replace(schedule, costs=costs)
