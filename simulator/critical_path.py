"""The chain of jobs that fixed the time of a step, and the messages of a timeline.

From the job that ends last, back to what it waited for longest (`zbpp.core.graph`):

    stage 0 | F0  F1  ..........  B0          chain: 0F0 1F0 1B0 0B0
    stage 1 |     F0  B0  F1

Messages are found in any timeline, simulated or measured: each leaves when its pass
ends, and is awaited by the pass that reads it.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from zbpp.core import (
    Costs,
    Kind,
    Part,
    Pass,
    PassKind,
    Schedule,
    Slot,
    Step,
    Timeline,
    Value,
    input_of,
    kind_of,
    output_of,
    passes_in,
)
from zbpp.core.timeline import Place, sending_time
from zbpp.simulator.arguments import takes_plans, takes_timelines
from zbpp.simulator.engine import first_step

__all__ = ["CriticalPath", "Message", "critical_path", "messages"]

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
    run = first_step(schedule, costs)
    jobs = run.graph
    nodes: Sequence[int] = range(len(run.starts))
    if not with_steps:
        nodes = [node for node in nodes if not isinstance(jobs.job(node), Step)]
    path = run.path(max(nodes, key=run.ends.__getitem__))
    slots = (Slot(jobs.job(x), run.starts[x], run.ends[x]) for x in path)
    shown = (slot for slot in slots if kind_of(slot.job).times)
    return CriticalPath(tuple(shown), jobs.times.sending)


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
