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
    n_chunks = timeline.placement.n_chunks
    outputs, inputs = _Values(output_of, n_chunks), _Values(input_of, n_chunks)
    sent: dict[Value, deque[Place]] = defaultdict(deque)
    for place, part in _passes(timeline):
        value = outputs.of(part)
        if value is not None:
            sent[value].append(place)
    for place, part in _passes(timeline):
        value = inputs.of(part)
        if value is None or not sent[value]:
            continue
        source = sent[value].popleft()
        if source[0] != place[0]:
            yield Message(value, source, place)


class _Values:
    """What passes take or have, looked up once for each kind and chunk.

    Args:
        rule: for the value of a pass.
        n_chunks: of the placement.
    """

    def __init__(
        self, rule: Callable[[Pass, int], Value | None], n_chunks: int
    ) -> None:
        self._rule, self._n_chunks = rule, n_chunks
        self._values: dict[tuple[PassKind, int], Value | None] = {}

    def of(self, part: Pass) -> Value | None:
        """The value of a pass, None if there is none."""
        key = part.kind, part.chunk
        if key not in self._values:
            self._values[key] = self._rule(part, self._n_chunks)
        value = self._values[key]
        return value and Value(value.what, value.chunk, part.microbatch)


def _passes(timeline: Timeline) -> Iterator[tuple[Place, Pass]]:
    """All passes, stage after stage, with the slots that they are a part of."""
    for stage, row in enumerate(timeline.rows):
        for index, slot in enumerate(row):
            for part in passes_in(slot.job):
                yield (stage, index), part
