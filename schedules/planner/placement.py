"""Plan any placement: its passes, or their parts where the costs tell them."""

import math
from dataclasses import replace

from zbpp.core import Costs, Placement, Schedule
from zbpp.schedules.planner.lanes.plan import plan_on_lanes
from zbpp.schedules.planner.limits import capped
from zbpp.schedules.planner.search.plan import plan_passes

__all__ = ["plan_placement"]

_UNIT = Costs()


def plan_placement(
    *,
    placement: Placement,
    n_microbatches: int,
    costs: Costs = _UNIT,
    effort: str = "default",
    name: str = "planned",
    memory_cap: float = math.inf,
    default_limit: float = math.inf,
) -> Schedule:
    """Plan any placement under the memory limit; without one, memory is no constraint.

    Args:
        placement: chunk to stage: a wave, interleaved, or any other.
        n_microbatches: micro-batches in a step, at least 1.
        costs: times and memories of chunks; every limit must hold one micro-batch.
        effort: ``fast``, ``default``, ``best`` or ``best:SECONDS``.
        name: the mode, for people.
        memory_cap: a further limit on every stage, in M_B of that stage.
        default_limit: the same, only where ``costs`` have no limit.

    Raises:
        LimitError: a limit holds no micro-batch; it names the smallest that works.
        RequestError: a number is invalid.
    """
    passes = plan_passes(
        placement=placement,
        n_microbatches=n_microbatches,
        costs=costs if costs.parts is None else replace(costs, parts=None),
        effort=effort if costs.parts is None else "fast",
        name=name,
        memory_cap=memory_cap,
        default_limit=default_limit,
    )
    if costs.parts is None:
        return passes
    limited = capped(
        costs, placement, memory_cap=memory_cap, default_limit=default_limit
    )
    whole = replace(passes, costs=None)
    planned = plan_on_lanes(whole, limited, effort=effort)
    return replace(planned, costs=None if costs.limit is None else costs)
