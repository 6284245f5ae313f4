"""When a stage posts its receives: early enough to lose no time, and still safe.

What receives on the host (gloo) stops no job. But a sender waits for word that the
receive is posted, and that word takes as long as the value that follows it:

    stage 0 |         F0 . . .         both take 3 jobs: a receive that is posted
                .--'     `-.           6 jobs before its reader, and some more in
    stage 1 | +F0 . . . . . . F0       case, holds up nobody

What receives on the device (NCCL) stops every job that waits for the whole device. So
all jobs of all stages are put in one order in which they can end, and a receive is
posted before the first job that ends after its sender. A job then waits for no other
than those that end before it, and none for itself:

    stage 0 | F0 F1 F2 ...             F2 of stage 0 ends while stage 1 is in BW0
    stage 1 | .. F0 +F2 BW0 F2 ...
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from zbpp.core import (
    Check,
    ChunkCosts,
    Collective,
    Costs,
    Job,
    JobGraph,
    Message,
    Segment,
    Step,
    TiedGradient,
    reader,
)

Orders: TypeAlias = Sequence[Sequence[Job | Segment]]


class Columns(NamedTuple):
    """When the columns of all orders run."""

    starts: list[list[float]]
    ends: list[list[float]]
    numbers: list[list[float]]
    """None runs before one with a smaller number, where times are the same."""


Posting: TypeAlias = Callable[[int, Message, int, tuple[int, int]], int]
"""The column of a stage's order before which it posts the receive of a message.

It depends on the stage, the message, the column that reads it, and the stage and the
column behind which it is sent.
"""


def in_time(
    orders: Orders, times: ChunkCosts, ahead: int, columns: Columns | None = None
) -> Posting:
    """Post receives some jobs before their readers, and two delays of their links.

    Collectives and further segments do not count as jobs. Where there are segments,
    it is known when the columns run.
    """
    places = [
        [c for c, job in enumerate(order) if not _goes_on(job)] for order in orders
    ]
    if not any(times.hops):
        columns = None
    elif columns is None:
        columns = _columns_of(orders, times)

    def column(stage: int, message: Message, need: int, _: tuple[int, int]) -> int:
        place = max(0, bisect_right(places[stage], need) - 1 - ahead)
        early = places[stage][place]
        if columns is None or isinstance(message, TiedGradient):
            return early
        starts, ends, _numbers = columns
        delay = times.delay(message.chunk, reader(message))
        return min(early, bisect_right(ends[stage], starts[stage][early] - 2 * delay))

    return column


def when_sent(
    orders: Orders, times: ChunkCosts, columns: Columns | None = None
) -> Posting:
    """Post each receive before the first job that ends after its sender."""
    numbers = _in_order_of_ends(orders, columns or _columns_of(orders, times))
    return lambda stage, _message, _need, sender: bisect_right(
        numbers[stage], numbers[sender[0]][sender[1]]
    )


def _goes_on(job: Job | Segment) -> bool:
    """True of what is no job of its own: a collective, or more of a pass."""
    return isinstance(job, Collective) or (isinstance(job, Segment) and not job.begins)


def _columns_of(orders: Orders, times: ChunkCosts) -> Columns:
    """Time every column of every order; what is no pass takes no time."""
    rows = [[job for job in x if not isinstance(job, Segment)] for x in orders]
    none = (0.0,) * times.placement.n_chunks
    passes_alone = replace(
        times, optimizer=none, validation=none, all_gather=none, reduce_scatter=none
    )
    run = JobGraph(rows, passes_alone, barrier=False).run()
    # passes of equal length: each starts later than all that it waits for
    equal = JobGraph(rows, Costs().on(times.placement), barrier=False).run()
    return Columns(*map(run.by_row, (run.starts, run.ends, equal.starts)))


def _in_order_of_ends(orders: Orders, columns: Columns) -> list[list[int]]:
    """Number all jobs in an order in which they can end; by stage and column.

    What stands before the V's comes first, as it may be replayed without the rest, and
    the Steps last, as they wait for all stages.
    """
    jobs: list[tuple[int, float, float, int, int]] = []
    for stage, order in enumerate(orders):
        check = order.index(Check(stage)) if Check(stage) in order else -1
        for column, job in enumerate(order):
            phase = (column >= check) + (column > check) + isinstance(job, Step)
            end, number = columns.ends[stage][column], columns.numbers[stage][column]
            jobs.append((phase, end, number, stage, column))
    numbers = [[0] * len(order) for order in orders]
    for number, (*_, stage, column) in enumerate(sorted(jobs)):
        numbers[stage][column] = number
    return numbers
