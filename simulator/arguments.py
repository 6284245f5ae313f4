"""First arguments: a Plan where a Schedule is asked for; others are refused."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from zbpp.core import Costs, RequestError, Schedule, Timeline, a_kind

P = ParamSpec("P")
R = TypeVar("R")


class Planned(Protocol):
    """A plan: a schedule, and the costs that it was made for."""

    @property
    def schedule(self) -> Schedule:
        """The orders of all stages."""

    @property
    def costs(self) -> Costs:
        """Of the chunks."""


def takes_plans(
    function: Callable[Concatenate[Schedule, P], R],
) -> Callable[Concatenate[Schedule | Planned, P], R]:
    """Let a function of a schedule and costs take a plan, which has both."""

    @wraps(function)
    def taking(schedule: Any, *args: Any, **more: Any) -> R:
        if not isinstance(schedule, Schedule):
            if not isinstance(getattr(schedule, "schedule", None), Schedule):
                raise RequestError(
                    f"{function.__name__} takes a Schedule or a Plan, not "
                    f"{a_kind(schedule)}; zbpp.plan(mode, n_stages=.., "
                    "n_microbatches=..) returns a Schedule"
                )
            if not args:
                more.setdefault("costs", schedule.costs)
            schedule = schedule.schedule
        return function(schedule, *args, **more)

    return cast(Callable[Concatenate[Schedule | Planned, P], R], taking)


def takes_timelines(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function refuse what is neither a timeline nor a list of them."""

    @wraps(function)
    def taking(*args: P.args, **more: P.kwargs) -> R:
        first = args[0] if args else ()
        for entry in first if isinstance(first, list | tuple) else [first]:
            if not isinstance(entry, Timeline):
                raise RequestError(
                    f"{function.__name__} takes a Timeline, not {a_kind(entry)}; "
                    "zbpp.simulator.simulate(schedule, costs) returns one"
                )
        return function(*args, **more)

    return taking
