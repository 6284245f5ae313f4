"""The best plan over the placements, for the given times and memory."""

from zbpp.core import Costs, MemoryModel, Pass, RequestError, Schedule, replay
from zbpp.schedules.v_modes import plan_zbvpp
from zbpp.schedules.zb import plan_zb

__all__ = ["plan_auto"]

_UNIT = Costs()
_NO_LIMIT = MemoryModel()


def plan_auto(
    *,
    n_stages: int,
    n_microbatches: int,
    costs: Costs = _UNIT,
    memory: MemoryModel = _NO_LIMIT,
    effort: str = "default",
) -> Schedule:
    """Plan one chunk a stage and the V; keep the plan with the smaller largest span.

    Without a limit each plans under the memory of its mode: 2p and p M_B. Costs and
    memories given as lists say by their length which of the two is meant.

    Raises:
        RequestError: neither can be planned; the error is that of one chunk a stage.
    """
    plans: list[Schedule] = []
    errors: list[RequestError] = []
    for planner in (plan_zb, plan_zbvpp):
        try:
            schedule = planner(
                n_stages=n_stages,
                n_microbatches=n_microbatches,
                costs=costs,
                memory=memory,
                effort=effort,
            )
        except RequestError as error:
            errors.append(error)
        else:
            plans.append(schedule)
    if not plans:
        raise errors[0]
    best = min(plans, key=lambda schedule: _span(schedule, costs))
    return Schedule(
        "auto", best.placement, best.n_microbatches, best.orders, best.memory
    )


def _span(schedule: Schedule, costs: Costs) -> float:
    """Time from first to last pass on the stage where it is longest."""
    rows = replay(
        schedule.orders,
        costs.on(schedule.placement),
        n_microbatches=schedule.n_microbatches,
    )
    passes = [[slot for slot in row if isinstance(slot.job, Pass)] for row in rows]
    return max(row[-1].end - row[0].start for row in passes)
