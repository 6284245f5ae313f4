"""Cut passes into segments: who computes next, where a plan has parts on two lanes.

A plan with parts says what computes beside what communicates. The runtime stops a pass
where the pass itself begins to communicate, and nowhere else. So a segment runs a pass
up to there, and the next segment, of another pass, computes beside the communication:

    compute   0F0.0 0B1.1    0F0.2 0W1.0 0B1.3           planned
    network   0B1.0~ 0F0.1~  0B1.2~      0F0.3~

    segments  0B1.0~ 0F0.0 0B1.1 0F0.2 0W1.0 0B1.3 0F0.3~

A part on the network begins where the segment before it ends. It has a segment of its
own at the begin of a pass only, and at its end, where the rest of the pass is run.

The runtime also has one F at a time, whose random numbers nobody else draws, and one B
of a chunk. So the plan's parts are put in order once more, all stages together: each
stage takes, of the segments that can run, the first one of the plan, and fills its time
with W's. No F starts before what the plan ends before it, so no stage holds more than
it has planned; and as the order is one in which all stages come to their ends, none
waits for another in a circle.
"""

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from zbpp.core import (
    Check,
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
    Slot,
    Step,
    Value,
    passes_in,
    reader,
    reads,
    replay,
    writes,
)
from zbpp.core.validation import unit_times

__all__ = ["SegmentedOrders", "in_segments"]

F, B, W, BW = PassKind

_Key = tuple[float, int]
"""Start (of a last part on the network, end) in the plan, and column there."""


@dataclass(frozen=True)
class SegmentedOrders:
    """Orders of segments, and when they run.

    Args:
        orders: of all stages, their O's and V's included.
        starts, ends: of each column.
    """

    orders: list[list[Job | Segment]]
    starts: list[list[float]]
    ends: list[list[float]]


def in_segments(
    schedule: Schedule, costs: Costs | None, *, adds_up: bool = False
) -> SegmentedOrders:
    """Cut the passes of a schedule with parts.

    What begins before a V ends before it, so that a replay finds whole passes. The W of
    a BW is a part of it.

    Args:
        schedule: with parts.
        costs: what it was planned for; without parts: all take equally long.
        adds_up: replicas add the gradients of a chunk up, behind its last W.

    Raises:
        RequestError: the costs have other parts than the schedule.
    """
    rows = schedule.parts
    assert rows is not None, "a schedule without parts has no segments"
    if costs is None or costs.parts is None:
        times = unit_times(schedule.placement, rows)
    else:
        times = costs.on(schedule.placement)
        rows = schedule.rows_for(times)
    slots = replay(rows, times, n_microbatches=schedule.n_microbatches)
    return min(
        (_put_in_order(schedule, slots, times, late, adds_up) for late in _LATE),
        key=lambda cut: max(row[-1] for row in cut.ends),
    )


_LATE = 0.0, 0.5
"""Shares of a W's part by which it may hold up what comes next. Neither is the better
one everywhere: of 10 plans the first is better in 7, by up to 6 %."""


def _put_in_order(
    schedule: Schedule,
    slots: Sequence[Sequence[Slot]],
    times: ChunkCosts,
    late: float,
    adds_up: bool,
) -> SegmentedOrders:
    """Let all stages choose their segments in the order of time."""
    placement = schedule.placement
    stages = []
    for number, (order, row) in enumerate(zip(schedule.orders, slots, strict=True)):
        joint = {x for job in order for x in passes_in(job) if x.kind is BW}
        others = [x.job for x in row if not isinstance(x.job, Part)]
        others += [] if Step(number) in others else [Step(number)]
        courses = _courses(row, joint, times)
        stages.append(_Stage(courses, others, times, late, adds_up))
    written: dict[Value, float] = {}
    starts = [stage.choose(written) for stage in stages]
    while (first := min(starts)) < math.inf:
        stage = starts.index(first)
        changed = {stage}
        for value, end in stages[stage].run().items():
            written[value] = end
            changed.add(placement.stage_of[reader(value)])
        for stage in changed:
            starts[stage] = stages[stage].choose(written)
    assert all(stage.is_done for stage in stages), "stages wait for one another"
    return SegmentedOrders(
        [stage.order for stage in stages],
        [stage.starts for stage in stages],
        [stage.ends for stage in stages],
    )


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A segment in the making.

    Args:
        part: of the plan, with which it begins.
        key: its place in the plan.
        computes: for how long.
        call: how long the communication takes that begins at its end.
        needs: of a W: stretches of its B that must have run.
    """

    part: Part
    key: _Key
    computes: float
    call: float = 0.0
    needs: int = 0


@dataclass(eq=False)
class _Course:
    """A pass, and how far it has come; phase 0 is before the V, 1 behind it."""

    of: Pass
    stretches: list[_Stretch]
    phase: int
    done: int = 0
    ready: float = 0.0

    @property
    def next(self) -> _Stretch:
        """The stretch that comes next."""
        return self.stretches[self.done]

    @property
    def has_ended(self) -> bool:
        """True if nothing comes any more."""
        return self.done == len(self.stretches)


def _courses(
    row: Sequence[Slot], joint: set[Pass], times: ChunkCosts
) -> Iterator[_Course]:
    """Cut the passes of a row, in the order of their starts."""
    by_pass: dict[Pass, list[tuple[int, Slot, Part]]] = {}
    check = -1
    for column, slot in enumerate(row):
        if isinstance(slot.job, Check):
            check = column
        if isinstance(slot.job, Part):
            by_pass.setdefault(slot.job.of, []).append((column, slot, slot.job))
    for of, parts in by_pass.items():
        full = Pass(BW, of.chunk, of.microbatch)
        phase = int(parts[0][0] > check)
        if of.kind is W:
            if full not in joint:
                yield _Course(of, _of_w(parts, times), phase)
        elif of.kind is B and full in joint:
            of_w = by_pass.get(Pass(W, of.chunk, of.microbatch), ())
            takes = [slot.duration for _, slot, _ in parts]
            for _, slot, part in of_w:  # each right behind what it needs
                takes[times.source_of(part)] += slot.duration
            of_full = [
                (c, replace(s, end=s.start + takes[p.index]), replace(p, of=full))
                for c, s, p in parts
            ]
            yield _Course(full, list(_stretches(of_full)), phase)
        else:
            yield _Course(of, list(_stretches(parts)), phase)


def _stretches(parts: Sequence[tuple[int, Slot, Part]]) -> Iterator[_Stretch]:
    """Yield the stretches in which an F or B computes, between communications."""
    first: tuple[Part, _Key] | None = None
    computes = 0.0
    for column, slot, part in parts:
        first = first or (part, (slot.start, column))
        if part.lane is Lane.NETWORK:
            yield _Stretch(*first, computes, slot.duration)
            first, computes = None, 0.0
        else:
            computes += slot.duration
    column, slot, part = parts[-1]
    part, key = first or (part, (slot.end, column))
    yield _Stretch(part, key, computes)


def _of_w(parts: Sequence[tuple[int, Slot, Part]], times: ChunkCosts) -> list[_Stretch]:
    """The parts of a W, each with the stretches of its B up to its source."""
    of = parts[0][2].of
    lanes = [lane for lane, _ in times.parts_of(Pass(B, of.chunk, of.microbatch))]
    n_calls = lanes.count(Lane.NETWORK)
    return [
        _Stretch(
            part,
            (slot.start, column),
            slot.duration,
            needs=n_calls + 1
            if part is parts[-1][2]
            else lanes[: times.source_of(part)].count(Lane.NETWORK) + 1,
        )
        for column, slot, part in parts
    ]


class _Stage:
    """A stage that runs its passes, segment after segment.

    Args:
        courses: of its passes, in the order of their starts.
        others: its V and O.
        times: of all passes.
        late: share of a W's part by which it may hold up what comes next.
        adds_up: the gradients of a chunk are added up behind its last W.
    """

    def __init__(
        self,
        courses: Iterator[_Course],
        others: Sequence[Job],
        times: ChunkCosts,
        late: float,
        adds_up: bool,
    ) -> None:
        self.order: list[Job | Segment] = []
        self.starts: list[float] = []
        self.ends: list[float] = []
        self._times, self._late = times, late
        self._n_chunks = times.placement.n_chunks
        self._network = 0.0  # free from then on
        self._open: list[_Course] = []
        self._waiting: dict[tuple[PassKind, int], deque[_Course]] = {}
        self._left = [0, 0]  # by phase
        self._backwards: dict[tuple[int, int], _Course] = {}
        frees: list[tuple[_Key, _Course]] = []
        for course in courses:
            of = course.of
            self._waiting.setdefault((of.kind, of.chunk), deque()).append(course)
            self._left[course.phase] += 1
            if of.kind in (B, BW):
                self._backwards[of.chunk, of.microbatch] = course
            if of.kind is not F:
                frees.append((course.stretches[-1].key, course))
        self._frees = deque(course for _, course in sorted(frees, key=lambda x: x[0]))
        """All that gives memory back, in the order of its ends in the plan."""
        self._others = deque(others)
        weights = [x.of.chunk for x in self._frees if x.of.kind in (W, BW)]
        self._due = Counter(weights if adds_up else ())
        """W's and BW's to come, by chunk whose gradients are added up."""
        self._sums: list[int] = []
        self._chosen: _Course | None = None
        self._start = 0.0

    @property
    def is_done(self) -> bool:
        """True if nothing is left."""
        return not any(self._left) and not self._others

    @property
    def _now(self) -> float:
        return self.ends[-1] if self.ends else 0.0

    def choose(self, written: Mapping[Value, float]) -> float:
        """Choose what comes next, and say when it starts; infinite: nothing can."""
        now, self._chosen, self._start = self._now, None, math.inf
        if self._others and not self._left[0]:
            waits = isinstance(self._others[0], Step) and self._left[1]
            if not waits:
                self._start = now
                return now
        while self._frees and self._frees[0].has_ended:
            self._frees.popleft()
        able = [(max(now, at), x.next.key, x) for x, at in self._able(written)]
        if able:
            self._start, key, self._chosen = min(able, key=lambda entry: entry[:2])
        for w in sorted(self._able_w(), key=lambda course: course.next.key):
            end = now + w.next.computes * (1 - self._late)
            if self._chosen is None or w.next.key < key or end <= self._start:
                self._chosen, self._start = w, now
                break
        return self._start

    def _able(self, written: Mapping[Value, float]) -> Iterator[tuple[_Course, float]]:
        """F's and backwards that can go on or begin, and from when."""
        for course in self._open:
            yield course, course.ready
        kinds = {(course.of.kind is F, course.of.chunk) for course in self._open}
        has_forward = any(is_forward for is_forward, _ in kinds)
        for course in self._heads():
            of = course.of
            if of.kind is F:
                first = self._frees[0].stretches[-1].key if self._frees else None
                if has_forward or (first is not None and first < course.next.key):
                    continue
            elif of.kind is W or (False, of.chunk) in kinds:
                continue
            arrivals = [
                written.get(value, math.inf) + self._times.delay(value.chunk, of.chunk)
                for value in reads(of, self._n_chunks)
            ]
            arrival = max(arrivals, default=0.0)
            if arrival < math.inf:
                yield course, arrival

    def _able_w(self) -> Iterator[_Course]:
        """W's whose next part has what it needs of its B."""
        for course in self._heads():
            of = course.of
            if of.kind is W:
                b = self._backwards[of.chunk, of.microbatch]
                if b.done >= course.next.needs:
                    yield course

    def _heads(self) -> Iterator[_Course]:
        """The next pass of each kind and chunk, of those that may run now."""
        phase = 0 if self._left[0] else 1
        for courses in self._waiting.values():
            if courses and courses[0].phase == phase:
                yield courses[0]

    def run(self) -> dict[Value, float]:
        """Run what was chosen; return what it writes, and when that is there."""
        course, start = self._chosen, self._start
        if course is None:
            job = self._others.popleft()
            if isinstance(job, Step):
                for chunk in self._sums:
                    self._note(
                        Collective(CollectiveKind.REDUCE_WAIT, chunk), start, start
                    )
            self._note(job, start, start)
            return {}
        of, stretch = course.of, course.next
        begins = course.done == 0
        course.done += 1
        end, ends = start + stretch.computes, course.has_ended
        if of.kind is W:
            begins = ends  # until then it does no more than B has left for it
        elif begins:
            self._open.append(course)
        if begins:
            self._waiting[of.kind, of.chunk].popleft()
        left = len(course.stretches) - course.done
        is_whole = len(course.stretches) == 1
        self._note(of if is_whole else Segment(stretch.part, begins, left), start, end)
        if not ends:
            if of.kind is not W:
                course.ready = self._network = max(end, self._network) + stretch.call
            return {}
        self._left[course.phase] -= 1
        if of.kind is not W:
            self._open.remove(course)
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
