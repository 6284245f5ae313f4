"""Run all orders against a clock: the simulator's engine and the deadlock check."""

from collections.abc import Sequence

from zbpp.core.clock import Clock
from zbpp.core.costs import PassTimes
from zbpp.core.jobs import Job
from zbpp.core.timeline import Slot

__all__ = ["replay"]


def replay(
    orders: Sequence[Sequence[Job]],
    times: PassTimes,
    *,
    n_microbatches: int,
    free: Sequence[float] | None = None,
    known: Sequence[float] | None = None,
) -> list[list[Slot]]:
    """Time every job that can run; a row shorter than its order is stuck there.

    ``free`` and ``known`` say what an earlier iteration has left (see `Clock`).

    Every stage runs as far as it can, round after round, until none moves. The order
    of these visits does not matter: a start depends only on the inputs' ends.
    """
    clock = Clock(times, n_microbatches=n_microbatches, free=free, known=known)
    rows: list[list[Slot]] = [[] for _ in orders]
    moved = True
    while moved:
        moved = False
        for order, row in zip(orders, rows, strict=True):
            while len(row) < len(order):
                slot = clock.run(order[len(row)])
                if slot is None:
                    break
                row.append(slot)
                moved = True
    return rows
