"""Lay passes out on the lanes of their stages: pairs overlapped, others in a row.

The parts of a pair alternate, as those of Megatron's combined 1F1B do, so that one
computes while the other exchanges data:

    compute  F.0   B.1 W.0 F.2   B.3 W.1        F: attention, dispatch, experts, combine
    network  B.0~  F.1~    B.2~  F.3~           B: the same backwards

That takes max(2x, F + B + W + max(0, x/2 - a) / L) for L equal layers that exchange for
x in each of F and B and whose F computes a before its first exchange: no order takes
less (checked with a solver).
"""

from collections.abc import Iterator
from dataclasses import replace

from zbpp.core import (
    KINDS,
    ChunkCosts,
    Costs,
    Job,
    JobGraph,
    Order,
    Pair,
    Part,
    Pass,
    PassKind,
    Schedule,
    passes_in,
)

F, B, W, BW = PassKind


def lay_out(schedule: Schedule, costs: Costs) -> Schedule:
    """Give a schedule rows of parts: the same passes in the same order.

    On stages that cannot split the backward it comes in one piece, where B was. There
    and in pairs, W comes as early as it can, or when its B has ended, so that the
    gradient leaves sooner: the shorter of both.

    Args:
        schedule: any, without UNSHARDs and the like.
        costs: with parts.

    Raises:
        RequestError: the costs do not fit, or the limit is exceeded.
    """
    times = costs.on(schedule.placement)
    pairs = zip(schedule.orders, times.splits, strict=True)
    orders = tuple(tuple(_joined(order, splits=splits)) for order, splits in pairs)
    rows = [
        tuple(tuple(_parts(order, times, w_first=w_first)) for order in orders)
        for w_first in (False, True)
    ]
    parts = min(rows, key=lambda rows: JobGraph(rows, times).run().span)
    return replace(schedule, orders=orders, parts=parts)


def _joined(order: Order, *, splits: bool) -> Iterator[Job]:
    """Run backwards in one piece on a stage that cannot split them."""
    for job in order:
        if splits or not isinstance(job, Pass) or job.kind not in (B, W):
            yield job
        elif job.kind is B:
            yield Pass(BW, job.chunk, job.microbatch)


def _parts(order: Order, times: ChunkCosts, *, w_first: bool) -> Iterator[Job]:
    """Parts of an order: of F and B in turns, W's among or behind them."""
    for job in order:
        parts: dict[PassKind, list[Part]] = {kind: [] for kind in PassKind}
        for whole in passes_in(job):
            for kind in KINDS[whole.kind].work:
                one = Pass(kind, whole.chunk, whole.microbatch)
                lanes = enumerate(lane for lane, _ in times.parts_of(one))
                parts[kind] = [Part(one, index, lane) for index, lane in lanes]
        waiting = parts[W]
        is_joint = isinstance(job, Pair) or (isinstance(job, Pass) and job.kind is BW)
        for index in range(max(len(parts[F]), len(parts[B]))):
            yield from parts[F][index : index + 1]
            yield from parts[B][index : index + 1]
            while is_joint and w_first and waiting and index < len(parts[B]):
                if times.source_of(waiting[0]) > index:
                    break
                yield waiting.pop(0)
        yield from waiting
        if not passes_in(job):
            yield job
