"""The chain of jobs that fixed the time of a timeline, simulated or measured.

From the slot that ends last, back to what it waited for: the slot before it on its
line, the pass whose message it awaits, or what went on beside it on its stage,
whichever was done last. An optimizer step behind a barrier waits for every stage.

    stage 0 | F0  F1  ..........  B0          chain: 0F0 1F0 1B0 0B0
    stage 1 |     F0  B0  F1

Of a simulated timeline this is a longest path of the graph of its jobs. Its messages
are found in the timeline too, simulated or measured: each leaves when its pass ends,
and is awaited by the pass that reads it.
"""

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter

from zbpp.core import (
    Check,
    Costs,
    Kind,
    Part,
    Pass,
    PassKind,
    Schedule,
    Slot,
    State,
    Step,
    Timeline,
    Value,
    input_of,
    kind_of,
    output_of,
    passes_in,
    reader,
)
from zbpp.core.timeline import Place, sending_time
from zbpp.simulator.arguments import takes_plans, takes_timelines
from zbpp.simulator.engine import simulate

__all__ = ["CriticalPath", "Message", "critical_path", "critical_places", "messages"]

_UNIT = Costs()


@dataclass(frozen=True, slots=True)
class Message:
    """One value that goes from a pass on one stage to a pass on another."""

    value: Value
    source: Place
    target: Place


@dataclass(frozen=True)
class CriticalPath:
    """The jobs that fix the time of a step: each waits for the one before it.

    ``sending`` is as in `Timeline`.
    """

    slots: tuple[Slot, ...]
    sending: tuple[float, ...] = ()

    @property
    def length(self) -> float:
        """Time from the start of the first job to the end of the last one."""
        return self.slots[-1].end - self.slots[0].start

    def time_of(self, kind: Kind) -> float:
        """Time that the path spends in jobs of one kind, their sends left out."""
        return sum(
            slot.duration - sending_time(slot.job, self.sending)
            for slot in self.slots
            if slot.job.kind is kind
        )

    @property
    def time_in_collectives(self) -> float:
        """Time that the path spends in gathers, and in sums of gradients."""
        return sum(s.duration for s in self.slots if kind_of(s.job).is_async)

    @property
    def time_in_messages(self) -> float:
        """Time that the path spends on the way from stage to stage.

        It is between jobs, or at the end of one whose message occupies its stage; also
        where what follows is on that stage too.
        """
        sent = sum(sending_time(slot.job, self.sending) for slot in self.slots)
        return self.length - sum(slot.duration for slot in self.slots) + sent


@takes_plans
def critical_path(
    schedule: Schedule, costs: Costs = _UNIT, *, with_steps: bool = True
) -> CriticalPath:
    """Find a longest path; its length is the step time (without steps: the makespan).

    Where several paths are longest, one of them is returned.

    Args:
        schedule: whose jobs are simulated.
        costs: their times.
        with_steps: False leaves the optimizer steps out.

    Raises:
        RequestError: the costs do not fit the placement.
    """
    timeline = simulate(schedule, costs)
    if not with_steps:
        rows = tuple(
            tuple(slot for slot in row if not isinstance(slot.job, Step))
            for row in timeline.rows
        )
        timeline = replace(timeline, rows=rows)
    lines = timeline.lines
    slots = (lines[line][index] for line, index in critical_places(timeline, costs))
    return CriticalPath(tuple(slots), timeline.sending)


def critical_places(
    timeline: Timeline,
    costs: Costs | None = None,
    *,
    sent: Iterable[Message] | None = None,
) -> list[Place]:
    """Trace the slot that ends last back to the first.

    Args:
        timeline: simulated or measured.
        costs: have the delays of messages; None: there are none.
        sent: the messages of the timeline, if they are at hand.

    Raises:
        RequestError: the costs do not fit the placement.
    """
    waits = _Waits(timeline, costs, messages(timeline) if sent is None else sent)
    place = waits.last()
    path: dict[Place, None] = {}
    while place is not None and place not in path:  # jobs of no time may form a circle
        path[place] = None
        place = waits.awaited(place)
    return list(path)[::-1]


class _Waits:
    """Tells of each slot which one it waited for longest."""

    def __init__(
        self, timeline: Timeline, costs: Costs | None, sent: Iterable[Message]
    ) -> None:
        self._lines = timeline.lines
        self._n_stages = timeline.placement.n_stages
        self._ends = [[slot.end for slot in line] for line in self._lines]
        self._times = None if costs is None else costs.on(timeline.placement)
        self._awaited: dict[Place, list[Message]] = defaultdict(list)
        for message in sent:
            self._awaited[message.target].append(message)
        self._is_validated = any(isinstance(s.job, Check) for s in timeline.rows[0])

    def last(self) -> Place | None:
        """The slot that ends last."""
        ends = [
            (ends[-1], (line, len(ends) - 1))
            for line, ends in enumerate(self._ends)
            if ends
        ]
        return max(ends, key=itemgetter(0))[1] if ends else None

    def awaited(self, place: Place) -> Place | None:
        """Return what a slot waited for longest; of several, what is on its line."""
        line, index = place
        slot = self._lines[line][index]
        done: list[tuple[float, Place]] = []
        if index:
            done.append((self._ends[line][index - 1], (line, index - 1)))
        for message in self._awaited.get(place, ()):
            done.append((self._arrival(message), message.source))
        awaits = kind_of(slot.job).awaits
        behind_barrier = State.ALL_GRADIENTS in awaits and not self._is_validated
        for beside in range(len(self._lines)):
            same_stage = (beside - line) % self._n_stages == 0
            if beside != line and (same_stage or behind_barrier):
                done += self._done_by(slot, beside)
        return max(done, key=itemgetter(0))[1] if done else None

    def _arrival(self, message: Message) -> float:
        line, index = message.source
        sent, value = self._ends[line][index], message.value
        delay = self._times.delay(value.chunk, reader(value)) if self._times else 0.0
        return sent + delay

    def _done_by(self, slot: Slot, line: int) -> list[tuple[float, Place]]:
        """The last slot of a line that another one, on another line, may wait for."""
        ends, slots = self._ends[line], self._lines[line]
        index = bisect_right(ends, slot.start) - 1
        while index >= 0 and not _may_hold_up(slots[index], slot):
            index -= 1
            if isinstance(slot.job, Part) and ends[index] < slot.start:
                return []  # what ended earlier holds up no part
        return [(ends[index], (line, index))] if index >= 0 else []


def _may_hold_up(earlier: Slot, slot: Slot) -> bool:
    """False for slots at one instant that could hold up each other in a circle."""
    if isinstance(slot.job, Part) and isinstance(earlier.job, Part):
        return _is_before(earlier.job, slot.job)
    if isinstance(slot.job, Step):
        return not isinstance(earlier.job, Step)
    return earlier.start < slot.start or kind_of(slot.job).is_async


def _is_before(earlier: Part, part: Part) -> bool:
    """True if a part of the same stage hands something on to another, or may do."""
    chunk, i = part.chunk, part.of.microbatch
    if earlier.of == part.of:
        return earlier.index < part.index
    match part.kind:
        case PassKind.F:
            sources = [Pass(PassKind.F, chunk - 1, i)]
        case PassKind.B:
            sources = [Pass(PassKind.F, chunk, i), Pass(PassKind.B, chunk + 1, i)]
        case _:
            sources = [Pass(PassKind.B, chunk, i)]
    return earlier.of in sources


@takes_timelines
def messages(timeline: Timeline) -> Iterator[Message]:
    """Find the messages of a timeline, in the order of their targets.

    Of several iterations, the n-th pass that reads a value reads what the n-th that
    wrote it has sent. A value that no slot has written is left out, as what reads it.
    """
    sent: dict[Value, deque[Place]] = defaultdict(deque)
    for place, value in _values(timeline, output_of):
        sent[value].append(place)
    for place, value in _values(timeline, input_of):
        if sent[value]:
            source = sent[value].popleft()
            if (source[0] - place[0]) % timeline.placement.n_stages:
                yield Message(value, source, place)


def _values(
    timeline: Timeline, rule: Callable[[Pass, int], Value | None]
) -> Iterator[tuple[Place, Value]]:
    """The value that a rule names for each pass, stage after stage.

    A pass in parts reads with the first of them, and writes with the last.
    """
    n_chunks = timeline.placement.n_chunks
    examples: dict[tuple[PassKind, int], Value | None] = {}  # rules take long
    n_parts = _count_parts(timeline)
    for line, row in enumerate(timeline.lines):
        for index, slot in enumerate(row):
            job = slot.job
            if isinstance(job, Part):
                last = n_parts[job.kind, job.chunk] - 1
                if job.index != (0 if rule is input_of else last):
                    continue
            for part in passes_in(job):
                key = part.kind, part.chunk
                if key not in examples:
                    examples[key] = rule(part, n_chunks)
                value = examples[key]
                if value is not None:
                    value = Value(value.what, value.chunk, part.microbatch)
                    yield (line, index), value


def _count_parts(timeline: Timeline) -> dict[tuple[PassKind, int], int]:
    """Parts of the passes of each kind and chunk that has any."""
    n_parts: dict[tuple[PassKind, int], int] = {}
    for line in timeline.lines:
        for slot in line:
            if isinstance(slot.job, Part):
                key = slot.job.kind, slot.job.chunk
                n_parts[key] = max(n_parts.get(key, 0), slot.job.index + 1)
    return n_parts
