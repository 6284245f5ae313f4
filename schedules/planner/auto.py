"""The best plan over the placements, for the given times and memory.

======================  =============  =======================================
placement               memory, M_B    tried where lists of costs have
======================  =============  =======================================
one chunk a stage       2p, or limit   p entries, or there are no lists
wave (V)                p, or limit    kp entries; with p or no lists: k = 2
interleaved             2p, or limit   the same
======================  =============  =======================================

A list of p entries is per stage (see `zbpp.core.costs`): it fits all placements, and
they compete. The best plan has

1. the shortest span, the time of a step where steps are post-validated;
2. of those, the shortest step behind a barrier, which waits for the last stage;
3. of those, the smallest peak memory.

    p = 8, m = 16, F = B = W = 1    span   behind a barrier   memory, M_B
    one chunk a stage               48     55                 15
    V                               48     51.5               8              taken
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Unpack

from zbpp.core import (
    Costs,
    LimitError,
    MemoryModel,
    Placement,
    RequestError,
    Schedule,
    longest_span,
    lower_bound,
)
from zbpp.schedules.planner.figures import ROUNDING, PlanFigures
from zbpp.schedules.planner.limits import capped
from zbpp.schedules.planner.request import (
    Request,
    check_sizes,
    listed_chunks,
    models,
)
from zbpp.schedules.planner.search.plan import plan_placement
from zbpp.schedules.planner.single_modes import plan_zb

__all__ = ["Candidate", "placements", "plan_auto", "plan_one"]

_UNIT = Costs()
_NO_LIMIT = MemoryModel()


@dataclass(frozen=True)
class Candidate(PlanFigures):
    """A plan, and the figures that are compared, each only when it is asked for."""

    plan: Schedule
    costs: Costs
    memory: MemoryModel
    names = "span", "barrier_step", "peak"

    @cached_property
    def span(self) -> float:
        """Largest span of a stage."""
        return longest_span(self.rows)


def plan_auto(
    *,
    n_stages: int,
    n_microbatches: int,
    costs: Costs = _UNIT,
    memory: MemoryModel = _NO_LIMIT,
    effort: str = "default",
    chunks_per_stage: int | None = None,
) -> Schedule:
    """Plan every placement; keep the best plan, of equal ones the first.

    A placement is skipped if it cannot be had (its costs, its links or its limit), or
    if its lower bound is above the best span so far.

    Args:
        n_stages: stages, at least 1.
        n_microbatches: micro-batches in a step, at least 1.
        costs: lists of more than p entries say how many chunks a stage are meant.
        memory: likewise; without a limit each placement has its own, see above.
        effort: see `zbpp.schedules.planner.budget`; it is spent on each placement.
        chunks_per_stage: try placements of this number only.

    Raises:
        LimitError: no placement fits; it names the smallest limit that works.
        RequestError: no placement can be planned; the error is that of the first.
    """
    check_sizes(n_stages, n_microbatches, chunks_per_stage or 1)
    chunks = chunks_per_stage or listed_chunks(costs, memory, n_stages)
    best: Candidate | None = None
    errors: list[RequestError] = []
    for placement, default_limit in placements(n_stages, chunks):
        try:
            splits = costs.on(placement).splits
            limited = capped(
                memory, placement, splits=splits, default_limit=default_limit
            )
            bound = lower_bound(placement, n_microbatches, costs, limited)
            if best is not None and bound > best.span * (1 + ROUNDING):
                continue
            plan = _plan(
                placement, n_microbatches, costs, memory, effort, default_limit
            )
        except RequestError as error:
            errors.append(error)
            continue
        found = Candidate(plan, costs, memory)
        if best is None or found.is_better_than(best):
            best = found
    if best is None:
        limits = [error for error in errors if isinstance(error, LimitError)]
        raise min(limits, key=lambda error: error.smallest) if limits else errors[0]
    return best.plan


def placements(n_stages: int, chunks: int | None) -> Iterator[tuple[Placement, float]]:
    """Placements to try, and the memory of each in M_B; fewer chunks first."""
    if chunks in (None, 1):
        yield Placement.single(n_stages), 2 * n_stages
    if chunks != 1:
        yield Placement.wave(n_stages, chunks or 2), n_stages
        yield Placement.interleaved(n_stages, chunks or 2), 2 * n_stages


def plan_one(placement: Placement, **request: Unpack[Request]) -> Schedule:
    """Plan one placement under the limit; without one, under the table's memory.

    Raises:
        LimitError: nothing fits; it names the smallest limit that works.
        RequestError: the costs do not fit the placement.
    """
    n_stages = placement.n_stages
    each = placement.n_chunks // n_stages
    is_wave = each > 1 and placement == Placement.wave(n_stages, each)
    default_limit = n_stages if is_wave else 2 * n_stages
    return _plan(
        placement,
        request["n_microbatches"],
        *models(request),
        request.get("effort", "default"),
        default_limit,
    )


def _plan(
    placement: Placement,
    n_microbatches: int,
    costs: Costs,
    memory: MemoryModel,
    effort: str,
    default_limit: float,
) -> Schedule:
    if placement.n_chunks == placement.n_stages:
        return plan_zb(
            n_stages=placement.n_stages,
            n_microbatches=n_microbatches,
            costs=costs,
            memory=memory,
            effort=effort,
            name="auto",
        )
    return plan_placement(
        placement=placement,
        n_microbatches=n_microbatches,
        costs=costs,
        memory=memory,
        effort=effort,
        name="auto",
        default_limit=default_limit,
    )
