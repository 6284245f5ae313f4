"""The rules of a schedule. Each is one linear scan; the first breach is reported.

Where passes have parts, each stage has its order of passes, and a row of their parts:

    order    0F0 0F1 0B0                       passes, in the order of their starts
    row      0F0.0 0F0.1~ 0F1.0 0F0.2 ..       their parts, in the order of theirs
    compute  0F0.0        0F1.0 0F0.2          what a lane runs, one after the other
    network        0F0.1~
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from zbpp.core.amounts import format_memory
from zbpp.core.costs.chunks import ChunkCosts
from zbpp.core.costs.held import held_during
from zbpp.core.costs.parts import Parts
from zbpp.core.costs.table import Costs
from zbpp.core.errors import RequestError, ScheduleError
from zbpp.core.graph import JobGraph
from zbpp.core.jobs import (
    KINDS,
    Check,
    Collective,
    CollectiveKind,
    Job,
    Lane,
    Part,
    Pass,
    PassKind,
    Scope,
    State,
    Step,
    kind_of,
    members_of,
    passes_in,
    place_of,
    reads,
    stage_of,
)
from zbpp.core.placement import Placement
from zbpp.core.text import mistake

__all__ = [
    "Recompute",
    "check_layers",
    "check_memory",
    "check_parts",
    "unit_times",
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
    all_plain = True
    for stage, order in enumerate(orders):
        if _is_plain(order, placement, stage, n_microbatches=n_microbatches):
            continue
        all_plain = False
        seen: dict[Job, int] = {}
        for column, job in enumerate(order):
            parts = members_of(job)
            for part in parts:
                reason = (
                    _misplaced(part, placement, n_microbatches, stage)
                    or _repeated(part, seen)
                    or _untimely(part, seen, placement)
                )
                if reason:
                    raise mistake(orders, stage, column, reason)
            seen |= dict.fromkeys(parts, column)
        reason = _missing(seen, placement, n_microbatches, stage)
        if reason:
            raise mistake(orders, stage, len(order), reason)
        breach = _collective_breach(order)
        if breach:
            column, reason = breach
            raise mistake(orders, stage, column, reason)
    if not all_plain:
        _check_equal_collectives(orders, placement)
    _check_steps(orders)
    JobGraph(orders, Costs().on(placement)).run()  # no stages wait for one another


_WORK = (F, B, W)  # in the order in which it is done for each micro-batch


def _before_and_after(kind: PassKind) -> tuple[int, int]:
    """The work done for a micro-batch around a pass: one bit each of F, B and W."""
    bits = [1 << _WORK.index(work) for work in KINDS[kind].work]
    return bits[0] - 1, bits[0] - 1 + sum(bits)


_DONE = {kind: _before_and_after(kind) for kind in PassKind}
_ALL_DONE = 7


def _is_plain(
    order: Sequence[Job], placement: Placement, stage: int, *, n_microbatches: int
) -> bool:
    """True if a stage does each pass once, F before B before W, then at most a Step.

    A quick look at orders of millions of jobs, one byte for each micro-batch of each
    chunk. All others are looked at job by job, to find the mistake and to explain it.
    """
    n_passes = len(order)
    if order and order[-1] == Step(stage):
        n_passes -= 1
    chunks = placement.chunks_of[stage]
    if n_passes < 2 * n_microbatches * len(chunks):  # F and BW: not all are there
        return False
    states = {chunk: bytearray(n_microbatches) for chunk in chunks}
    n_finished = 0
    for job in islice(order, n_passes):
        if job.__class__ is not Pass:
            return False
        state = states.get(job.chunk)
        before, after = _DONE[job.kind]
        i = job.microbatch
        if state is None or not 0 <= i < n_microbatches or state[i] != before:
            return False
        state[i] = after
        n_finished += after == _ALL_DONE
    return n_finished == n_microbatches * len(states)


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


def _repeated(job: Job, seen: dict[Job, int]) -> str | None:
    """Explain that the work of a job is done already; None if not."""
    if kind_of(job).scope is Scope.CHUNK:  # it may come once more: see its own rules
        return None
    doers: list[Job] = [job]
    if isinstance(job, Pass):
        work = set(kind_of(job).work)
        doers += [
            Pass(kind, job.chunk, job.microbatch)
            for kind in PassKind
            if work.intersection(KINDS[kind].work)
        ]
    for doer in doers:
        if doer in seen:
            return f"{job} repeats {doer} of column {seen[doer]}; remove one"
    return None


def _untimely(job: Job, seen: dict[Job, int], placement: Placement) -> str | None:
    """Explain that a job comes before its input, or after O; None if not."""
    if Step(stage_of(job, placement)) in seen:
        return f"{job} comes after O; the optimizer step must be the last job"
    if isinstance(job, Check):
        if any(
            isinstance(seen_job, Pass) and seen_job.kind is not F for seen_job in seen
        ):
            return "V must come before the first backward pass of its stage"
        return None
    if not isinstance(job, Pass):
        return None
    for value in reads(job, placement.n_chunks):
        if value.chunk == job.chunk:
            kind = next(kind for kind in PassKind if value.what in KINDS[kind].writes)
            writer = Pass(kind, job.chunk, job.microbatch)
            if writer not in seen:
                return f"{job} comes before {writer}; swap them"
    return None


def _missing(
    seen: dict[Job, int], placement: Placement, n_microbatches: int, stage: int
) -> str | None:
    """Name a pass that the row ends without; None if it has all."""
    for chunk in placement.chunks_of[stage]:
        for i in range(n_microbatches):
            forward, backward, weight, joint = (
                Pass(kind, chunk, i) for kind in (F, B, W, BW)
            )
            if forward not in seen:
                return f"{forward} is missing"
            if joint not in seen and backward not in seen:
                return f"{backward} (with {weight}, or {joint}) is missing"
            if joint not in seen and weight not in seen:
                return f"{weight} is missing"
    return None


@dataclass
class _Chunk:
    """State of a chunk along an order."""

    is_sharded: bool
    to_reduce: Pass | None = None
    """Its last weight gradient that no REDUCE_GRAD has added up."""
    is_reducing: bool = False


def _collective_breach(order: Sequence[Job]) -> tuple[int, str] | None:
    """Find the first breach of the rules of collectives; its column, and the reason.

        0UNSHARD 0F0 0B0 0RESHARD 0W0 0REDUCE_GRAD .. 0REDUCE_WAIT O
        |<-- F, B and BW in here -->|     after W |<--- before O --->|

    All processes that hold a stage run the same order, so they start their collectives
    in the same order too: what one waits for the others have started, or will.
    """
    jobs = [job for job in order if isinstance(job, Collective)]
    if not jobs:
        return None
    gathered = {job.chunk for job in jobs if job.kind is UNSHARD}
    reduces = any(job.kind in (REDUCE_GRAD, REDUCE_WAIT) for job in jobs)
    chunks: dict[int, _Chunk] = {}
    for column, job in enumerate(order):
        reason = _unfinished(chunks) if isinstance(job, Step) and reduces else None
        for part in passes_in(job):
            chunk = chunks.setdefault(part.chunk, _Chunk(part.chunk in gathered))
            reason = reason or _pass(part, chunk)
        if isinstance(job, Collective):
            chunk = chunks.setdefault(job.chunk, _Chunk(job.chunk in gathered))
            reason = _collective(job, chunk)
        if reason:
            return column, reason
    reason = _unfinished(chunks) if reduces else None
    return (len(order), reason) if reason else None


def _check_equal_collectives(orders: Orders, placement: Placement) -> None:
    """All chunks have an UNSHARD, or none has; REDUCE_GRADs alike."""
    for kind in (UNSHARD, REDUCE_GRAD):
        have = {
            job.chunk
            for order in orders
            for job in order
            if isinstance(job, Collective) and job.kind is kind
        }
        lack = sorted(set(range(placement.n_chunks)) - have)
        if have and lack:
            stage = placement.stage_of[lack[0]]
            raise mistake(
                orders,
                stage,
                len(orders[stage]),
                f"{lack[0]}{kind} is missing, though chunk {min(have)} has one",
            )


def _pass(job: Pass, chunk: _Chunk) -> str | None:
    """Note a pass; explain why it cannot run here."""
    if W in kind_of(job).work:
        chunk.to_reduce = job
    if State.PARAMETERS not in kind_of(job).awaits or not chunk.is_sharded:
        return None
    return (
        f"{job} needs the parameters of chunk {job.chunk}, which are sharded here; put "
        f"{job.chunk}{UNSHARD} before it"
    )


def _collective(job: Collective, chunk: _Chunk) -> str | None:
    """Note a collective; explain why it cannot run here."""
    match job.kind:
        case CollectiveKind.UNSHARD:
            was_sharded, chunk.is_sharded = chunk.is_sharded, False
            return None if was_sharded else f"{job}: chunk {job.chunk} is gathered here"
        case CollectiveKind.RESHARD:
            was_sharded, chunk.is_sharded = chunk.is_sharded, True
            if not was_sharded:
                return None
            return f"{job}: chunk {job.chunk} is sharded here; remove one of both"
        case CollectiveKind.REDUCE_GRAD:
            if chunk.is_reducing:
                return f"{job} comes before the {REDUCE_WAIT} of the one before"
            if chunk.to_reduce is None:
                return f"{job}: no W or BW of chunk {job.chunk} comes before it"
            chunk.to_reduce, chunk.is_reducing = None, True
            return None
        case CollectiveKind.REDUCE_WAIT:
            was_reducing, chunk.is_reducing = chunk.is_reducing, False
            return None if was_reducing else f"{job}: no {job.chunk}{REDUCE_GRAD} runs"


def _unfinished(chunks: dict[int, _Chunk]) -> str | None:
    """Name what a chunk lacks at the end of its step; None if nothing."""
    for number, chunk in sorted(chunks.items()):
        if chunk.to_reduce is not None:
            return f"{number}{REDUCE_GRAD} is missing after {chunk.to_reduce}"
        if chunk.is_reducing:
            return f"{number}{REDUCE_WAIT} is missing"
    return None


def _check_steps(orders: Orders) -> None:
    """All stages step, or none does (then the caller steps); Checks alike."""
    types_of = [set(map(type, order)) for order in orders]
    for kind in (Step, Check):
        have = [kind in types for types in types_of]
        if any(have) and not all(have):
            stage = have.index(False)
            raise mistake(
                orders,
                stage,
                len(orders[stage]),
                f"{kind(stage)} is missing, though stage {have.index(True)} has one",
            )


def check_parts(
    placement: Placement, n_microbatches: int, orders: Orders, rows: Orders
) -> None:
    """Check that rows lay out the passes of valid orders, and can be run.

    Raises:
        ScheduleError: a part is missing, doubled or out of turn, passes start in
            another order, or the stages wait for one another.
    """
    if len(rows) != len(orders):
        raise ScheduleError(f"parts has {len(rows)} rows for {len(orders)} stages")
    breach = next(_part_breaches(placement, n_microbatches, orders, rows), None)
    if breach is not None:
        raise ScheduleError(f"parts, {mistake(rows, *breach)}")
    try:
        JobGraph(rows, unit_times(placement, rows)).run()
    except ScheduleError as error:
        raise ScheduleError(f"parts, {error}") from None


def _part_breaches(
    placement: Placement, n_microbatches: int, orders: Orders, rows: Orders
) -> Iterator[tuple[int, int, str]]:
    """Find breaches of the rules of parts: row, column, and the reason."""
    lanes: dict[tuple[PassKind, int], dict[int, Lane]] = {}
    for stage, row in enumerate(rows):
        for column, job in enumerate(row):
            if isinstance(job, Part):
                lane_of_part = lanes.setdefault((job.kind, job.chunk), {})
                if lane_of_part.setdefault(job.index, job.lane) is not job.lane:
                    yield (
                        stage,
                        column,
                        f"{job}: this part is on another lane elsewhere",
                    )
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


def unit_times(placement: Placement, rows: Orders) -> ChunkCosts:
    """Times by which every part takes a unit, on the lanes that rows tell."""
    lanes: dict[tuple[PassKind, int], dict[int, Lane]] = {}
    for job in chain.from_iterable(rows):
        if isinstance(job, Part):
            lanes.setdefault((job.kind, job.chunk), {})[job.index] = job.lane

    def parts(kind: PassKind, chunk: int) -> tuple[tuple[Lane, float], ...]:
        part_lanes = sorted(lanes.get((kind, chunk), {}).items())
        return tuple((lane, 1.0) for _, lane in part_lanes)

    chunks = range(placement.n_chunks)
    of_chunks = tuple(Parts(parts(F, c), parts(B, c), parts(W, c)) for c in chunks)
    return Costs(parts=of_chunks).on(placement)


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
