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
from collections.abc import Sequence
from typing import Protocol

from zbpp.core import (
    Check,
    ChunkCosts,
    Collective,
    Job,
    JobGraph,
    Message,
    Pass,
    Segment,
    Step,
    TiedGradient,
    begun_by,
    ended_by,
    reader,
    reads,
    writes,
)

__all__ = ["Posting", "in_time", "when_sent"]

Orders = Sequence[Sequence[Job | Segment]]

Columns = tuple[list[list[float]], list[list[float]]]
"""Starts and ends of the columns of all orders."""


class Posting(Protocol):
    """A rule for when receives are posted."""

    def __call__(
        self, stage: int, message: Message, *, need: int, sender: tuple[int, int]
    ) -> int:
        """The column of a stage's order before which it posts a receive.

        Args:
            stage: that receives.
            message: to receive.
            need: column of the job that reads it.
            sender: stage and column of the job behind which it is sent.
        """


def in_time(
    orders: Orders,
    times: ChunkCosts,
    *,
    ahead: int,
    columns: Columns | None = None,
) -> Posting:
    """Post receives some jobs before their readers, and two delays of their links.

    Args:
        orders: of all stages.
        times: of the jobs and messages.
        ahead: jobs before the reader; collectives and further segments do not count.
        columns: starts and ends, if they are known.
    """
    places = [
        [c for c, job in enumerate(order) if not _goes_on(job)] for order in orders
    ]
    if not any(times.hops):
        columns = None
    elif columns is None:
        columns = _starts_and_ends(orders, times)

    def column(
        stage: int, message: Message, *, need: int, sender: tuple[int, int]
    ) -> int:
        place = max(0, bisect_right(places[stage], need) - 1 - ahead)
        early = places[stage][place]
        if columns is None or isinstance(message, TiedGradient):
            return early
        starts, ends = columns
        delay = times.delay(message.chunk, reader(message))
        return min(early, bisect_right(ends[stage], starts[stage][early] - 2 * delay))

    return column


def when_sent(
    orders: Orders,
    times: ChunkCosts,
    *,
    columns: Columns | None = None,
) -> Posting:
    """Post each receive before the first job that ends after its sender.

    The arguments are those of `in_time`.
    """
    if columns is None:
        columns = _starts_and_ends(orders, times)
    numbers = _in_order_of_ends(orders, columns[1], times.placement.n_chunks)

    def column(
        stage: int, message: Message, *, need: int, sender: tuple[int, int]
    ) -> int:
        source, sent = sender
        return bisect_right(numbers[stage], numbers[source][sent])

    return column


def _goes_on(job: Job | Segment) -> bool:
    """True of what is no job of its own: a collective, or more of a pass."""
    return isinstance(job, Collective) or (isinstance(job, Segment) and not job.begins)


def _starts_and_ends(orders: Orders, times: ChunkCosts) -> Columns:
    """Time every column of every order; what is no pass takes no time."""
    passes = [[x for x in order if isinstance(x, Pass)] for order in orders]
    rows = JobGraph(passes, times).run().slots()
    starts: list[list[float]] = [[] for _ in orders]
    ends: list[list[float]] = [[] for _ in orders]
    for stage, order in enumerate(orders):
        slots, now = iter(rows[stage]), 0.0
        for job in order:
            start = now
            if isinstance(job, Pass):
                slot = next(slots)
                start, now = slot.start, slot.end
            starts[stage].append(start)
            ends[stage].append(now)
    return starts, ends


def _in_order_of_ends(
    orders: Orders, ends: Sequence[Sequence[float]], n_chunks: int
) -> list[list[int]]:
    """Number all jobs in an order in which they can end; by stage and column.

    What stands before the V's comes first, as it may be replayed without the rest, and
    the Steps last, as they wait for all stages.
    """
    jobs: list[tuple[int, float, int, int, int]] = []
    written: set[object] = set()
    phases = [0] * len(orders)
    columns = [0] * len(orders)
    before = None
    while before != columns:
        before = list(columns)
        for stage, order in enumerate(orders):
            for column in range(columns[stage], len(order)):
                job = order[column]
                begun, ended = begun_by(job), ended_by(job)
                if begun and not written.issuperset(reads(begun, n_chunks)):
                    break
                if ended:
                    written.update(writes(ended, n_chunks))
                if isinstance(job, Check | Step):
                    phases[stage] = 1 if isinstance(job, Check) else 3
                entry = phases[stage], ends[stage][column], len(jobs), stage, column
                jobs.append(entry)
                columns[stage] += 1
                if isinstance(job, Check):
                    phases[stage] = 2
    numbers = [[0] * len(order) for order in orders]
    for number, (*_, stage, column) in enumerate(sorted(jobs)):
        numbers[stage][column] = number
    return numbers
