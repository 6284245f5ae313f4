"""Messages between the stages of a timeline, simulated or measured.

stage 0 | F0  F1              B0          a message leaves when its pass ends, and
           \\   \\            /             is awaited by the pass that reads it
stage 1 |    F0  F1  B0  B1
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from zbpp.core import (
    Pass,
    PassKind,
    Slot,
    Timeline,
    Value,
    input_of,
    output_of,
    passes_in,
)

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
    sent: dict[Value, deque[Place]] = defaultdict(deque)
    for place, value in _values(timeline, output_of):
        sent[value].append(place)
    for place, value in _values(timeline, input_of):
        if sent[value]:
            source = sent[value].popleft()
            if source[0] != place[0]:
                yield Message(value, source, place)


def _values(
    timeline: Timeline, rule: Callable[[Pass, int], Value | None]
) -> Iterator[tuple[Place, Value]]:
    """The value that a rule names for each pass, stage after stage."""
    n_chunks = timeline.placement.n_chunks
    examples: dict[tuple[PassKind, int], Value | None] = {}  # rules take long
    for stage, row in enumerate(timeline.rows):
        for index, slot in enumerate(row):
            for part in passes_in(slot.job):
                key = part.kind, part.chunk
                if key not in examples:
                    examples[key] = rule(part, n_chunks)
                value = examples[key]
                if value is not None:
                    value = Value(value.what, value.chunk, part.microbatch)
                    yield (stage, index), value
