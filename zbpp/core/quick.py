"""Quick looks at schedules of millions of jobs: one byte a pass, or one slot.

Orders that pass these checks are valid; others are looked at by `zbpp.core.validation`
job by job, to find the place of the mistake and to explain it.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from zbpp.core.costs import PassTimes
from zbpp.core.jobs import Job, Pass, PassKind, Step, many
from zbpp.core.placement import Placement
from zbpp.core.timeline import Slot

__all__ = ["can_finish", "is_plain", "quick_rows", "without_collection"]

_NEXT = {  # state of a micro-batch on a chunk: nothing done, F, F and B, all
    PassKind.F: (0, 1),
    PassKind.B: (1, 2),
    PassKind.W: (2, 3),
    PassKind.BW: (1, 3),
}


def is_plain(
    order: Sequence[Job], placement: Placement, stage: int, *, n_microbatches: int
) -> bool:
    """True if a stage does each pass once, F before B before W, then at most a Step.

    >>> row = [Pass(PassKind.F, 0, 0), Pass(PassKind.BW, 0, 0), Step(0)]
    >>> is_plain(row, Placement.single(1), 0, n_microbatches=1)
    True
    """
    n_passes = len(order)
    if order and order[-1] == Step(stage):
        n_passes -= 1
    chunks = placement.chunks_of[stage]
    if n_passes < 2 * n_microbatches * len(chunks):  # F and BW: not all are there
        return False
    states = {chunk: bytearray(n_microbatches) for chunk in chunks}
    n_finished = 0
    for column in range(n_passes):
        job = order[column]
        if not isinstance(job, Pass):
            return False
        state = states.get(job.chunk)
        before, after = _NEXT[job.kind]
        i = job.microbatch
        if state is None or not 0 <= i < n_microbatches or state[i] != before:
            return False
        state[i] = after
        n_finished += after == 3
    return n_finished == n_microbatches * len(states)


def can_finish(
    orders: Sequence[Sequence[Job]], placement: Placement, *, n_microbatches: int
) -> bool:
    """True if no stages wait for one another: `zbpp.core.clock` without times.

    An F needs the F of the chunk before, a B the B of the chunk after. Each order must
    hold each of its passes once, F before B before W.
    """
    forward, backward = (
        [bytearray(n_microbatches) for _ in range(placement.n_chunks)] for _ in "FB"
    )
    given = bytes([1]) * n_microbatches  # the inputs, and the gradients of the losses
    of_f, of_b = [given, *forward[:-1]], [*backward[1:], given]
    neighbours = [_neighbours(placement, stage) for stage in range(placement.n_stages)]
    f_kind, w_kind = PassKind.F, PassKind.W
    due = [len(order) for order in orders]
    done = [0] * placement.n_stages
    to_try = list(range(placement.n_stages))[::-1]
    while to_try:
        stage = to_try.pop()
        order, n_before = orders[stage], done[stage]
        for column in range(n_before, due[stage]):
            job = order[column]
            if job.__class__ is not Pass or (kind := job.kind) is w_kind:
                continue
            chunk, i = job.chunk, job.microbatch
            if kind is f_kind:
                if not of_f[chunk][i]:
                    break
                forward[chunk][i] = 1
            else:
                if not of_b[chunk][i]:
                    break
                backward[chunk][i] = 1
        else:
            column = due[stage]
        if column > n_before:
            done[stage] = column
            to_try += neighbours[stage]
    return done == due


@contextmanager
def without_collection() -> Iterator[None]:
    """Make many objects that stay without a look for circles among them now and then.

    It takes a third of the time of millions of jobs, and there are no circles.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@without_collection()
def quick_rows(
    orders: Sequence[Sequence[Job]],
    times: PassTimes,
    *,
    n_microbatches: int,
    free: Sequence[float] | None = None,
) -> list[list[Slot]] | None:
    """Time passes by the rule of `zbpp.core.clock`, which it gives in full; see there.

    Each job is looked at once, however the stages wait for one another: a stage is
    visited again when one that it hears from has gone on. None if there are other jobs
    than passes and a Step at the end of a row, or passes of other micro-batches.
    """
    placement, n_chunks = times.placement, times.placement.n_chunks
    last, hops, due = n_chunks - 1, times.hops, n_chunks * n_microbatches
    nothing: list[float | None] = [None] * n_microbatches
    forward = [list(nothing) for _ in range(n_chunks)]  # ends
    gradient = [list(nothing) for _ in range(n_chunks)]
    deferred = [bytearray(n_microbatches) for _ in range(n_chunks)]
    took_f, took_b, took_w, took_bw = (
        [times.of_pass(kind, c) for c in range(n_chunks)] for kind in _NEXT
    )
    neighbours = [_neighbours(placement, stage) for stage in range(placement.n_stages)]
    starts: list[list[float]] = [[] for _ in orders]
    ends: list[list[float]] = [[] for _ in orders]
    busy = [0.0] * placement.n_stages if free is None else list(free)
    f_kind, w_kind, b_kind = PassKind.F, PassKind.W, PassKind.B
    last_gradient = 0.0
    to_try = list(range(placement.n_stages))[::-1]
    while to_try:
        stage = to_try.pop()
        order, now = orders[stage], busy[stage]
        begun, ended = starts[stage], ends[stage]
        own = placement.chunks_of[stage]
        n_before, n_due, gradients_end = len(begun), due, 0.0
        for column in range(n_before, len(order)):
            job = order[column]
            if job.__class__ is not Pass:
                if job == Step(stage) and column == len(order) - 1:
                    break
                return None
            kind, chunk, i = job.kind, job.chunk, job.microbatch
            if not 0 <= i < n_microbatches or chunk not in own:
                return None
            if kind is f_kind:
                if chunk:
                    arrival = forward[chunk - 1][i]
                    if arrival is None:
                        break
                    arrival += hops[chunk - 1]
                    if arrival > now:
                        now = arrival
                begun.append(now)
                now += took_f[chunk]
                forward[chunk][i] = now
            elif kind is w_kind:
                if not deferred[chunk][i]:
                    break
                begun.append(now)
                now += took_w[chunk]
                due -= 1
                gradients_end = now
            else:
                if forward[chunk][i] is None:
                    break
                if chunk != last:
                    arrival = gradient[chunk + 1][i]
                    if arrival is None:
                        break
                    arrival += hops[chunk]
                    if arrival > now:
                        now = arrival
                begun.append(now)
                if kind is b_kind:
                    now += took_b[chunk]
                    deferred[chunk][i] = 1
                else:
                    now += took_bw[chunk]
                    due -= 1
                    gradients_end = now
                gradient[chunk][i] = now
            ended.append(now)
        if len(begun) > n_before:
            busy[stage] = now
            to_try += neighbours[stage]
        if due < n_due:
            last_gradient = max(last_gradient, gradients_end)
    rows = [
        many(Slot, len(begun), job=order, start=begun, end=ended)
        for order, begun, ended in zip(orders, starts, ends, strict=True)
    ]
    if due == 0:
        for stage, (order, row) in enumerate(zip(orders, rows, strict=True)):
            if len(row) == len(order) - 1 and isinstance(order[-1], Step):
                start = max(busy[stage], last_gradient)
                row.append(Slot(order[-1], start, start + times.optimizer[stage]))
    return rows


def _neighbours(placement: Placement, stage: int) -> list[int]:
    """List the stages that a stage sends to."""
    found = set()
    for chunk in placement.chunks_of[stage]:
        for other in (chunk - 1, chunk + 1):
            if 0 <= other < placement.n_chunks:
                found.add(placement.stage_of[other])
    return sorted(found - {stage})
