"""Cut passes into segments, as the runtime runs a plan with parts on two lanes.

A plan with parts says what computes beside what communicates. The runtime stops a pass
where the pass itself begins to communicate, and nowhere else. So a segment runs a pass
up to there, and the next segment, of another pass, computes beside the communication:

    compute   0F0.0 0B1.1    0F0.2 0W1.0 0B1.3           planned
    network   0B1.0~ 0F0.1~  0B1.2~      0F0.3~

    segments  0B1.0~ 0F0.0 0B1.1 0F0.2 0W1.0 0B1.3 0F0.3~

A part on the network begins where the segment before it ends. It has a segment of its
own at the begin of a pass only, and at its end, where the rest of the pass is run: as
soon as the stage is free behind it.

The segments of a stage are in the order of the plan, but for three rules: one F of a
stage and one backward of a chunk are open at a time, and what begins before a V ends
before it. Where a plan has it otherwise, the pass that is open ends first. It waits for
nothing but its own communication, so no stages wait for one another in a circle.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice

from zbpp.core import (
    ChunkCosts,
    Collective,
    CollectiveKind,
    Costs,
    Job,
    Lane,
    Part,
    Pass,
    PassKind,
    Schedule,
    Segment,
    Step,
    Value,
    passes_in,
    reader,
    reads,
    writes,
)
from zbpp.core.costs.parts import PartTimes
from zbpp.core.graph import unit_times

__all__ = ["SegmentedOrders", "in_segments"]

F, B, W, BW = PassKind


@dataclass(frozen=True)
class SegmentedOrders:
    """Orders of segments with O's and V's, and when each column runs.

    A column that is waited for has a smaller number.
    """

    orders: list[list[Job | Segment]]
    starts: list[list[float]]
    ends: list[list[float]]
    numbers: list[list[int]]

    @property
    def span(self) -> float:
        """Longest time of a stage from its first start to its last end."""
        pairs = zip(self.starts, self.ends, strict=True)
        return max(end[-1] - start[0] for start, end in pairs)


def in_segments(
    schedule: Schedule, costs: Costs | None, *, adds_up: bool = False
) -> SegmentedOrders:
    """Cut the passes of a schedule with parts. The W of a BW is a part of it.

    Without costs of parts all take equally long. Replicas that add up the gradients of
    a chunk do so behind its last W.

    Raises:
        RequestError: the costs have other parts than the schedule.
    """
    rows = schedule.parts
    assert rows is not None, "a schedule without parts has no segments"
    placement = schedule.placement
    if costs is None or costs.parts is None:
        times = unit_times(placement, rows)
    else:
        times = costs.on(placement)
        rows = schedule.rows_for(times)
    stages = []
    for number, (order, row) in enumerate(zip(schedule.orders, rows, strict=True)):
        joint = {x for job in order for x in passes_in(job) if x.kind is BW}
        row = row if Step(number) in row else (*row, Step(number))
        stages.append(_Stage(row, joint, times, adds_up))
    written: dict[Value, float] = {}
    starts = [stage.choose(written) for stage in stages]
    numbers: list[list[int]] = [[] for _ in stages]
    n_run = count()
    while (first := min(starts)) < math.inf:
        number = starts.index(first)
        changed = {number}
        for value, end in stages[number].run().items():
            written[value] = end
            changed.add(placement.stage_of[reader(value)])
        n_new = len(stages[number].order) - len(numbers[number])
        numbers[number] += islice(n_run, n_new)
        for number in changed:
            starts[number] = stages[number].choose(written)
    assert all(stage.is_done for stage in stages), "stages wait for one another"
    return SegmentedOrders(
        [stage.order for stage in stages],
        [stage.starts for stage in stages],
        [stage.ends for stage in stages],
        numbers,
    )


@dataclass(eq=False)
class _Course:
    """A pass, and how far it has come."""

    of: Pass
    parts: PartTimes
    done: int = 0
    ready: float = 0.0
    has_ended: bool = False

    @property
    def n_left(self) -> int:
        """Segments that come behind: a W stops at every part, others at calls."""
        if self.has_ended:
            return 0
        left = self.parts[self.done :]
        if self.of.kind is W:
            return len(left)
        return [lane for lane, _ in left].count(Lane.NETWORK) + 1

    def run(self, start: float) -> tuple[Part, float, float]:
        """Go on up to the next call; its first part, its end, and the call's time."""
        first = min(self.done, len(self.parts) - 1)
        part, end = Part(self.of, first, self.parts[first][0]), start
        while self.done < len(self.parts):
            lane, time = self.parts[self.done]
            self.done += 1
            if lane is Lane.NETWORK:
                return part, end, time
            end += time
            if self.of.kind is W:
                break
        self.has_ended = self.done == len(self.parts)
        return part, end, 0.0


def _joint_parts(b: Pass, w: Pass, times: ChunkCosts) -> PartTimes:
    """The parts of a B that computes its W, too: each part behind what it needs."""
    parts = list(times.parts_of(b))
    for index, (w_lane, w_time) in enumerate(times.parts_of(w)):
        source = times.source_of(Part(w, index, w_lane))
        lane, time = parts[source]
        parts[source] = lane, time + w_time
    return tuple(parts)


class _Stage:
    """A stage that runs its parts, V and O, segment after segment.

    The backward of ``joint`` passes is in one piece.
    """

    def __init__(
        self, row: Sequence[Job], joint: set[Pass], times: ChunkCosts, adds_up: bool
    ) -> None:
        self.order: list[Job | Segment] = []
        self.starts: list[float] = []
        self.ends: list[float] = []
        self._row, self._column = row, 0
        self._times, self._n_chunks = times, times.placement.n_chunks
        self._network = 0.0  # free from then on
        self._open: list[_Course] = []
        self._courses: dict[Pass, _Course] = {}
        for of in dict.fromkeys(x.of for x in row if isinstance(x, Part)):
            chunk, i = of.chunk, of.microbatch
            b, w, full = Pass(B, chunk, i), Pass(W, chunk, i), Pass(BW, chunk, i)
            if of.kind is F or full not in joint:
                self._courses[of] = _Course(of, times.parts_of(of))
            else:
                course = _Course(full, _joint_parts(b, w, times))
                self._courses[b] = self._courses[w] = course
        due = {course.of for course in self._courses.values()}
        chunks = [x.chunk for x in due if x.kind in (W, BW)]
        self._due = Counter(chunks if adds_up else ())
        """W's and BW's to come, by chunk whose gradients are added up."""
        self._sums: list[int] = []
        self._chosen: _Course | Job | None = None
        self._start = 0.0

    @property
    def is_done(self) -> bool:
        """True if nothing is left."""
        return self._column == len(self._row)

    @property
    def _now(self) -> float:
        return self.ends[-1] if self.ends else 0.0

    def choose(self, written: Mapping[Value, float]) -> float:
        """Choose what comes next; return when it starts, infinite: nothing can."""
        now, self._chosen, self._start = self._now, None, math.inf
        for course in self._open:  # what only ends, goes first
            at = max(now, course.ready)
            if course.done == len(course.parts) and at < self._start:
                self._chosen, self._start = course, at
        chosen = self._next()
        start = math.inf if chosen is None else max(now, self._ready(chosen, written))
        if start < self._start:
            self._chosen, self._start = chosen, start
        return self._start

    def _next(self) -> _Course | Job | None:
        """What comes next in the plan, or a pass that must end before it."""
        while self._column < len(self._row):
            job = self._row[self._column]
            if not isinstance(job, Part):
                begun = (x for x in self._courses.values() if x.done)
                return next((x for x in begun if not x.has_ended), job)
            course = self._courses[job.of]
            if job.of.kind in (course.of.kind, B) and job.index >= course.done:
                return self._before(course) or course
            self._column += 1
        return None

    def _before(self, course: _Course) -> _Course | None:
        """An open pass that must go on before another one does."""
        of = course.of
        if of.kind is W:
            b = self._courses[Pass(B, of.chunk, of.microbatch)]
            is_last = course.done + 1 == len(course.parts)
            return b if is_last and not b.has_ended else None
        if course.done:
            return None
        for other in self._open:
            both = other.of.kind is F, of.kind is F
            if all(both) or (not any(both) and other.of.chunk == of.chunk):
                return other
        return None

    def _ready(self, chosen: _Course | Job, written: Mapping[Value, float]) -> float:
        """When the next stretch of a pass has what it needs."""
        if not isinstance(chosen, _Course):
            return 0.0
        of = chosen.of
        if chosen.done or of.kind is W:
            return chosen.ready
        arrivals = [
            written.get(value, math.inf) + self._times.delay(value.chunk, of.chunk)
            for value in reads(of, self._n_chunks)
        ]
        return max(arrivals, default=0.0)

    def run(self) -> dict[Value, float]:
        """Run what was chosen; return what it writes, and when that is there."""
        chosen, start = self._chosen, self._start
        assert chosen is not None
        if not isinstance(chosen, _Course):
            self._column += 1
            if isinstance(chosen, Step):
                for chunk in self._sums:
                    wait = Collective(CollectiveKind.REDUCE_WAIT, chunk)
                    self._note(wait, start, start)
            self._note(chosen, start, start)
            return {}
        of, begins = chosen.of, chosen.done == 0
        part, end, call = chosen.run(start)
        ends = chosen.has_ended
        if begins and of.kind is not W:
            self._open.append(chosen)
        if begins and ends:
            self._note(of, start, end)
        else:
            # until its end a W does no more than its B has left for it
            begins = ends if of.kind is W else begins
            self._note(Segment(part, begins, chosen.n_left), start, end)
        if not ends:
            if of.kind is not W:
                chosen.ready = self._network = max(end, self._network) + call
            return {}
        if of.kind is not W:
            self._open.remove(chosen)
        if of.kind in (W, BW) and self._due:
            self._due[of.chunk] -= 1
            if not self._due[of.chunk]:
                self._sums.append(of.chunk)
                self._note(Collective(CollectiveKind.REDUCE_GRAD, of.chunk), end, end)
        return dict.fromkeys(writes(of, self._n_chunks), end)

    def _note(self, entry: Job | Segment, start: float, end: float) -> None:
        self.order.append(entry)
        self.starts.append(start)
        self.ends.append(end)
