"""The rule "when can this job start", and all orders run by it.

The simulator and the deadlock check run on it, whatever jobs there are. Planners inline
it for speed, and `_time_passes` is the same for orders of passes alone: each copy is
tested to give the same times.
"""

from collections.abc import Iterator, Sequence

from zbpp.core.costs.chunks import ChunkCosts
from zbpp.core.errors import RequestError
from zbpp.core.jobs import (
    KINDS,
    Job,
    Lane,
    Part,
    Pass,
    PassKind,
    Scope,
    State,
    Step,
    Value,
    bulk_construct,
    gc_paused,
    is_beside,
    kind_of,
    lanes_of,
    members_of,
    passes_in,
    place_of,
    reads,
    stage_of,
    writes,
)
from zbpp.core.placement import Placement
from zbpp.core.timeline import Slot

__all__ = [
    "Clock",
    "by_clock",
    "can_finish",
    "off_lane",
    "replay",
    "replay_until_stuck",
    "step_behind_barrier",
]


class Clock:
    """Time of a pipeline that grows job by job.

    A job starts when its stage has come to it, its lanes are free, and all that it
    reads and awaits is there (`zbpp.core.jobs.KINDS`). It occupies its lanes until it
    ends. So an UNSHARD, which occupies the network alone, goes on beside the next jobs
    of its stage. A value that goes from stage to stage is there after its message.

    Of a pass in parts, each part starts when its lane is free and the part before it
    has ended; the first one when all that the pass reads is there, and not before the
    first one of the pass before it on the stage. What the pass writes is there when the
    last has ended. But where W has a part for each part of B that computes, it needs
    that one alone (`ChunkCosts.source_of`). A BW has the parts of a B and of a W.

    Args:
        times: of the jobs.
        n_microbatches: in the iteration that grows.
        free: from when on each stage may work, none before 0; None: from 0.
        known: when each stage's Check has what it needs; None: at 0.
    """

    def __init__(
        self,
        times: ChunkCosts,
        *,
        n_microbatches: int,
        free: Sequence[float] | None = None,
        known: Sequence[float] | None = None,
    ) -> None:
        self._times = times
        self._placement = times.placement
        self._n_chunks = self._placement.n_chunks
        self._written: dict[Value, float] = {}
        self._states: dict[tuple[State, int], float] = {}
        self._gradients_due = self._n_chunks * n_microbatches
        self._last_gradient = 0.0
        starts = [0.0] * self._placement.n_stages
        self._known = starts if known is None else list(known)
        self.free = list(starts if free is None else free)
        """End of the last job of each stage."""
        self._lanes: dict[Lane, list[float]] = {lane: list(starts) for lane in Lane}
        self._lanes[Lane.COMPUTE] = self.free
        self._lanes[Lane.NETWORK] = list(self.free)
        self._begun = list(starts)  # of each stage's last pass in parts
        self._part_ends: dict[tuple[Pass, int], float] = {}

    def arrival(self, job: Job) -> float | None:
        """Time at which all inputs of a job are there; None if one is not computed."""
        arrival = 0.0
        if isinstance(job, Part):
            for source in self._sources(job):
                end = self._part_ends.get(source)
                if end is None:
                    return None
                arrival = max(arrival, end)
            if job.index or job.kind is PassKind.W:
                return arrival
        for part in members_of(job):
            for state in kind_of(part).awaits:
                set_at = self._set_at(state, place_of(part))
                if set_at is None:
                    return None
                arrival = max(arrival, set_at)
        for part in passes_in(job):
            for value in reads(part, self._n_chunks):
                written = self._written.get(value)
                if written is None:
                    return None
                delay = self._times.delay(value.chunk, part.chunk)
                arrival = max(arrival, written + delay)
        return arrival

    def _sources(self, part: Part) -> Iterator[tuple[Pass, int]]:
        """The parts that must have ended before one starts: same stage, same pass."""
        if part.index:
            yield part.of, part.index - 1
        if part.kind is PassKind.W:
            yield (
                Pass(PassKind.B, part.chunk, part.of.microbatch),
                self._times.source_of(part),
            )

    def _set_at(self, state: State, place: int) -> float | None:
        """Time at which a state of a chunk or stage is there; None: not yet known."""
        if state is State.ALL_GRADIENTS:
            return self._last_gradient if self._gradients_due == 0 else None
        if state is State.VERDICT:
            return self._known[place]
        return self._states.get((state, place), 0.0)

    def start(self, job: Job) -> float | None:
        """Time at which a job can start; None if an input is not computed."""
        arrival = self.arrival(job)
        if arrival is None:
            return None
        stage = self.stage(job)
        if isinstance(job, Part):
            begun = 0.0 if job.index else self._begun[stage]
            return max(arrival, begun, self._lanes[job.lane][stage])
        lanes = kind_of(job).lanes
        return max(arrival, self.free[stage], *(self._lanes[x][stage] for x in lanes))

    def run(self, job: Job) -> Slot | None:
        """Append a job to its stage at the earliest time; None if it cannot start."""
        start = self.start(job)
        if start is None:
            return None
        end = start + self._times.of(job)
        for lane in lanes_of(job):
            self._lanes[lane][self.stage(job)] = end
        if isinstance(job, Part):
            if job.index == 0:
                self._begun[self.stage(job)] = start
            self._part_ends[job.of, job.index] = end
            if job.index + 1 < len(self._times.parts_of(job.of)):
                return Slot(job, start, end)
        for part in passes_in(job):
            for value in writes(part, self._n_chunks):
                self._written[value] = end
        for done in self._done_with(job):
            kind = kind_of(done)
            if kind.sets is not None:
                self._states[kind.sets, place_of(done)] = end
            self._gradients_due += kind.gradients_due
            if kind.gradients_due < 0:
                self._last_gradient = max(self._last_gradient, end)
        return Slot(job, start, end)

    def _done_with(self, job: Job) -> tuple[Job, ...]:
        """The jobs that end with a job: with a B that cannot be split, its W too."""
        if isinstance(job, Part) and job.kind is PassKind.B:
            w = Pass(PassKind.W, job.chunk, job.of.microbatch)
            return (job.of,) if self._times.parts_of(w) else (job.of, w)
        return members_of(job)

    def stage(self, job: Job) -> int:
        """The stage that runs a job."""
        return stage_of(job, self._placement)


def replay(
    orders: Sequence[Sequence[Job]],
    times: ChunkCosts,
    *,
    n_microbatches: int,
    free: Sequence[float] | None = None,
    known: Sequence[float] | None = None,
) -> list[list[Slot]]:
    """Time every job; `replay_until_stuck`, where all must come to their end.

    Raises:
        RequestError: a job never starts, as what it waits for is not in the orders.
    """
    rows = replay_until_stuck(
        orders, times, n_microbatches=n_microbatches, free=free, known=known
    )
    for order, row in zip(orders, rows, strict=True):
        if len(row) < len(order):
            raise RequestError(
                f"{order[len(row)]} never starts: what it waits for is not in the "
                "orders of the stages"
            )
    return rows


def replay_until_stuck(
    orders: Sequence[Sequence[Job]],
    times: ChunkCosts,
    *,
    n_microbatches: int,
    free: Sequence[float] | None = None,
    known: Sequence[float] | None = None,
) -> list[list[Slot]]:
    """Time every job that can run; a row shorter than its order is stuck there.

    Slots of UNSHARD, REDUCE_GRAD and parts on the network are those of the lane (see
    `Clock`); `off_lane` takes them out of the rows.

    ``free`` and ``known`` say what an earlier iteration has left (see `Clock`).
    """
    timed = _time_passes(orders, times, n_microbatches=n_microbatches, free=free)
    if timed is not None:
        with gc_paused():
            return [
                bulk_construct(Slot, len(starts), job=order, start=starts, end=ends)
                for order, starts, ends in zip(orders, *timed, strict=True)
            ]
    clock = Clock(times, n_microbatches=n_microbatches, free=free, known=known)
    return by_clock(orders, clock)


def by_clock(orders: Sequence[Sequence[Job]], clock: Clock) -> list[list[Slot]]:
    """Time any jobs.

    Every stage runs as far as it can, round after round, until none moves. The order
    of these visits does not matter: a start depends only on the inputs' ends.
    """
    rows: list[list[Slot]] = [[] for _ in orders]
    moved = True
    while moved:
        moved = False
        for order, row in zip(orders, rows, strict=True):
            while len(row) < len(order):
                slot = clock.run(order[len(row)])
                if slot is None:
                    break
                row.append(slot)
                moved = True
    return rows


def off_lane(
    rows: Sequence[Sequence[Slot]],
) -> tuple[tuple[tuple[Slot, ...], ...], tuple[tuple[Slot, ...], ...]]:
    """Take what runs beside the jobs out of rows of slots: collectives, and parts.

    RESHARD and REDUCE_WAIT take no time of their own, and are left out of both. Without
    collectives and parts there are no lanes.

    Returns:
        The rows, and those on the lanes.
    """
    kinds = {slot.job.kind for row in rows for slot in row}
    has_parts = any(isinstance(slot.job, Part) for row in rows for slot in row)
    if not has_parts and all(KINDS[kind].scope is not Scope.CHUNK for kind in kinds):
        return tuple(map(tuple, rows)), ()
    kept = tuple(
        tuple(
            slot
            for slot in row
            if kind_of(slot.job).scope is not Scope.CHUNK and not is_beside(slot.job)
        )
        for row in rows
    )
    lanes = tuple(tuple(slot for slot in row if is_beside(slot.job)) for row in rows)
    return kept, lanes if any(lanes) else ()


def step_behind_barrier(
    orders: Sequence[Sequence[Job]], times: ChunkCosts, *, n_microbatches: int
) -> float:
    """Time of a step among many, optimizer included, if all stages step together.

    A step is known to be valid when the last stage has ended and the norms are summed.
    Then each stage steps, and starts the next iteration: one iteration tells the time
    of all.
    """
    passes = [[job for job in order if passes_in(job)] for order in orders]
    rows = replay(passes, times, n_microbatches=n_microbatches, free=times.optimizer)
    return max(row[-1].end for row in rows) + times.reduction


def can_finish(
    orders: Sequence[Sequence[Job]], placement: Placement, *, n_microbatches: int
) -> bool:
    """True if it is plain that no stages wait for one another; False: a replay tells.

    It is the rule without times, of F, B, W and BW: an F needs the F of the chunk
    before, a B the B of the chunk after. Each order must hold each of its passes once,
    F before B before W. Other jobs wait for none that another stage has yet to run.
    """
    forward, backward = (
        [bytearray(n_microbatches) for _ in range(placement.n_chunks)] for _ in "FB"
    )
    # The inputs, and the gradients of the losses.
    boundary = bytes([1]) * n_microbatches
    of_f, of_b = [boundary, *forward[:-1]], [*backward[1:], boundary]
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
            if job.__class__ is not Pass:
                if passes_in(job):
                    return False
                continue
            kind, chunk, i = job.kind, job.chunk, job.microbatch
            if kind is w_kind:
                continue
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


def _time_passes(
    orders: Sequence[Sequence[Job]],
    times: ChunkCosts,
    *,
    n_microbatches: int,
    free: Sequence[float] | None = None,
) -> tuple[list[list[float]], list[list[float]]] | None:
    """Starts and ends of F, B, W and BW, with a Step at most at the end of an order.

    Each job is looked at once, however the stages wait for one another: a stage is
    visited again when one that it hears from has gone on. None if there are other jobs,
    or passes of other micro-batches or stages.

    It is one loop of local names, as a plan has millions of jobs.
    """
    placement, n_chunks = times.placement, times.placement.n_chunks
    last, hops, due = n_chunks - 1, times.hops, n_chunks * n_microbatches
    nothing: list[float | None] = [None] * n_microbatches
    forward = [list(nothing) for _ in range(n_chunks)]  # ends
    gradient = [list(nothing) for _ in range(n_chunks)]
    deferred = [bytearray(n_microbatches) for _ in range(n_chunks)]
    took_f, took_b, took_w, took_bw = (
        [times.of_pass(kind, c) for c in range(n_chunks)] for kind in PassKind
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
        chunks = placement.chunks_of[stage]
        n_before, n_due, gradients_end = len(begun), due, 0.0
        for column in range(n_before, len(order)):
            job = order[column]
            if job.__class__ is not Pass:
                if job == Step(stage) and column == len(order) - 1:
                    break
                return None
            kind, chunk, i = job.kind, job.chunk, job.microbatch
            if not 0 <= i < n_microbatches or chunk not in chunks:
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
    if due == 0:
        for stage, (order, begun) in enumerate(zip(orders, starts, strict=True)):
            if len(begun) == len(order) - 1 and isinstance(order[-1], Step):
                start = max(busy[stage], last_gradient)
                begun.append(start)
                ends[stage].append(start + times.optimizer[stage])
    return starts, ends


def _neighbours(placement: Placement, stage: int) -> list[int]:
    """List the stages that a stage sends to."""
    stages = set()
    for chunk in placement.chunks_of[stage]:
        for neighbour in (chunk - 1, chunk + 1):
            if 0 <= neighbour < placement.n_chunks:
                stages.add(placement.stage_of[neighbour])
    return sorted(stages - {stage})
