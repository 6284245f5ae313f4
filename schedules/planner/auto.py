"""The best plan over the placements, for the given times and memory.

======================  =============  =================================
placement               memory, M_B    tried where lists of costs have
======================  =============  =================================
one chunk a stage       2p, or limit   p entries, or there are no lists
wave (V)                p, or limit    kp entries, or no lists: k = 2
interleaved             2p, or limit   the same
======================  =============  =================================
"""

from collections.abc import Iterator

from zbpp.core import (
    Costs,
    LimitError,
    MemoryModel,
    Placement,
    RequestError,
    Schedule,
    longest_span,
    lower_bound,
    replay,
)
from zbpp.schedules.planner.limits import capped
from zbpp.schedules.planner.multi.plan import plan_placement
from zbpp.schedules.planner.request import check_sizes, listed_chunks
from zbpp.schedules.planner.single_modes import plan_zb

__all__ = ["plan_auto"]

_UNIT = Costs()
_NO_LIMIT = MemoryModel()
_ROUNDING = 1e-9  # relative


def plan_auto(
    *,
    n_stages: int,
    n_microbatches: int,
    costs: Costs = _UNIT,
    memory: MemoryModel = _NO_LIMIT,
    effort: str = "default",
    chunks_per_stage: int | None = None,
) -> Schedule:
    """Plan every placement; keep the first plan with the smallest largest span.

    A placement is skipped if it cannot be had (its costs, its links or its limit), or
    if its lower bound is not below the best span so far.

    Args:
        n_stages: stages, at least 1.
        n_microbatches: micro-batches in a step, at least 1.
        costs: lists say by their length how many chunks a stage are meant.
        memory: likewise; without a limit each placement has its own, see above.
        effort: see `zbpp.schedules.planner.budget`; it is spent on each placement.
        chunks_per_stage: try placements of this number only.

    Raises:
        LimitError: no placement fits; it names the smallest limit that works.
        RequestError: no placement can be planned; the error is that of the first.
    """
    check_sizes(n_stages, n_microbatches, chunks_per_stage or 1)
    chunks = chunks_per_stage or listed_chunks(costs, memory, n_stages)
    best: Schedule | None = None
    shortest = float("inf")
    errors: list[RequestError] = []
    for placement, default_limit in _placements(n_stages, chunks):
        try:
            limited = capped(memory, placement, default_limit=default_limit)
            bound = lower_bound(placement, n_microbatches, costs, limited)
            if bound >= shortest * (1 - _ROUNDING):
                continue
            plan = _plan(
                placement, n_microbatches, costs, memory, effort, default_limit
            )
        except RequestError as error:
            errors.append(error)
            continue
        times = costs.on(placement)
        span = longest_span(replay(plan.orders, times, n_microbatches=n_microbatches))
        if best is None or span < shortest * (1 - _ROUNDING):
            best, shortest = plan, span
    if best is None:
        limits = [error for error in errors if isinstance(error, LimitError)]
        raise min(limits, key=lambda error: error.smallest) if limits else errors[0]
    return best


def _placements(n_stages: int, chunks: int | None) -> Iterator[tuple[Placement, float]]:
    """Placements to try, and the memory of each in M_B; fewer chunks first."""
    if chunks in (None, 1):
        yield Placement.single(n_stages), 2 * n_stages
    if chunks != 1:
        yield Placement.wave(n_stages, chunks or 2), n_stages
        yield Placement.interleaved(n_stages, chunks or 2), 2 * n_stages


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
