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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

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
from zbpp.core.validation import unit_times

__all__ = ["SegmentedOrders", "in_segments"]

F, B, W, BW = PassKind


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

    @property
    def span(self) -> float:
        """Longest time of a stage from its first start to its last end."""
        pairs = zip(self.starts, self.ends, strict=True)
        return max(end[-1] - start[0] for start, end in pairs)


def in_segments(
    schedule: Schedule, costs: Costs | None, *, adds_up: bool = False
) -> SegmentedOrders:
    """Cut the passes of a schedule with parts. The W of a BW is a part of it.

    Args:
        schedule: with parts.
        costs: what it was planned for; without parts: all take equally long.
        adds_up: replicas add the gradients of a chunk up, behind its last W.

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
    while (first := min(starts)) < math.inf:
        number = starts.index(first)
        changed = {number}
        for value, end in stages[number].run().items():
            written[value] = end
            changed.add(placement.stage_of[reader(value)])
        for number in changed:
            starts[number] = stages[number].choose(written)
    assert all(stage.is_done for stage in stages), "stages wait for one another"
    return SegmentedOrders(
        [stage.order for stage in stages],
        [stage.starts for stage in stages],
        [stage.ends for stage in stages],
    )


@dataclass(frozen=True, slots=True)
class _Stretch:
    """What a pass computes up to its next communication.

    Args:
        part: of the plan, with which it begins.
        computes: for how long.
        call: how long the communication takes that begins at its end.
        is_rest: it only ends a pass behind its last communication.
    """

    part: Part
    computes: float
    call: float = 0.0
    is_rest: bool = False


@dataclass(eq=False)
class _Course:
    """A pass, and how far it has come."""

    of: Pass
    stretches: list[_Stretch]
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


def _stretches(of: Pass, times: ChunkCosts, *, is_joint: bool) -> Iterator[_Stretch]:
    """The stretches of an F or B; a B that is joint computes its W, too."""
    parts = times.parts_of(of)
    takes = [time for _, time in parts]
    if is_joint:
        w = Pass(W, of.chunk, of.microbatch)
        for index, (lane, time) in enumerate(times.parts_of(w)):
            takes[times.source_of(Part(w, index, lane))] += time
        of = Pass(BW, of.chunk, of.microbatch)
    first, computes = 0, 0.0
    for index, (lane, _) in enumerate(parts):
        if lane is Lane.NETWORK:
            part = Part(of, first, parts[first][0])
            yield _Stretch(part, computes, takes[index])
            first, computes = index + 1, 0.0
        else:
            computes += takes[index]
    last = min(first, len(parts) - 1)
    part = Part(of, last, parts[last][0])
    yield _Stretch(part, computes, is_rest=first > last)


class _Stage:
    """A stage that runs its passes, segment after segment.

    Args:
        row: its parts, V and O.
        joint: its passes whose backward is in one piece.
        times: of all passes.
        adds_up: the gradients of a chunk are added up behind its last W.
    """

    def __init__(
        self, row: Sequence[Job], joint: set[Pass], times: ChunkCosts, adds_up: bool
    ) -> None:
        self.order: list[Job | Segment] = []
        self.starts: list[float] = []
        self.ends: list[float] = []
        self._times, self._n_chunks = times, times.placement.n_chunks
        self._network = 0.0  # free from then on
        self._open: list[_Course] = []
        self._courses: dict[Pass, _Course] = {}
        self._row: list[Job | _Stretch] = []
        for job in row:
            if isinstance(job, Part):
                stretch = self._enter(job, joint)
                self._row += [stretch] if stretch is not None else []
            else:
                self._row.append(job)
        chunks = [x.chunk for x in self._courses if x.kind in (W, BW)]
        self._due = Counter(chunks if adds_up else ())
        """W's and BW's to come, by chunk whose gradients are added up."""
        self._sums: list[int] = []
        self._column = 0
        self._chosen: _Course | Job | None = None
        self._start = 0.0

    def _enter(self, part: Part, joint: set[Pass]) -> _Stretch | None:
        """The stretch that begins with a part; None: it goes on with one."""
        of, times = part.of, self._times
        full = Pass(BW, of.chunk, of.microbatch)
        is_joint = of.kind is not F and full in joint
        if is_joint and of.kind is W:
            return None
        name = full if is_joint else of
        if name not in self._courses:
            stretches = list(_stretches(of, times, is_joint=is_joint))
            if of.kind is W:  # it stops at every part, for what its B has left
                parts = enumerate(times.parts_of(of))
                stretches = [_Stretch(Part(of, i, lane), t) for i, (lane, t) in parts]
            self._courses[name] = _Course(name, stretches)
        for stretch in self._courses[name].stretches:
            if stretch.part.index == part.index and not stretch.is_rest:
                return stretch
        return None

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
        for course in self._open:
            if course.next.is_rest and max(now, course.ready) < self._start:
                self._chosen, self._start = course, max(now, course.ready)
        chosen = self._next()
        start = math.inf if chosen is None else max(now, self._ready(chosen, written))
        if start < self._start:
            self._chosen, self._start = chosen, start
        return self._start

    def _next(self) -> _Course | Job | None:
        """What comes next in the plan, or a pass that must end before it."""
        while self._column < len(self._row):
            entry = self._row[self._column]
            if not isinstance(entry, _Stretch):
                begun = (x for x in self._courses.values() if x.done)
                return next((x for x in begun if not x.has_ended), entry)
            course = self._courses[entry.part.of]
            if course.has_ended or course.stretches.index(entry) < course.done:
                self._column += 1
                continue
            return self._before(course) or course
        return None

    def _before(self, course: _Course) -> _Course | None:
        """An open pass that must go on before another one does."""
        of = course.of
        if of.kind is W:
            b = self._courses[Pass(B, of.chunk, of.microbatch)]
            is_last = course.done + 1 == len(course.stretches)
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
        of, stretch = chosen.of, chosen.next
        begins = chosen.done == 0
        chosen.done += 1
        end, ends = start + stretch.computes, chosen.has_ended
        if of.kind is W:
            begins = ends  # until then it does no more than B has left for it
        elif begins:
            self._open.append(chosen)
        left = len(chosen.stretches) - chosen.done
        is_whole = len(chosen.stretches) == 1
        self._note(of if is_whole else Segment(stretch.part, begins, left), start, end)
        if not ends:
            if of.kind is not W:
                chosen.ready = self._network = max(end, self._network) + stretch.call
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
