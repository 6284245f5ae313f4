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
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zbpp.core import (
    Costs,
    Parts,
    PassKind,
    Placement,
    RequestError,
    Schedule,
    lower_bound_on,
    passes_in,
    peaks,
)
from zbpp.planning.answer import Plan
from zbpp.planning.modes import AUTO, JOINT_WORDS, MODES, Mode
from zbpp.planning.request import PlanRequest, count_chunks
from zbpp.schedules import lay_out, plan_placement
from zbpp.schedules.planner.figures import Contest
from zbpp.schedules.planner.limits import capped, check_limits, check_sizes

__all__ = ["Problem", "placements", "searched_name", "within_limit"]

_EVERY = tuple(mode for mode in MODES.values() if mode.name != AUTO)
_IN_TURN = sorted(_EVERY, key=lambda mode: mode.order is not None)
"""Searches first: hand-made orders that their bounds rule out are not made."""


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

    @property
    def limited(self) -> Costs | None:
        """The costs, if they have a limit that a schedule shall keep."""
        return None if self.costs.memory_limit is None else self.costs

    def plan(self, mode: Mode | None, placement: Placement) -> Schedule:
        """Plan a mode on one of its placements; None: any under all its memory.

        Raises:
            LimitError: nothing fits; it names the smallest limit that works.
            RequestError: the costs do not fit the placement, or there are too many
                jobs.
        """
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

    def contest(self, placements: Sequence[Placement]) -> Contest[Plan]:
        """Plan every placement, and on each every mode, that can be the best."""
        contest: Contest[Plan] = Contest()
        searched: set[object] = set()
        for placement in placements:
            self._enter(contest, None, placement, searched)
        if contest.best is not None:
            for mode in _IN_TURN:
                if mode.pairs and self.costs.fb is None and self.costs.parts is None:
                    continue
                for placement in placements:
                    if _has(mode, placement):
                        self._enter(contest, mode, placement, searched)
        return contest

    def _enter(
        self,
        contest: Contest[Plan],
        mode: Mode | None,
        placement: Placement,
        searched: set[object],
    ) -> None:
        """Plan a mode, or a placement under all its memory, unless that is in vain.

        ``searched`` holds the searches so far: another mode may name the same one.
        """
        name = searched_name(placement) if mode is None else mode.name
        with contest.attempt(name):
            promised = None if mode is None else mode.memory(placement.n_stages)
            held = capped(
                self.costs.on(placement),
                memory_cap=math.inf if promised is None else promised,
                default_limit=_allowance(placement),
            )
            if mode is None or mode.order is None:
                if (placement, held.limit) in searched:
                    return
                searched.add((placement, held.limit))
            bound = lower_bound_on(held.without_pairs(), self.n_microbatches)
            if contest.best is not None and contest.is_out(bound):
                least, best = f"{bound:.4g}", contest.best
                reason = f"its span is at least {least}, that of {best.mode} is "
                contest.reject(name, f"{reason}{best.span:.4g}")
                return
            problem = self
            if mode is not None:
                problem = replace(
                    self, costs=replace(self.costs, memory_limit=held.limit)
                )
            schedule = problem.plan(mode, placement)
            contest.offer(name, Plan(schedule, self.costs, name))


def placements(mode: Mode, request: PlanRequest) -> list[Placement]:
    """Placements that a mode is planned on; auto has several, of few chunks first.

    Raises:
        RequestError: a size is missing, below 1 or too large, or the mode cannot have
            the number of chunks.
    """
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
    """Return a schedule that keeps the memory limit.

    Raises:
        LimitError: it needs more memory.
        RequestError: the costs do not fit the placement, or a backward is split that
            cannot be.
    """
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
