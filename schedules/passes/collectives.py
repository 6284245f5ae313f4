"""Add the collectives of data parallelism to a schedule.

Replicas of a stage have the same chunks and run the same order on different
micro-batches. Replicated parameters only need their gradients added up:

    0F0 0F1 0B0 0W0 0B1 0W1 0REDUCE_GRAD .. (other chunks) .. 0REDUCE_WAIT O

The sum starts when the last weight gradient of the chunk is done, by the order of the
stage, and is awaited as late as the optimizer allows: all that is left runs meanwhile.
Sharded parameters are gathered before as well, a pass ahead of their first use:

    0UNSHARD 0F0 3UNSHARD 0F1 3F0 3BW0 .. 3BW1 3REDUCE_GRAD 3RESHARD 0B1 0RESHARD 0W1 ..

W needs no values of parameters, so the last B frees them. Where gradients are sharded
too, each W is added up at once, and awaited before the next W of the chunk, so that no
chunk has more than one whole gradient:

    .. 0W0 0REDUCE_GRAD 0B1 0REDUCE_WAIT 0W1 0REDUCE_GRAD .. 0REDUCE_WAIT O

All replicas run the same order, so their collectives start in the same order as well.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from zbpp.core import (
    KINDS,
    Collective,
    CollectiveKind,
    Job,
    PassKind,
    RequestError,
    Schedule,
    Step,
    passes_in,
)

UNSHARD, RESHARD = CollectiveKind.UNSHARD, CollectiveKind.RESHARD
REDUCE_GRAD, REDUCE_WAIT = CollectiveKind.REDUCE_GRAD, CollectiveKind.REDUCE_WAIT
_WEIGHTS = [kind for kind in PassKind if PassKind.W in KINDS[kind].work]
_INPUTS = [kind for kind in PassKind if PassKind.B in KINDS[kind].work]

Reduces = Literal["last", "every"]
"""Add gradients up after a chunk's last W, or after each."""


def add_collectives(
    schedule: Schedule, *, shards: bool, reduces: Reduces = "last"
) -> Schedule:
    """Add the collectives of data parallelism, in place of those that are there.

    Args:
        schedule: of one replica.
        shards: parameters are sharded, so they are gathered and freed; False: every
            replica has all of them.
        reduces: "last" adds gradients up once a step, after the chunk's last W;
            "every" after each W, for gradients that are sharded.

    Raises:
        RequestError: an argument is none of these, or the schedule has parts: gathers
            and sums would meet them on the network.

    >>> from zbpp.schedules import plan_zb_h1
    >>> schedule = plan_zb_h1(n_stages=1, n_microbatches=1)
    >>> " ".join(map(str, add_collectives(schedule, shards=True).orders[0]))
    '0UNSHARD 0F0 0B0 0RESHARD 0W0 0REDUCE_GRAD 0REDUCE_WAIT O'
    """
    if reduces not in ("last", "every"):
        raise RequestError(f"reduces is {reduces!r}; write 'last' or 'every'")
    if schedule.parts is not None:
        raise RequestError(
            f"{schedule.name} has parts, and no place on the network for the gathers "
            "and sums of replicas; leave the parts out of the costs"
        )
    orders = tuple(
        tuple(_with_collectives(order, shards, reduces == "every"))
        for order in schedule.without(Collective).orders
    )
    return replace(schedule, orders=orders)


def _with_collectives(order: Sequence[Job], shards: bool, every: bool) -> Iterator[Job]:
    """Start sums behind W's and wait for them late; gather early, free after B's."""
    last_w, last_b = _last(order, _WEIGHTS), _last(order, _INPUTS)
    gathers = _gathers(order) if shards else {}
    running: list[int] = []
    for column, job in enumerate(order):
        passes = passes_in(job)
        again = {each.chunk for each in passes if each.kind in _WEIGHTS}
        awaited = [c for c in running if c in again or isinstance(job, Step)]
        running = [chunk for chunk in running if chunk not in awaited]
        yield from (Collective(REDUCE_WAIT, chunk) for chunk in awaited)
        yield from (Collective(UNSHARD, chunk) for chunk in gathers.get(column, ()))
        yield job
        for each in passes:
            if each.kind in _WEIGHTS and (every or last_w[each.chunk] == column):
                running.append(each.chunk)
                yield Collective(REDUCE_GRAD, each.chunk)
            if shards and each.kind in _INPUTS and last_b[each.chunk] == column:
                yield Collective(RESHARD, each.chunk)
    yield from (Collective(REDUCE_WAIT, chunk) for chunk in running)


def _gathers(order: Sequence[Job]) -> dict[int, list[int]]:
    """By column the chunks that are gathered before it, a pass ahead of their first."""
    passes = [column for column, job in enumerate(order) if passes_in(job)]
    gathers: dict[int, list[int]] = defaultdict(list)
    seen: set[int] = set()
    for number, column in enumerate(passes):
        for each in passes_in(order[column]):
            if each.chunk not in seen:
                seen.add(each.chunk)
                place = passes[number - 1] if number else 0
                gathers[place].append(each.chunk)
    return gathers


def _last(order: Sequence[Job], kinds: Sequence[PassKind]) -> dict[int, int]:
    """Column of the last pass of these kinds, by chunk."""
    return {
        part.chunk: column
        for column, job in enumerate(order)
        for part in passes_in(job)
        if part.kind in kinds
    }
