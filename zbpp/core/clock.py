"""The rule "when can this job start", and all orders run by it.

The simulator and the deadlock check run on it. Planners inline it for speed: each copy
says so, and is tested to give the same times.
"""

from collections.abc import Sequence

from zbpp.core.costs import PassTimes
from zbpp.core.jobs import (
    Check,
    Collective,
    CollectiveKind,
    Job,
    Pass,
    PassKind,
    Step,
    Value,
    reads,
    writes,
)
from zbpp.core.quick import quick_rows
from zbpp.core.timeline import Slot

__all__ = ["Clock", "off_lane", "replay", "step_behind_barrier"]


class Clock:
    """Time of a pipeline that grows job by job.

    A pass starts when its stage is free and all that it reads has arrived. A Step
    stands behind a barrier: it starts when the last weight gradient of every stage
    is done, and added up. A Check needs what an earlier iteration has summed up.

    UNSHARD and REDUCE_GRAD run on a lane of their stage's own, one at a time in the
    order in which they are started; the stage goes on at once. F, B and BW wait for
    the last UNSHARD of their chunk, REDUCE_WAIT for its last REDUCE_GRAD.

    Args:
        times: of the jobs.
        n_microbatches: in the iteration that grows.
        free: from when on each stage may work, none before 0; None: from 0.
        known: when each stage's Check has what it needs; None: at 0.
    """

    def __init__(
        self,
        times: PassTimes,
        *,
        n_microbatches: int,
        free: Sequence[float] | None = None,
        known: Sequence[float] | None = None,
    ) -> None:
        self._times = times
        self._placement = times.placement
        self._n_chunks = self._placement.n_chunks
        self._written: dict[Value, float] = {}
        self._gradients_due = self._n_chunks * n_microbatches
        self._last_gradient = 0.0
        self._gathered: dict[int, float] = {}
        self._reduced: dict[int, float] = {}
        starts = [0.0] * self._placement.n_stages
        self._known = starts if known is None else list(known)
        self.free = list(starts if free is None else free)
        """End of the last job of each stage."""
        self._lane = [0.0] * self._placement.n_stages

    def arrival(self, job: Job) -> float | None:
        """Time at which all inputs of a job are there; None if one is not computed."""
        if not isinstance(job, Pass):
            return self._arrival_of_other(job)
        is_w = job.kind is PassKind.W
        arrival = 0.0 if is_w else self._gathered.get(job.chunk, 0.0)
        for value in reads(job, self._n_chunks):
            written = self._written.get(value)
            if written is None:
                return None
            arrival = max(arrival, written + self._times.delay(value.chunk, job.chunk))
        return arrival

    def _arrival_of_other(self, job: Step | Check | Collective) -> float | None:
        match job:
            case Step():
                return self._last_gradient if self._gradients_due == 0 else None
            case Check():
                return self._known[job.stage]
            case Collective(CollectiveKind.REDUCE_WAIT):
                return self._reduced.get(job.chunk, 0.0)
            case Collective(CollectiveKind.RESHARD):
                return 0.0
        return self._lane[self.stage(job)]

    def start(self, job: Job) -> float | None:
        """Time at which a job can start; None if an input is not computed."""
        arrival = self.arrival(job)
        return None if arrival is None else max(arrival, self.free[self.stage(job)])

    def run(self, job: Job) -> Slot | None:
        """Append a job to its stage at the earliest time; None if it cannot start."""
        start = self.start(job)
        if start is None:
            return None
        end = start + self._times.of(job)
        if isinstance(job, Collective):
            self._run_collective(job, end)
            return Slot(job, start, end)
        self.free[self.stage(job)] = end
        if isinstance(job, Pass):
            for value in writes(job, self._n_chunks):
                self._written[value] = end
            if job.kind in (PassKind.W, PassKind.BW):
                self._gradients_due -= 1
                self._last_gradient = max(self._last_gradient, end)
        return Slot(job, start, end)

    def _run_collective(self, job: Collective, end: float) -> None:
        stage = self.stage(job)
        match job.kind:
            case CollectiveKind.UNSHARD:
                self._lane[stage] = self._gathered[job.chunk] = end
            case CollectiveKind.REDUCE_GRAD:
                self._lane[stage] = self._reduced[job.chunk] = end
                self._gradients_due += 1
            case CollectiveKind.RESHARD:
                self.free[stage] = end
            case CollectiveKind.REDUCE_WAIT:
                self.free[stage] = end
                self._gradients_due -= 1
                self._last_gradient = max(self._last_gradient, end)

    def stage(self, job: Job) -> int:
        """The stage that runs a job."""
        if isinstance(job, Step | Check):
            return job.stage
        return self._placement.stage_of[job.chunk]


def replay(
    orders: Sequence[Sequence[Job]],
    times: PassTimes,
    *,
    n_microbatches: int,
    free: Sequence[float] | None = None,
    known: Sequence[float] | None = None,
) -> list[list[Slot]]:
    """Time every job that can run; a row shorter than its order is stuck there.

    Slots of UNSHARD and REDUCE_GRAD are those of the lane (see `Clock`); `off_lane`
    takes them out of the rows.

    ``free`` and ``known`` say what an earlier iteration has left (see `Clock`).

    Every stage runs as far as it can, round after round, until none moves. The order
    of these visits does not matter: a start depends only on the inputs' ends.

    Where there are passes and Steps only, `quick_rows` gives the same, in time that
    grows with the number of jobs alone.
    """
    found = quick_rows(orders, times, n_microbatches=n_microbatches, free=free)
    if found is not None:
        return found
    clock = Clock(times, n_microbatches=n_microbatches, free=free, known=known)
    return by_clock(orders, clock)


def by_clock(orders: Sequence[Sequence[Job]], clock: Clock) -> list[list[Slot]]:
    """Time any jobs as `replay` does."""
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
    """Take collectives out of rows of slots; return the rows, and those on the lanes.

    RESHARD and REDUCE_WAIT take no time of their own, and are left out of both. Without
    collectives there are no lanes.
    """
    kept = tuple(
        tuple(slot for slot in row if not isinstance(slot.job, Collective))
        for row in rows
    )
    lanes = tuple(
        tuple(s for s in row if isinstance(s.job, Collective) and s.job.goes_on)
        for row in rows
    )
    return kept, lanes if any(lanes) else ()


def step_behind_barrier(
    orders: Sequence[Sequence[Job]], times: PassTimes, *, n_microbatches: int
) -> float:
    """Time of a step among many, optimizer included, if all stages step together.

    A step is known to be valid when the last stage has ended and the norms are summed.
    Then each stage steps, and starts the next iteration: one iteration tells the time
    of all.
    """
    passes = [[job for job in order if isinstance(job, Pass)] for order in orders]
    rows = replay(passes, times, n_microbatches=n_microbatches, free=times.optimizer)
    return max(row[-1].end for row in rows) + times.reduction
