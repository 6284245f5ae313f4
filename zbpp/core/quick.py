"""A quick yes for schedules of millions of jobs: one byte a pass, no times.

Orders that pass these checks are valid; others are looked at by `zbpp.core.validation`
job by job, to find the place of the mistake and to explain it.
"""

from collections.abc import Sequence

from zbpp.core.jobs import Job, Pass, PassKind, Step
from zbpp.core.placement import Placement

__all__ = ["can_finish", "is_plain"]

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
    states = {chunk: bytearray(n_microbatches) for chunk in placement.chunks_of[stage]}
    n_passes = len(order)
    if order and order[-1] == Step(stage):
        n_passes -= 1
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
    n_chunks = placement.n_chunks
    forward = [bytearray(n_microbatches) for _ in range(n_chunks)]
    backward = [bytearray(n_microbatches) for _ in range(n_chunks)]
    neighbours = [_neighbours(placement, stage) for stage in range(placement.n_stages)]
    done = [0] * placement.n_stages
    to_try = list(range(placement.n_stages))[::-1]
    while to_try:
        stage = to_try.pop()
        order, column = orders[stage], done[stage]
        while column < len(order):
            job = order[column]
            if isinstance(job, Pass) and job.kind is not PassKind.W:
                chunk, i = job.chunk, job.microbatch
                if job.kind is PassKind.F:
                    if chunk > 0 and not forward[chunk - 1][i]:
                        break
                    forward[chunk][i] = 1
                else:
                    if chunk < n_chunks - 1 and not backward[chunk + 1][i]:
                        break
                    backward[chunk][i] = 1
            column += 1
        if column > done[stage]:
            done[stage] = column
            to_try += neighbours[stage]
    return all(len(order) == at for order, at in zip(orders, done, strict=True))


def _neighbours(placement: Placement, stage: int) -> list[int]:
    """List the stages that a stage sends to."""
    found = set()
    for chunk in placement.chunks_of[stage]:
        for other in (chunk - 1, chunk + 1):
            if 0 <= other < placement.n_chunks:
                found.add(placement.stage_of[other])
    return sorted(found - {stage})
