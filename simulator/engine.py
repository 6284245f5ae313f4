"""From an order of jobs to times: a thin layer over the clock of `zbpp.core`."""

from zbpp.core import Check, Costs, Schedule, Timeline, replay
from zbpp.simulator.iterations import simulate_iterations, timeline_of

__all__ = ["simulate"]

_UNIT = Costs()


def simulate(schedule: Schedule, costs: Costs = _UNIT) -> Timeline:
    """Time every job of a schedule; the first one starts at 0, in the unit of costs.

    A job starts as soon as its stage is free and its inputs have arrived; nothing
    is reordered. O waits for the last weight gradient of every stage, but the time of
    the sum over the stages is counted between iterations only. In a schedule with V's
    this is the first iteration: O and V wait for nobody. UNSHARD and REDUCE_GRAD go on
    beside the jobs of their stage, one after the other. A pass whose message occupies
    its stage (`Costs.send_occupies`) ends with that time, see `Timeline.sending`.
    The result has the same type as a measured run.

    >>> from zbpp.core import Pass, PassKind, Placement
    >>> row = (Pass(PassKind.F, 0, 0), Pass(PassKind.BW, 0, 0))
    >>> timeline = simulate(Schedule("tiny", Placement.single(1), 1, (row,)))
    >>> [(slot.start, slot.end) for slot in timeline.rows[0]]
    [(0.0, 1.0), (1.0, 3.0)]

    Raises:
        RequestError: the costs do not fit the placement.
    """
    if any(isinstance(job, Check) for job in schedule.orders[0]):
        return simulate_iterations(schedule, costs, 1)[0]
    times = costs.on(schedule.placement)
    rows = replay(schedule.orders, times, n_microbatches=schedule.n_microbatches)
    return timeline_of(schedule, rows, times)
