"""Time of a step among many: the period of the iterations.

What an iteration leaves to the next is, for each stage, when it is free and when its V
knows the sum. If all of these are later by the same time than some iterations ago, the
stages lead and lag as they did then; all starts are sums and maxima of earlier ends, so
from then on everything repeats, that much later. The period is that time for one
iteration. Every stage waits for every other one between two iterations (in its O or
in its V), so there is one period, wherever the stages begin (F. Baccelli et al.,
"Synchronization and Linearity", 1992, chapter 3).
"""

from zbpp.core import Costs, RequestError, Schedule
from zbpp.simulator.engine import IteratedSchedule, IterationState

__all__ = [
    "expected_step_time",
    "rollback_time",
    "steady_step_time",
    "with_rollback",
]

_UNIT = Costs()
_SAME = 1e-9  # of a step time
_PATIENCE = 6  # iterations before a leap
_LEAPS = 50


def steady_step_time(schedule: Schedule, costs: Costs = _UNIT) -> float:
    """Time of an iteration among many, optimizer included, in the unit of the costs.

    With V's in the schedule O waits for nobody; without, it stands behind a barrier
    (see `simulate_iterations`).

    Raises:
        RequestError: the costs do not fit the placement.
    """
    return _settle(IteratedSchedule(schedule, costs))[0]


def rollback_time(schedule: Schedule, costs: Costs = _UNIT) -> float:
    """Time by which one failed validation delays all that follows.

    Every stage steps again and replays its passes before V; stages that had to wait
    anyway may lose less than that.

    Raises:
        RequestError: there is no V, or the costs do not fit the placement.
    """
    return with_rollback(schedule, costs)[1]


def with_rollback(schedule: Schedule, costs: Costs = _UNIT) -> tuple[float, float]:
    """`steady_step_time` and `rollback_time`, from one search for what repeats.

    Raises:
        RequestError: as `rollback_time`.
    """
    run = IteratedSchedule(schedule, costs)
    if not run.has_checks:
        raise RequestError(f"{schedule.name} has no V that could fail; place V's first")
    period, state = _settle(run)
    late = run.iterate(state, rolled_back=True)[1]
    state = run.iterate(state)[1]
    for _ in range(_PATIENCE):  # lateness spreads, and slack takes some of it away
        if _repeats(late, state):
            break
        late, state = run.iterate(late)[1], run.iterate(state)[1]
    return period, max(_lateness(late, state))


def expected_step_time(
    schedule: Schedule, costs: Costs = _UNIT, *, failure_rate: float
) -> float:
    """Mean time of an iteration if a share of the validations fails, one by one.

    Raises:
        RequestError: the rate is none, there is no V, or the costs do not fit.
    """
    if not 0.0 <= failure_rate <= 1.0:
        raise RequestError(f"failure_rate is {failure_rate}; it must be from 0 to 1")
    period, lost = with_rollback(schedule, costs)
    return period + failure_rate * lost


def _settle(run: IteratedSchedule) -> tuple[float, IterationState]:
    """Iterate until everything repeats; the period, and a state that repeats."""
    seen = [run.start]
    for _ in range(_LEAPS):
        while len(seen) <= _PATIENCE:
            state = run.iterate(seen[-1])[1]
            for back, earlier in enumerate(reversed(seen), start=1):
                if _repeats(state, earlier):
                    return (max(state.free) - max(earlier.free)) / back, state
            seen.append(state)
        seen = [_leap(seen[0], seen[-1])]
    raise RequestError(
        f"no period is found within {_LEAPS * _PATIENCE} iterations, so there is no "
        "time of a step among many; round the costs, or leave the tiniest ones out"
    )


def _repeats(state: IterationState, earlier: IterationState) -> bool:
    lateness = _lateness(state, earlier)
    return max(lateness) - min(lateness) <= _SAME * max(lateness)


def _leap(earlier: IterationState, state: IterationState) -> IterationState:
    """Let stages that slowly fall behind be far behind at once.

    A stage that is a little faster than the slowest one gains on it for many
    iterations until it must wait. Where all begin changes nothing in the end.
    """
    lateness = _lateness(state, earlier)
    slowest, spread = max(lateness), max(lateness) - min(lateness)
    moved = [
        time - 10 * slowest * (slowest - late) / spread
        for time, late in zip((*state.free, *state.known), lateness, strict=True)
    ]
    n_stages, origin = len(state.free), min(moved)
    shifted = tuple(time - origin for time in moved)
    return IterationState(shifted[:n_stages], shifted[n_stages:])


def _lateness(state: IterationState, earlier: IterationState) -> list[float]:
    pairs = zip(
        (*state.free, *state.known), (*earlier.free, *earlier.known), strict=True
    )
    return [after - before for after, before in pairs]
