"""Plans where sends occupy the stage, held against plans that take them for delays.

A pass and its send are one job to every planner (`zbpp.core.costs.times`), so it needs
nothing of its own. But planners search, and may find a better order for times that are
a little different: the order for sends that occupy nothing is offered too, timed as
they are. So no plan is longer than that order.
"""

from collections.abc import Callable
from dataclasses import replace

from zbpp.core import Costs, Schedule, longest_span, replay
from zbpp.schedules.planner.budget import shares

__all__ = ["also_as_delays"]


def also_as_delays(
    plan: Callable[[Costs, str], Schedule], costs: Costs, effort: str
) -> Schedule:
    """Plan, and once more as if no send occupied a stage; return the shorter one.

    Args:
        plan: from costs and effort, which both plans share, to a schedule.
        costs: without sends that occupy, there is one plan.
        effort: see `zbpp.schedules.planner.budget`.

    Raises:
        RequestError: as ``plan``.
    """
    sending = costs.send_occupies
    if not (any(sending) if isinstance(sending, tuple) else sending):
        return plan(costs, effort)
    efforts = shares(effort, 2)
    best = plan(costs, next(efforts))
    other = plan(replace(costs, send_occupies=0.0), next(efforts))
    times = costs.on(best.placement)

    def span(schedule: Schedule) -> float:
        m = schedule.n_microbatches
        return longest_span(replay(schedule.orders, times, n_microbatches=m))

    return min(best, other, key=span)
