"""The rules of a schedule. Each is one linear scan; the first breach is reported.

Where passes have parts, each stage has its order of passes, and a row of their parts:

    order    0F0 0F1 0B0                       passes, in the order of their starts
    row      0F0.0 0F0.1~ 0F1.0 0F0.2 ..       their parts, in the order of theirs
    compute  0F0.0        0F1.0 0F0.2          what a lane runs, one after the other
    network        0F0.1~
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from zbpp.core.amounts import format_memory
from zbpp.core.costs.chunks import ChunkCosts
from zbpp.core.costs.table import Costs
from zbpp.core.errors import RequestError, ScheduleError
from zbpp.core.graph import JobGraph, lanes_of_parts, unit_times
from zbpp.core.held import held_during
from zbpp.core.jobs import (
    KINDS,
    Check,
    Collective,
    CollectiveKind,
    Job,
    Part,
    Pass,
    PassKind,
    Scope,
    StageKind,
    State,
    Step,
    kind_of,
    members_of,
    passes_in,
    place_of,
)
from zbpp.core.placement import Placement
from zbpp.core.text import mistake

__all__ = [
    "Recompute",
    "check_layers",
    "check_memory",
    "check_parts",
    "validate",
]

Orders = Sequence[Sequence[Job]]
Recompute = bool | tuple[int, ...]
"""All layers of a chunk, none, or these, counted from 0 in the chunk."""
F, B, W, BW = PassKind
UNSHARD, RESHARD, REDUCE_GRAD, REDUCE_WAIT = CollectiveKind


def validate(placement: Placement, n_microbatches: int, orders: Orders) -> None:
    """Check all rules but that of the memory.

    Raises:
        RequestError: there is no micro-batch, or not one row a stage.
        ScheduleError: a job breaks a rule; the message marks it.
    """
    if n_microbatches < 1:
        raise RequestError(f"n_microbatches is {n_microbatches}; it must be at least 1")
    if len(orders) != placement.n_stages:
        raise ScheduleError(
            f"{len(orders)} rows of jobs for {placement.n_stages} stages; "
            "there must be one row a stage"
        )
    others: set[Job] = set()
    for stage in range(placement.n_stages):
        others |= _check_order(orders, stage, placement, n_microbatches)
    _check_all_have(orders, placement, others)
    JobGraph(orders, Costs().on(placement)).run()  # no stages wait for one another


_WORK = (F, B, W)  # in the order in which it is done for each micro-batch
_BIT = {kind: 1 << place for place, kind in enumerate(_WORK)}


def _before_and_after(kind: PassKind) -> tuple[int, int]:
    """The work done for a micro-batch around a pass: one bit each of F, B and W."""
    bits = [_BIT[work] for work in KINDS[kind].work]
    return bits[0] - 1, bits[0] - 1 + sum(bits)


_DONE = {kind: _before_and_after(kind) for kind in PassKind}
_ALL_DONE = sum(_BIT.values())


def _check_order(
    orders: Orders, stage: int, placement: Placement, n_microbatches: int
) -> set[Job]:
    """Check that a stage does each pass once, F before B before W; V first, O last.

    Returns:
        Its jobs that are no passes.
    """
    order = orders[stage]
    # A byte for each micro-batch, as a plan has millions of jobs; some of more than
    # there are jobs is missing anyway.
    size = min(n_microbatches, len(order) + 1)
    done = {chunk: bytearray(size) for chunk in placement.chunks_of[stage]}
    others: set[Job] = set()
    for column, job in enumerate(order):
        for member in (job,) if job.__class__ is Pass else members_of(job):
            reason = None
            if member.__class__ is not Pass:
                reason = _misplaced(member, placement, n_microbatches, stage)
                reason = reason or _untimely(member, order[:column], done)
            else:
                work, i = done.get(member.chunk), member.microbatch
                before, after = _DONE[member.kind]
                if work is None or not 0 <= i < size:
                    reason = _misplaced(member, placement, n_microbatches, stage)
                elif work[i] != before:
                    reason = _out_of_turn(member, work[i], order[:column])
                else:
                    work[i] = after
            if others and not reason and Step(stage) in others:
                reason = (
                    f"{member} comes after O; the optimizer step must be the last job"
                )
            if reason:
                raise mistake(orders, stage, column, reason)
        if job.__class__ is not Pass:
            others.add(job)
    for chunk, work in done.items():
        if work.count(_ALL_DONE) < n_microbatches:
            reason = _missing(chunk, work)
            raise mistake(orders, stage, len(order), reason)
    if any(isinstance(job, Collective) for job in others):
        for column, reason in _collective_breaches(order):
            raise mistake(orders, stage, column, reason)
    return others


def _misplaced(
    job: Job, placement: Placement, n_microbatches: int, stage: int
) -> str | None:
    """Explain why a job is none of this stage's; None if it is."""
    place = place_of(job)
    if kind_of(job).scope is Scope.STAGE:
        if place != stage:
            return f"{job} of stage {place} stands on stage {stage}"
        return None
    if not 0 <= place < placement.n_chunks:
        return f"{job}: the chunks are 0 to {placement.n_chunks - 1}"
    if isinstance(job, Pass) and not 0 <= job.microbatch < n_microbatches:
        return f"{job}: the micro-batches are 0 to {n_microbatches - 1}"
    home = placement.stage_of[place]
    if home != stage:
        return (
            f"{job} stands on stage {stage}, but chunk {place} is on stage {home}; "
            "move it there"
        )
    return None


def _out_of_turn(job: Pass, done: int, earlier: Sequence[Job]) -> str:
    """Explain why a pass cannot follow the work that is done for its micro-batch."""
    chunk, i, work = job.chunk, job.microbatch, set(kind_of(job).work)
    for column, other in enumerate(earlier):
        for member in passes_in(other):
            is_same = (member.chunk, member.microbatch) == (chunk, i)
            if is_same and not work.isdisjoint(kind_of(member).work):
                return f"{job} repeats {member} of column {column}; remove one"
    first = next(kind for kind in _WORK if not done & _BIT[kind])
    return f"{job} comes before {Pass(first, chunk, i)}; swap them"


def _untimely(
    job: Job, earlier: Sequence[Job], done: Mapping[int, bytearray]
) -> str | None:
    """Explain why a job that is no pass cannot come now; None if it can."""
    if kind_of(job).scope is Scope.STAGE and job in earlier:
        return f"{job} repeats {job} of column {earlier.index(job)}; remove one"
    if isinstance(job, Check) and max(map(max, done.values())) > _BIT[F]:
        return "V must come before the first backward pass of its stage"
    return None


def _missing(chunk: int, done: Sequence[int]) -> str:
    """Name a pass that a chunk ends without."""
    i = next(i for i, work in enumerate(done) if work < _ALL_DONE)
    forward, backward, weight, joint = (Pass(kind, chunk, i) for kind in PassKind)
    if not done[i] & _BIT[F]:
        return f"{forward} is missing"
    if not done[i] & _BIT[B]:
        return f"{backward} (with {weight}, or {joint}) is missing"
    return f"{weight} is missing"


def _check_all_have(orders: Orders, placement: Placement, others: set[Job]) -> None:
    """All stages step, or none does (then the caller steps); V's, UNSHARDs alike."""
    for kind in (UNSHARD, REDUCE_GRAD, StageKind.STEP, StageKind.CHECK):
        is_stage = KINDS[kind].scope is Scope.STAGE
        places = range(placement.n_stages if is_stage else placement.n_chunks)
        have = {place_of(job) for job in others if job.kind is kind}
        lack = next((place for place in places if place not in have), None)
        if have and lack is not None:
            stage = lack if is_stage else placement.stage_of[lack]
            name = f"{'' if is_stage else lack}{kind}"
            reason = (
                f"{name} is missing, though {KINDS[kind].scope} {min(have)} has one"
            )
            raise mistake(orders, stage, len(orders[stage]), reason)


@dataclass
class _Chunk:
    """State of a chunk along an order."""

    is_sharded: bool
    to_reduce: Pass | None = None
    """Its last weight gradient that no REDUCE_GRAD has added up."""
    is_reducing: bool = False

    def run(self, job: Pass | Collective) -> str | None:
        """Note a job; explain why it cannot run here."""
        was_sharded, was_reducing = self.is_sharded, self.is_reducing
        match job.kind:
            case CollectiveKind.UNSHARD:
                self.is_sharded = False
                if not was_sharded:
                    return f"{job}: chunk {job.chunk} is gathered here"
            case CollectiveKind.RESHARD:
                self.is_sharded = True
                if was_sharded:
                    return (
                        f"{job}: chunk {job.chunk} is sharded here; remove one of both"
                    )
            case CollectiveKind.REDUCE_GRAD:
                if was_reducing:
                    return f"{job} comes before the {REDUCE_WAIT} of the one before"
                if self.to_reduce is None:
                    return f"{job}: no W or BW of chunk {job.chunk} comes before it"
                self.to_reduce, self.is_reducing = None, True
            case CollectiveKind.REDUCE_WAIT:
                self.is_reducing = False
                if not was_reducing:
                    return f"{job}: no {job.chunk}{REDUCE_GRAD} runs"
        if isinstance(job, Pass) and W in kind_of(job).work:
            self.to_reduce = job
        if was_sharded and State.PARAMETERS in kind_of(job).awaits:
            return (
                f"{job} needs the parameters of chunk {job.chunk}, which are sharded "
                f"here; put {job.chunk}{UNSHARD} before it"
            )
        return None


def _collective_breaches(order: Sequence[Job]) -> Iterator[tuple[int, str]]:
    """Find breaches of the rules of collectives: the column, and the reason.

        0UNSHARD 0F0 0B0 0RESHARD 0W0 0REDUCE_GRAD .. 0REDUCE_WAIT O
        |<-- F, B and BW in here -->|     after W |<--- before O --->|

    All processes that hold a stage run the same order, so they start their collectives
    in the same order too: what one waits for the others have started, or will.
    """
    jobs = [job for job in order if isinstance(job, Collective)]
    gathered = {job.chunk for job in jobs if job.kind is UNSHARD}
    reduces = any(job.kind in (REDUCE_GRAD, REDUCE_WAIT) for job in jobs)
    chunks: dict[int, _Chunk] = {}
    last = len(order)
    for column, job in enumerate(order):
        if isinstance(job, Step):
            last = column
        for member in members_of(job):
            if isinstance(member, Pass | Collective):
                chunk = chunks.setdefault(
                    member.chunk, _Chunk(member.chunk in gathered)
                )
                if reason := chunk.run(member):
                    yield column, reason
    for number, chunk in sorted(chunks.items()) if reduces else ():
        if chunk.to_reduce is not None:
            yield last, f"{number}{REDUCE_GRAD} is missing after {chunk.to_reduce}"
        if chunk.is_reducing:
            yield last, f"{number}{REDUCE_WAIT} is missing"


def check_parts(placement: Placement, orders: Orders, rows: Orders) -> None:
    """Check that rows lay out the passes of valid orders, and can be run.

    Raises:
        ScheduleError: a part is missing, doubled or out of turn, passes start in
            another order, or the stages wait for one another.
    """
    if len(rows) != len(orders):
        raise ScheduleError(f"parts has {len(rows)} rows for {len(orders)} stages")
    try:
        for breach in _part_breaches(orders, rows):
            raise mistake(rows, *breach)
        JobGraph(rows, unit_times(placement, rows)).run()
    except ScheduleError as error:
        raise ScheduleError(f"parts, {error}") from None


def _part_breaches(orders: Orders, rows: Orders) -> Iterator[tuple[int, int, str]]:
    """Find breaches of the rules of parts: row, column, and the reason."""
    lanes = lanes_of_parts(rows)
    for stage, row in enumerate(rows):
        parts = [(x, job) for x, job in enumerate(row) if isinstance(job, Part)]
        for column, job in parts:
            if lanes[job.kind, job.chunk][job.index] is not job.lane:
                yield stage, column, f"{job}: this part is on another lane elsewhere"
    counts = {key: len(lane_of_part) for key, lane_of_part in lanes.items()}
    for stage, (order, row) in enumerate(zip(orders, rows, strict=True)):
        for column, reason in _row_breaches(order, row, counts):
            yield stage, column, reason


def _row_breaches(
    order: Sequence[Job],
    row: Sequence[Job],
    counts: dict[tuple[PassKind, int], int],
) -> Iterator[tuple[int, str]]:
    """A row has all parts of the order's passes in turn, and its other jobs."""
    started: list[Job] = []
    at_any_time: set[Job] = set()  # W's of BW's
    for member in (member for job in order for member in members_of(job)):
        if isinstance(member, Pass) and member.kind is BW:
            chunk, i = member.chunk, member.microbatch
            started.append(Pass(B, chunk, i))
            if (W, chunk) in counts:
                at_any_time.add(Pass(W, chunk, i))
        else:
            started.append(member)
    starts, done = iter(started), dict[Job, int]()
    for column, job in enumerate(row):
        of: Job = job.of if isinstance(job, Part) else job
        index = job.index if isinstance(job, Part) else 0
        if isinstance(of, Pass) and not isinstance(job, Part):
            yield column, f"{job} is no part, such as {job}.0"
        before = done.get(of, 0)
        if index != before:
            yield column, f"{job} comes where part {before} of {of} must; reorder them"
        done[of] = before + 1
        if index == 0 and of not in at_any_time:
            due = next(starts, None)
            if due != of:
                yield (
                    column,
                    f"{job} starts where the order has {due or 'nothing more'}",
                )
    missing = next((of for of in at_any_time if of not in done), next(starts, None))
    if missing is not None:
        yield len(row), f"{missing} is missing"
    for of, n in done.items():
        if isinstance(of, Pass) and n < counts[of.kind, of.chunk]:
            yield len(row), f"part {n} of {of} is missing"


def check_memory(orders: Orders, costs: ChunkCosts) -> None:
    """No stage may exceed its limit (with a margin for rounding).

    Raises:
        ScheduleError: the message marks the job, or the part, that needs too much.
    """
    for stage, order in enumerate(orders):
        limit = costs.limit[stage]
        during = held_during(order, costs, stage=stage)
        if max(during, default=0.0) <= limit:
            continue
        for column, held in enumerate(during):
            if held > limit * (1 + 1e-9):
                need, most = format_memory(held), format_memory(limit)
                raise mistake(
                    orders,
                    stage,
                    column,
                    f"{order[column]} needs memory {need}, over the limit {most} of "
                    f"stage {stage}; run a B or W first",
                )


def check_layers(
    placement: Placement,
    split: Sequence[int] | None,
    recompute: Sequence[Recompute] | None,
) -> None:
    """Check that split and recompute have one entry a chunk that can be one.

    Raises:
        RequestError: it names the entry.
    """
    n = placement.n_chunks
    for name, entries in (("split", split), ("recompute", recompute)):
        if entries is not None and len(entries) != n:
            raise RequestError(f"{name} has {len(entries)} entries for {n} chunks")
    for chunk, layers in enumerate(split or ()):
        if layers < 1:
            raise RequestError(f"split[{chunk}] is {layers}; a chunk has 1 or more")
    for chunk, which in enumerate(recompute or ()):
        most = None if split is None else split[chunk]
        for layer in () if isinstance(which, bool) else which:
            if layer < 0 or (most is not None and layer >= most):
                raise RequestError(
                    f"recompute[{chunk}] names layer {layer} of a chunk of "
                    f"{'some' if most is None else most} layers, counted from 0"
                )
