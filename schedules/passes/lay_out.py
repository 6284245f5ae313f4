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
    members_of,
)

__all__ = ["lay_out"]

F, B, W, BW = PassKind


def lay_out(
    schedule: Schedule, costs: Costs, *, w_first: bool | None = None
) -> Schedule:
    """Give a schedule rows of parts: the same passes in the same order.

    On stages that cannot split the backward it comes in one piece, where B was.

    Args:
        schedule: any, without UNSHARDs and the like.
        costs: with parts.
        w_first: the W of a backward in one piece comes as early as it can; False: when
            its B has ended, so that the gradient leaves sooner; None: the shorter.

    Raises:
        RequestError: the costs do not fit, or the limit is exceeded.
    """
    times = costs.on(schedule.placement)
    pairs = zip(schedule.orders, times.splits, strict=True)
    orders = tuple(tuple(_joined(order, splits=splits)) for order, splits in pairs)
    plans = []
    for first in (False, True) if w_first is None else (w_first,):
        rows = tuple(
            tuple(part for job in order for part in _parts(job, times, w_first=first))
            for order in orders
        )
        plans.append((JobGraph(rows, times).run().span, rows))
    parts = min(plans, key=lambda plan: plan[0])[1]
    return replace(schedule, orders=orders, parts=parts)


def _joined(order: Order, *, splits: bool) -> Iterator[Job]:
    """Run backwards in one piece on a stage that cannot split them."""
    for job in order:
        match job:
            case Pass(kind=PassKind.B | PassKind.W) if not splits:
                if job.kind is B:
                    yield Pass(BW, job.chunk, job.microbatch)
            case _:
                yield job


def _parts(job: Job, times: ChunkCosts, *, w_first: bool) -> Iterator[Job]:
    """Parts of a job: of F and B in turns, W's among or behind them."""
    passes = [whole_pass for member in members_of(job) for whole_pass in _split(member)]
    if not passes:
        yield job
        return
    parts: dict[PassKind, list[Part]] = {kind: [] for kind in PassKind}
    for whole_pass in passes:
        lanes = [lane for lane, _ in times.parts_of(whole_pass)]
        parts[whole_pass.kind] = [
            Part(whole_pass, index, lane) for index, lane in enumerate(lanes)
        ]
    waiting = parts[W]
    is_joint = isinstance(job, Pair) or job.kind is BW
    for index in range(max(len(parts[F]), len(parts[B]))):
        yield from parts[F][index : index + 1]
        for part in parts[B][index : index + 1]:
            yield part
            while is_joint and w_first and waiting:
                if times.source_of(waiting[0]) > part.index:
                    break
                yield waiting.pop(0)
    yield from waiting


def _split(job: Job) -> tuple[Pass, ...]:
    """A pass as F, B and W."""
    if not isinstance(job, Pass):
        return ()
    if job.kind is BW:
        return Pass(B, job.chunk, job.microbatch), Pass(W, job.chunk, job.microbatch)
    return (job,)
