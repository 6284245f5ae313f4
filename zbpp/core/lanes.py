"""Rows of parts: the passes of each stage laid out on its two lanes.

order    0F0 0F1 0B0                       passes, in the order of their starts
row      0F0.0 0F0.1~ 0F1.0 0F0.2 ..       their parts, in the order of theirs
compute  0F0.0        0F1.0 0F0.2          what a lane runs, one after the other
network        0F0.1~
"""

from collections.abc import Sequence
from itertools import chain

from zbpp.core.clock import replay
from zbpp.core.costs import ChunkCosts, Costs, Parts
from zbpp.core.errors import ScheduleError
from zbpp.core.jobs import Job, Lane, Part, Pass, PassKind, members_of
from zbpp.core.placement import Placement
from zbpp.core.text import grid

__all__ = ["check_parts", "parts_of_pass", "unit_times"]

Rows = Sequence[Sequence[Job]]


def parts_of_pass(job: Pass, lanes: Sequence[Lane]) -> list[Part]:
    """The parts of a pass, by their lanes."""
    return [Part(job, index, lane) for index, lane in enumerate(lanes)]


def check_parts(
    placement: Placement, n_microbatches: int, orders: Rows, rows: Rows
) -> None:
    """Check that rows lay out the passes of valid orders, and can be run.

    Raises:
        ScheduleError: a part is missing, doubled or out of turn, passes start in
            another order, or the stages wait for one another.
    """
    if len(rows) != len(orders):
        raise ScheduleError(f"parts has {len(rows)} rows for {len(orders)} stages")
    lanes: dict[tuple[PassKind, int], dict[int, Lane]] = {}
    for stage, row in enumerate(rows):
        for column, job in enumerate(row):
            if isinstance(job, Part):
                known = lanes.setdefault((job.kind, job.chunk), {})
                if known.setdefault(job.index, job.lane) is not job.lane:
                    reason = f"{job}: this part is on another lane elsewhere"
                    raise _mistake(rows, stage, column, reason)
    counts = {key: len(known) for key, known in lanes.items()}
    for stage, (order, row) in enumerate(zip(orders, rows, strict=True)):
        _check_row(rows, stage, order, row, counts)
    times = unit_times(placement, rows)
    for stage, slots in enumerate(replay(rows, times, n_microbatches=n_microbatches)):
        if len(slots) < len(rows[stage]):
            reason = "deadlock: what this waits for on another stage waits for it"
            raise _mistake(rows, stage, len(slots), reason)


def _check_row(
    rows: Rows,
    stage: int,
    order: Sequence[Job],
    row: Sequence[Job],
    counts: dict[tuple[PassKind, int], int],
) -> None:
    """A row has all parts of the order's passes in turn, and its other jobs."""
    started: list[Job] = []
    at_any_time: set[Job] = set()  # W's of BW's
    for member in (member for job in order for member in members_of(job)):
        if isinstance(member, Pass) and member.kind is PassKind.BW:
            chunk, i = member.chunk, member.microbatch
            started.append(Pass(PassKind.B, chunk, i))
            if (PassKind.W, chunk) in counts:
                at_any_time.add(Pass(PassKind.W, chunk, i))
        else:
            started.append(member)
    starts, done = iter(started), dict[Job, int]()
    for column, job in enumerate(row):
        of: Job = job.of if isinstance(job, Part) else job
        index = job.index if isinstance(job, Part) else 0
        if isinstance(of, Pass) and not isinstance(job, Part):
            raise _mistake(rows, stage, column, f"{job} is no part, such as {job}.0")
        before = done.get(of, 0)
        if index != before:
            reason = f"{job} comes where part {before} of {of} must; reorder them"
            raise _mistake(rows, stage, column, reason)
        done[of] = before + 1
        if index == 0 and of not in at_any_time:
            due = next(starts, None)
            if due != of:
                reason = f"{job} starts where the order has {due or 'nothing more'}"
                raise _mistake(rows, stage, column, reason)
    missing = next((of for of in at_any_time if of not in done), next(starts, None))
    if missing is not None:
        raise _mistake(rows, stage, len(row), f"{missing} is missing")
    for of, n in done.items():
        if isinstance(of, Pass) and n < counts[of.kind, of.chunk]:
            raise _mistake(rows, stage, len(row), f"part {n} of {of} is missing")


def unit_times(placement: Placement, rows: Rows) -> ChunkCosts:
    """Times by which every part takes a unit, on the lanes that rows tell."""
    lanes: dict[tuple[PassKind, int], dict[int, Lane]] = {}
    for job in chain.from_iterable(rows):
        if isinstance(job, Part):
            lanes.setdefault((job.kind, job.chunk), {})[job.index] = job.lane

    def parts(kind: PassKind, chunk: int) -> tuple[tuple[Lane, float], ...]:
        known = sorted(lanes.get((kind, chunk), {}).items())
        return tuple((lane, 1.0) for _, lane in known)

    f, b, w = PassKind.F, PassKind.B, PassKind.W
    chunks = range(placement.n_chunks)
    of_chunks = tuple(Parts(parts(f, c), parts(b, c), parts(w, c)) for c in chunks)
    return Costs(parts=of_chunks).on(placement)


def _mistake(rows: Rows, stage: int, column: int, reason: str) -> ScheduleError:
    """Name the place of a mistake in the rows of parts, and show it."""
    return ScheduleError(
        f"parts, row {stage}, column {column} (counted from 0): {reason}\n"
        + grid(rows, mark=(stage, column))
    )
