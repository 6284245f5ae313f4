"""The order of jobs on every stage; an invalid one cannot exist.

Each rule is one linear scan; the first breach is reported. Where passes have parts,
each stage has its order of passes, and a row of their parts:

    order    0F0 0F1 0B0                       passes, in the order of their starts
    row      0F0.0 0F0.1~ 0F1.0 0F0.2 ..       their parts, in the order of starts
    compute  0F0.0        0F1.0 0F0.2          what a lane runs, one after the other
    network        0F0.1~

Recompute makes B longer, and changes the memory that passes keep. Costs per chunk that
users give, measure or estimate are those without recompute; only `recomputed` computes
the others from them.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product

from zbpp.core.costs import ChunkCosts, Costs
from zbpp.core.errors import RequestError, ScheduleError
from zbpp.core.graph import JobGraph, LanesOfParts, lanes_of_parts, unit_times
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
    StageKind,
    State,
    Step,
    Value,
    input_of,
    kind_of,
    members_of,
    output_of,
    passes_in,
    place_of,
)
from zbpp.core.layers import chunk_layers
from zbpp.core.placement import Placement, ranges_of
from zbpp.core.text import mistake
from zbpp.core.timeline import Slot, Timeline

Order = tuple[Job, ...]
"""The jobs of one stage, in the order in which it runs them."""

Orders = Sequence[Sequence[Job]]
Recompute = bool | tuple[int, ...]
"""All layers of a chunk, none, or these, counted from 0 in the chunk."""
F, B, W, BW = PassKind
UNSHARD, _, REDUCE_GRAD, REDUCE_WAIT = CollectiveKind


@dataclass(frozen=True)
class Schedule:
    """Orders of jobs on all stages, without times: those belong to `Timeline`.

    Args:
        name: the mode, for people.
        placement: chunk to stage.
        n_microbatches: micro-batches in a step, at least 1.
        orders: one order per stage.
        split: layers of each chunk that it was planned for; None: any.
        recompute: for each chunk True if B computes all its layers again, False, or
            the layers, counted from 0 in the chunk, that it does so with; None: none.
        parts: per stage the parts of its passes, and its other jobs, in the order of
            their starts: each lane runs those on it in this order. ``orders`` has the
            passes in the order of their starts. None: every pass in one piece.

    Raises:
        ScheduleError: a pass is missing, doubled, on a wrong stage or before its
            input; or the stages wait for one another.
        RequestError: split or recompute do not fit the chunks.
    """

    name: str
    placement: Placement
    n_microbatches: int
    orders: tuple[Order, ...]
    split: tuple[int, ...] | None = None
    recompute: tuple[Recompute, ...] | None = None
    parts: tuple[Order, ...] | None = None

    def __post_init__(self) -> None:
        check_layers(self.placement, self.split, self.recompute)
        validate(self.placement, self.n_microbatches, self.orders)
        if self.parts is not None:
            check_parts(self.placement, self.orders, self.parts)

    @property
    def n_stages(self) -> int:
        """Number of stages."""
        return self.placement.n_stages

    @property
    def is_post_validated(self) -> bool:
        """True if steps are validated in the next warm-up: all stages have a V."""
        return any(isinstance(job, Check) for job in self.orders[0])

    def without(self, kind: type[Check] | type[Collective]) -> "Schedule":
        """The same without V's, or without collectives."""
        rows = (self.orders, self.parts or ())
        orders, parts = (
            tuple(tuple(job for job in row if not isinstance(job, kind)) for row in x)
            for x in rows
        )
        if orders == self.orders:
            return self
        return replace(self, orders=orders, parts=parts or None)

    def rows_for(self, times: ChunkCosts) -> tuple[Order, ...]:
        """The jobs of each stage: parts where the costs have them too, else passes.

        Raises:
            RequestError: the passes have other parts there.
        """
        if self.parts is None or not times.parts:
            return self.orders
        for chunk, parts in enumerate(times.parts):
            for kind in (F, B, W):
                has = list(self._lanes.get((kind, chunk), {}).values())
                wanted = [lane for lane, _ in parts.of(kind)]
                if has != wanted:
                    texts = (", ".join(x) or "no parts" for x in (has, wanted))
                    raise RequestError(
                        "the schedule runs {}, but the costs have {} for {} of chunk "
                        "{}; plan again with these costs".format(*texts, kind, chunk)
                    )
        return self.parts

    @cached_property
    def _lanes(self) -> LanesOfParts:
        return lanes_of_parts(self.parts or ())

    def recomputed_layers(self, split: Sequence[int]) -> frozenset[int]:
        """Layers of the whole model that B computes again, split into the chunks."""
        recomputed: set[int] = set()
        pairs = zip(self.recompute or (), ranges_of(split), strict=False)
        for chunk, (which, here) in enumerate(pairs):
            chosen = () if isinstance(which, bool) else which
            layers = here if which is True else [here.start + i for i in chosen]
            if layers and max(layers) >= here.stop:
                raise RequestError(
                    f"layer {max(chosen)} of chunk {chunk} is to be recomputed, but "
                    f"the chunk has {len(here)} layers; plan for this split, or give "
                    f"the schedule's: {list(self.split or ()) or 'it has none'}"
                )
            recomputed.update(layers)
        return frozenset(recomputed)

    @property
    def recomputing(self) -> frozenset[int]:
        """Chunks whose B computes layers again."""
        which = self.recompute or ()
        return frozenset(chunk for chunk, layers in enumerate(which) if layers)

    def timeline(self, rows: Sequence[Sequence[Slot]]) -> Timeline:
        """Make a timeline of the jobs of a step, of each stage in its order.

        RESHARD and REDUCE_WAIT take no time, and are left out.
        """
        slots = tuple(
            tuple(slot for slot in row if KINDS[slot.job.kind].times) for row in rows
        )
        return Timeline(
            self.name, self.placement, self.n_microbatches, slots, self.recomputing
        )

    def runs(self, kind: PassKind) -> bool:
        """True if there is a pass of this kind."""
        return any(
            part.kind is kind
            for order in self.orders
            for job in order
            for part in passes_in(job)
        )


def recomputed(costs: Costs, schedule: Schedule) -> Costs:
    """Costs of a schedule's passes, including its recompute.

    Of a chunk whose layers are recomputed in part, all layers count as equal. Without
    ``m_r``, and with no limit to keep, a part that is recomputed leaves nothing.

    Args:
        costs: of the chunks without recompute.
        schedule: names what is recomputed; without that the costs stay as they are.

    Raises:
        RequestError: the costs do not fit the placement; m_r is missing where there is
            a limit; a chunk is recomputed in part and its layers are not known; or its
            parts are not those of as many equal layers.
    """
    if schedule.recompute is None or not any(schedule.recompute):
        return costs
    split = schedule.split or (1,) * schedule.placement.n_chunks
    if schedule.split is None and any(
        not isinstance(which, bool) for which in schedule.recompute
    ):
        raise RequestError(
            f"{schedule.name} recomputes some layers of a chunk, and does not name how "
            "many it has; plan it with --layers, so that it has a split"
        )
    layers = chunk_layers(costs, schedule.placement, split)
    again = schedule.recomputed_layers(split)
    m = schedule.n_microbatches
    return layers.on(schedule.placement, split, n_microbatches=m, recompute=again)


# ---- Rules.


def validate(placement: Placement, n_microbatches: int, orders: Orders) -> None:
    """Check all rules but that of the memory."""
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
    if not _ends(placement, n_microbatches, orders):
        JobGraph(orders, Costs().on(placement)).run()  # names a deadlock


def _ends(placement: Placement, n_microbatches: int, orders: Orders) -> bool:
    """True if all passes can run, whatever time they take; False: the graph decides.

    A byte for each value takes the place of its time, as a plan has millions of passes.
    """
    n_chunks = placement.n_chunks
    is_there: dict[Value, bytearray] = defaultdict(lambda: bytearray(n_microbatches))
    values = {kind: list[tuple[bytearray | None, ...]]() for kind in PassKind}
    for kind, chunk in product(PassKind, range(n_chunks)):
        first = Pass(kind, chunk, 0)
        both = input_of(first, n_chunks), output_of(first, n_chunks)
        values[kind].append(tuple(None if x is None else is_there[x] for x in both))
    n_done, to_try = [0] * len(orders), [*range(len(orders))][::-1]
    while to_try:
        stage = to_try.pop()
        order, before = orders[stage], n_done[stage]
        for column in range(before, len(order)):
            job = order[column]
            if job.__class__ is Pass:
                read, written = values[job.kind][job.chunk]
                if read is not None and not read[job.microbatch]:
                    break
                if written is not None:
                    written[job.microbatch] = 1
            elif not isinstance(job, Step | Check):
                return False
        else:
            column = len(order)
        if column > before:
            n_done[stage] = column
            to_try += placement.neighbours_of[stage]
    return n_done == [*map(len, orders)]


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

    Return its jobs that are no passes.
    """
    order = orders[stage]
    # A byte for each micro-batch, as a plan has millions of jobs; some of more than
    # there are jobs is missing anyway.
    size = min(n_microbatches, len(order) + 1)
    done = {chunk: bytearray(size) for chunk in placement.chunks_of[stage]}
    others: set[Job] = set()
    is_over = False
    for column, job in enumerate(order):
        if job.__class__ is Pass and not is_over:  # most jobs by far
            work, i = done.get(job.chunk), job.microbatch
            before, after = _DONE[job.kind]
            if work is not None and 0 <= i < size and work[i] == before:
                work[i] = after
                continue
        for member in members_of(job):
            reason = None
            if member.__class__ is Pass:
                work, i = done.get(member.chunk), member.microbatch
                before, after = _DONE[member.kind]
                if work is None or not 0 <= i < size:
                    reason = _misplaced(member, placement, n_microbatches, stage)
                elif work[i] != before:
                    reason = _out_of_turn(member, work[i], order[:column])
                else:
                    work[i] = after
            else:
                reason = _misplaced(member, placement, n_microbatches, stage)
                reason = reason or _untimely(member, order, others, done)
            if is_over and not reason:
                reason = (
                    f"{member} comes after O; the optimizer step must be the last job"
                )
            if reason:
                raise mistake(orders, stage, column, reason)
        if job.__class__ is not Pass:
            others.add(job)
            is_over |= isinstance(job, Step)
    for chunk, work in done.items():
        if work.count(_ALL_DONE) < n_microbatches:
            i = next(i for i, done_of_it in enumerate(work) if done_of_it < _ALL_DONE)
            reason = f"{_first_to_do(chunk, i, work[i])} is missing"
            raise mistake(orders, stage, len(order), reason)
    if any(isinstance(job, Collective) for job in others):
        for column, reason in _state_breaches(order):
            raise mistake(orders, stage, column, reason)
    return others


def _misplaced(
    job: Job, placement: Placement, n_microbatches: int, stage: int
) -> str | None:
    """Explain why a job is none of this stage's; None if it is."""
    place = place_of(job)
    if isinstance(job.kind, StageKind):
        if place != stage:
            return f"{job} of stage {place} is on stage {stage}"
        return None
    if not 0 <= place < placement.n_chunks:
        return f"{job}: the chunks are 0 to {placement.n_chunks - 1}"
    if isinstance(job, Pass) and not 0 <= job.microbatch < n_microbatches:
        return f"{job}: the micro-batches are 0 to {n_microbatches - 1}"
    home = placement.stage_of[place]
    if home != stage:
        return (
            f"{job} is on stage {stage}, but chunk {place} is on stage {home}; "
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
    return f"{job} comes before {_first_to_do(chunk, i, done)}; swap them"


def _first_to_do(chunk: int, i: int, done: int) -> Pass:
    return Pass(next(kind for kind in _WORK if not done & _BIT[kind]), chunk, i)


def _untimely(
    job: Job, order: Sequence[Job], others: set[Job], done: Mapping[int, bytearray]
) -> str | None:
    """Explain why a job that is no pass cannot come now; None if it can."""
    if isinstance(job.kind, StageKind) and job in others:
        return f"{job} repeats {job} of column {order.index(job)}; remove one"
    if isinstance(job, Check) and max(map(max, done.values())) > _BIT[F]:
        return "V must come before the first backward pass of its stage"
    return None


def _check_all_have(orders: Orders, placement: Placement, others: set[Job]) -> None:
    """All stages step, or none does (then the caller steps); V's, UNSHARDs alike."""
    for kind in (UNSHARD, REDUCE_GRAD, StageKind.STEP, StageKind.CHECK):
        is_stage = isinstance(kind, StageKind)
        places = range(placement.n_stages if is_stage else placement.n_chunks)
        have = {place_of(job) for job in others if job.kind is kind}
        lack = next((place for place in places if place not in have), None)
        if have and lack is not None:
            stage = lack if is_stage else placement.stage_of[lack]
            name = f"{'' if is_stage else lack}{kind}"
            place = f"{'stage' if is_stage else 'chunk'} {min(have)}"
            reason = f"{name} is missing, though {place} has one"
            raise mistake(orders, stage, len(orders[stage]), reason)


def _state_breaches(order: Sequence[Job]) -> Iterator[tuple[int, str]]:
    """Find breaches of the rules of collectives: the column, and the reason.

        0UNSHARD 0F0 0B0 0RESHARD 0W0 0REDUCE_GRAD .. 0REDUCE_WAIT O
        |<-- F, B and BW in here -->|     after W |<--- before O --->|

    A job needs the states that it awaits or ends (`KINDS`), and one that a collective
    sets must have ended before. Parameters that no UNSHARD gathers are always there.

    All replicas of a stage run the same order, so they start their collectives in the
    same order too: whatever a replica waits for, the others have started, or will.
    """
    jobs = [job for job in order if isinstance(job, Collective)]
    adds_up = any(job.kind in (REDUCE_GRAD, REDUCE_WAIT) for job in jobs)
    at_end = (State.GRADIENTS, State.SUM) if adds_up else ()
    gathered = {job.chunk for job in jobs if job.kind is UNSHARD}
    there: dict[tuple[State, int], Job] = {}
    for column, job in enumerate(order):
        for member in members_of(job):
            if not isinstance(member, Pass | Collective):
                continue
            kind, chunk = kind_of(member), member.chunk
            for state in dict.fromkeys((*kind.awaits, kind.ends)):
                is_whole = state is State.PARAMETERS and chunk not in gathered
                if state and not is_whole and (state, chunk) not in there:
                    setters = " or ".join(f"{chunk}{x}" for x in _SETTERS[state])
                    yield (
                        column,
                        f"{member} needs the {state} of chunk {chunk}; put {setters} "
                        "before it",
                    )
            if kind.ends:
                there.pop((kind.ends, chunk), None)
            if kind.sets:
                before = there.get((kind.sets, chunk))
                if isinstance(member, Collective) and before:
                    end = f"{chunk}{_ENDERS[kind.sets]}"
                    yield column, f"{member} comes after {before} without {end} between"
                there[kind.sets, chunk] = member
    for (state, chunk), job in sorted(there.items()):
        if state in at_end:
            last = len(order) - isinstance(order[-1], Step)
            yield last, f"{chunk}{_ENDERS[state]} is missing after {job}"


_SETTERS = {state: [x for x in KINDS if KINDS[x].sets is state] for state in State}
_ENDERS = {row.ends: kind for kind, row in KINDS.items() if row.ends}


def check_parts(placement: Placement, orders: Orders, rows: Orders) -> None:
    """Check that rows lay out the passes of valid orders, and can be run."""
    if len(rows) != len(orders):
        raise ScheduleError(f"parts has {len(rows)} rows for {len(orders)} stages")
    lanes = lanes_of_parts(rows)
    try:
        for stage, (order, row) in enumerate(zip(orders, rows, strict=True)):
            for column, reason in _part_breaches(order, row, lanes):
                raise mistake(rows, stage, column, reason)
        JobGraph(rows, unit_times(placement, rows)).run()
    except ScheduleError as error:
        raise ScheduleError(f"parts, {error}") from None


_WHOLE = {0: Lane.COMPUTE}


def _part_breaches(
    order: Sequence[Job], row: Sequence[Job], lanes: LanesOfParts
) -> Iterator[tuple[int, str]]:
    """A row has all parts of the order's passes in turn, and its other jobs.

    The B of a BW begins where the order has that, its W at any time.
    """
    jobs: list[Job] = []
    at_any_time: set[Job] = set()
    for member in chain.from_iterable(map(members_of, order)):
        if isinstance(member, Pass) and member.kind is BW:
            b, w = (Pass(kind, member.chunk, member.microbatch) for kind in (B, W))
            jobs.append(b)
            at_any_time |= {w} if (W, w.chunk) in lanes else set()
        else:
            jobs.append(member)
    starts = iter(jobs)
    to_come: dict[Job, list[Job]] = {}  # parts of the passes that have begun
    for column, job in enumerate(row):
        of: Job = job.of if isinstance(job, Part) else job
        if of not in to_come:
            to_come[of] = [of]
            if isinstance(of, Pass):
                of_kind = sorted(lanes.get((of.kind, of.chunk), _WHOLE).items())
                to_come[of] = [Part(of, index, lane) for index, lane in of_kind]
            if of not in at_any_time and (due := next(starts, None)) != of:
                what = due or "nothing more"
                yield column, f"{job} starts where the order has {what}"
        if not to_come[of]:
            yield column, f"{job} comes once more"
        elif (due := to_come[of].pop(0)) != job:
            yield column, f"{job} comes where {due} must; reorder them"
    missing = [*chain.from_iterable(to_come.values()), *(at_any_time - set(to_come))]
    for job in (*missing, *starts):
        yield len(row), f"{job} is missing"


def check_layers(
    placement: Placement,
    split: Sequence[int] | None,
    recompute: Sequence[Recompute] | None,
) -> None:
    """Check that split and recompute have one entry a chunk that can be one."""
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
