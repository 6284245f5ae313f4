"""Messages between the stages of a timeline, simulated or measured.

stage 0 | F0  F1              B0          a message leaves when its pass ends, and
           \\   \\            /             is awaited by the pass that reads it
stage 1 |    F0  F1  B0  B1
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from zbpp.core import Pass, Slot, Timeline, Value, input_of, output_of

__all__ = ["Message", "Place", "lines_of", "messages"]

Place = tuple[int, int]
"""A slot of a timeline: its line (see `lines_of`), and its position there."""


def lines_of(timeline: Timeline) -> tuple[tuple[Slot, ...], ...]:
    """All rows of slots: the jobs of each stage, then what goes on beside them.

    Line ``lane * n_stages + stage`` is one lane of one stage; lane 0 has its jobs.
    """
    return (*timeline.rows, *timeline.collectives)


@dataclass(frozen=True, slots=True)
class Message:
    """One value that goes from a pass on one stage to a pass on another."""

    value: Value
    source: Place
    target: Place


def messages(timeline: Timeline) -> Iterator[Message]:
    """Find the messages of a timeline, in the order of their targets.

    Of several iterations, the n-th pass that reads a value reads what the n-th that
    wrote it has sent. A value that no slot has written is left out, as what reads it.
    """
    n_chunks = timeline.placement.n_chunks
    sent: dict[Value, deque[Place]] = defaultdict(deque)
    for stage, row in enumerate(timeline.rows):
        for index, slot in enumerate(row):
            if isinstance(slot.job, Pass):
                value = output_of(slot.job, n_chunks)
                if value is not None:
                    sent[value].append((stage, index))
    for stage, row in enumerate(timeline.rows):
        for index, slot in enumerate(row):
            if not isinstance(slot.job, Pass):
                continue
            value = input_of(slot.job, n_chunks)
            if value is None or not sent[value]:
                continue
            source = sent[value].popleft()
            if source[0] != stage:
                yield Message(value, source, (stage, index))
