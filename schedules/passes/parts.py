"""Passes in parts on two lanes: laid out in rows, and cut as the runtime runs them.

**Rows** (`lay_out`). Pairs overlap, other passes follow one another. The parts of a
pair alternate, as those of Megatron's combined 1F1B do, so that one computes while the
other exchanges data:

    compute  F.0   B.1 W.0 F.2   B.3 W.1        F: attention, dispatch, experts, combine
    network  B.0~  F.1~    B.2~  F.3~           B: the same backwards

That takes max(2x, F + B + W + max(0, x/2 - a) / L) for L equal layers that exchange for
x in each of F and B and whose F computes a before its first exchange: no order takes
less (checked with a solver).

**Segments** (`in_segments`). A plan with parts pairs what computes with what
communicates. The runtime stops a pass where the pass itself begins to communicate, and
nowhere else. So a segment runs a pass up to there, and the next segment, of another
pass, computes during the communication:

    compute   0F0.0 0B1.1    0F0.2 0W1.0 0B1.3           planned
    network   0B1.0~ 0F0.1~  0B1.2~      0F0.3~

    segments  0B1.0~ 0F0.0 0B1.1 0F0.2 0W1.0 0B1.3 0F0.3~

A part on the network begins where the segment before it ends. It has a
separate segment at the begin of a pass only, and at its end, where the rest of the pass
is run: as soon as the stage is free behind it, by the times of the parts.

The segments of a stage are in the order of the plan, but for three rules: one F of a
stage and one backward of a chunk are open at a time, and what begins before a V ends
before it. Where a plan has it otherwise, the pass that is open ends first. It waits for
its communication only, so no stages wait for one another in a circle.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

from zbpp.core import (
    KINDS,
    ChunkCosts,
    Collective,
    CollectiveKind,
    Job,
    JobGraph,
    Lane,
    Order,
    Pair,
    Part,
    Pass,
    PassKind,
    Schedule,
    Segment,
    Step,
    Value,
    passes_in,
    reads,
    writes,
)
from zbpp.core.graph import unit_times

F, B, W, BW = PassKind


def lay_out(schedule: Schedule, times: ChunkCosts) -> Schedule:
    """Give a schedule rows of parts: the same passes in the same order.

    On stages that cannot split the backward it comes in one piece, where B was. There
    and in pairs, W comes as early as it can, or when its B has ended, so that the
    gradient leaves sooner: the shorter of both.

    Args:
        schedule: any, without UNSHARDs and the like.
        times: with parts.
    """
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
    """Parts of an order: of F and B alternately, W's among or behind them."""
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


# ---- Segments.


class Columns(NamedTuple):
    """When the columns of all orders run."""

    starts: list[list[float]]
    ends: list[list[float]]
    numbers: list[list[float]]
    """None runs before one with a smaller number, where times are the same."""


@dataclass(frozen=True, eq=False)
class _Stretch:
    """A pass up to its next call, with the call, or what is left behind its last one.

    It begins with a part of the plan. The parts of the W of a BW are among its parts.
    """

    of: Pass
    begin: Part
    parts: Sequence[Part]
    ends: bool
    is_rest: bool

    def time_on(self, lane: Lane, times: ChunkCosts) -> float:
        """Time of the parts on a lane."""
        return sum(times.of(part) for part in self.parts if part.lane is lane)


def in_segments(
    schedule: Schedule, times: ChunkCosts, *, adds_up: bool = False
) -> tuple[list[list[Job | Segment]], Columns]:
    """Cut the passes of a schedule with parts, and time the columns of its orders.

    The W of a BW is a part of it. Without times of parts all take equally long.
    Replicas that add up the gradients of a chunk do so behind its last W.

    Raises:
        RequestError: the times have other parts than the schedule.
    """
    rows = schedule.parts
    assert rows is not None, "a schedule without parts has no segments"
    if times.parts:
        rows = schedule.rows_for(times)
    else:
        times = unit_times(schedule.placement, rows)
    cut: list[list[_Stretch | Job]] = []
    for stage, (order, row) in enumerate(zip(schedule.orders, rows, strict=True)):
        joint = {x for job in order for x in passes_in(job) if x.kind is BW}
        last = () if Step(stage) in row else (Step(stage),)
        cut.append([*_stretches((*row, *last), joint, times)])
    parts = [[x for job in row for x in _parts_of(job)] for row in cut]
    run = JobGraph(parts, times, barrier=False).run()
    slots = zip(cut, *map(run.by_row, (run.starts, run.ends)), strict=True)
    orders = [[*_ended_early(*each)] for each in slots]
    if adds_up:
        orders = [[*_with_sums(order)] for order in orders]
    return [[*_named(order)] for order in orders], _timed(orders, times)


def _parts_of(job: _Stretch | Job) -> Sequence[Job]:
    return job.parts if isinstance(job, _Stretch) else (job,)


def _stretches(
    row: Sequence[Job], joint: set[Pass], times: ChunkCosts
) -> Iterator[_Stretch | Job]:
    """Cut a row by the rules; a pass whose last part is a call ends late."""
    n_done: Counter[Pass] = Counter()
    is_open: dict[Pass, None] = {}

    def parts_of(of: Pass) -> list[Part]:
        return [Part(of, i, lane) for i, (lane, _) in enumerate(times.parts_of(of))]

    def go_on(of: Pass) -> _Stretch:
        full, w = (Pass(kind, of.chunk, of.microbatch) for kind in (BW, W))
        is_joint = of.kind is B and full in joint
        deferred = parts_of(w) if is_joint else []
        row, at = parts_of(of), n_done[of]
        calls = [x.index for x in row[at:] if of.kind is W or x.lane is Lane.NETWORK]
        stop = min([x + 1 for x in calls], default=len(row))
        is_rest = at == len(row)
        parts: list[Part] = []
        for part in row[at:stop]:
            of_part = [x for x in deferred if times.source_of(x) == part.index]
            is_call = part.lane is Lane.NETWORK
            parts += [part] if is_call else [part, *of_part]
        if is_rest:
            parts += [x for x in deferred if times.source_of(x) == at - 1]
        n_done[of], begin = stop, min(at, len(row) - 1)
        # of B alone: a BW ends with what its W exchanges
        has_call = of.kind is not W and not is_rest and row[-1].lane is Lane.NETWORK
        ends = stop == len(row) and not has_call
        if of.kind is not W:
            is_open[of] = None
        if ends:
            is_open.pop(of, None)
        of = full if is_joint else of
        return _Stretch(of, Part(of, begin, row[begin].lane), parts, ends, is_rest)

    def end(others: Iterable[Pass]) -> Iterator[_Stretch]:
        for of in others:
            while of in is_open:
                yield go_on(of)

    for job in row:
        if not isinstance(job, Part):
            yield from end([*is_open])
            yield job
            continue
        of, chunk = job.of, job.chunk
        if of.kind is W and Pass(BW, chunk, of.microbatch) in joint:
            continue
        while n_done[of] <= job.index:
            if of.kind is W:
                if n_done[of] + 1 == len(times.parts_of(of)):
                    yield from end([Pass(B, chunk, of.microbatch)])
            elif not n_done[of]:
                same = [x for x in is_open if (x.kind is F) is (of.kind is F)]
                yield from end([x for x in same if x.kind is F or x.chunk == chunk])
            yield go_on(of)


def _ended_early(
    row: Sequence[_Stretch | Job], starts: Sequence[float], ends: Sequence[float]
) -> Iterator[_Stretch | Job]:
    """End passes behind their last calls as soon as their stage is free."""
    stretches = [job for job in row if isinstance(job, _Stretch)]
    rests = {x.of: x for x in stretches if x.is_rest}
    calls = {x.of: x for x in stretches if not x.is_rest and x.of in rests}
    """The last call of each pass that ends behind one."""
    ready: dict[Pass, float] = {}
    """When they end, of passes that are to end."""
    column = 0
    for job in row:
        if isinstance(job, _Stretch) and job.is_rest:
            if ready.pop(job.of, None) is not None:
                yield job
        else:
            for of in sorted(ready, key=ready.__getitem__):
                if ready[of] <= starts[column]:
                    del ready[of]
                    yield rests[of]
            yield job
        column += len(_parts_of(job))
        if isinstance(job, _Stretch) and calls.get(job.of) is job:
            ready[job.of] = ends[column - 1]


def _with_sums(order: Sequence[_Stretch | Job]) -> Iterator[_Stretch | Job]:
    """Add the gradients of a chunk up behind its last W."""
    stretches = [job for job in order if isinstance(job, _Stretch)]
    last = {x.of.chunk: x for x in stretches if x.ends and x.of.kind in (W, BW)}
    sums: list[int] = []
    for job in order:
        if isinstance(job, Step):
            yield from (Collective(CollectiveKind.REDUCE_WAIT, chunk) for chunk in sums)
        yield job
        if isinstance(job, _Stretch) and last.get(job.of.chunk) is job:
            sums.append(job.of.chunk)
            yield Collective(CollectiveKind.REDUCE_GRAD, job.of.chunk)


def _named(order: Sequence[_Stretch | Job]) -> Iterator[Job | Segment]:
    """Write stretches as segments, or as passes in one piece."""
    total = Counter(job.of for job in order if isinstance(job, _Stretch))
    left = total.copy()
    for job in order:
        if not isinstance(job, _Stretch):
            yield job
            continue
        left[job.of] -= 1
        n_left, n = left[job.of], total[job.of]
        # until its end a W does no more than its B has left for it
        begins = not n_left if job.of.kind is W else n_left == n - 1
        yield job.of if n == 1 else Segment(job.begin, begins, n_left)


def _timed(orders: Sequence[Sequence[_Stretch | Job]], times: ChunkCosts) -> Columns:
    """Run every column as early as can be."""
    n_chunks = times.placement.n_chunks
    written: dict[Value, float] = {}
    ready: dict[Pass, float] = {}
    network = [0.0] * len(orders)
    columns = Columns([[] for _ in orders], [[] for _ in orders], [[] for _ in orders])
    n_run, before = count(), -1
    while before < (before := sum(map(len, columns.starts))):
        for stage, order in enumerate(orders):
            starts, ends, numbers = (of_all[stage] for of_all in columns)
            for job in order[len(starts) :]:
                now = ends[-1] if ends else 0.0
                end = now
                if isinstance(job, _Stretch):
                    of = job.of
                    begins = of not in ready and of.kind is not W
                    needs = reads(of, n_chunks) if begins else ()
                    if not written.keys() >= {*needs}:
                        break
                    delays = [
                        written[x] + times.delay(x.chunk, of.chunk) for x in needs
                    ]
                    now = max(now, ready.get(of, 0.0), *delays)
                    ready[of] = end = now + job.time_on(Lane.COMPUTE, times)
                    if call := job.time_on(Lane.NETWORK, times):
                        network[stage] = ready[of] = max(end, network[stage]) + call
                    if job.ends:
                        written |= dict.fromkeys(writes(of, n_chunks), end)
                starts.append(now)
                ends.append(end)
                numbers.append(next(n_run))
    assert before == sum(map(len, orders)), "stages wait for one another"
    return columns
