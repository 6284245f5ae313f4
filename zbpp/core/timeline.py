"""Jobs with start and end, of the simulator or of a real run."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from zbpp.core.jobs import Job, Lane, Part, lanes_of, passes_in
from zbpp.core.placement import Placement

Place = tuple[int, int]
"""A slot of a timeline: its line (see `Timeline.lines`), and its position there."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One job on a stage from ``start`` to ``end``, in the unit of the costs."""

    job: Job
    start: float
    end: float

    @property
    def duration(self) -> float:
        """``end - start``."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """Jobs of all stages in time.

    Args:
        name: the mode, for people.
        placement: chunk to stage.
        n_microbatches: micro-batches in a step.
        slots: of each stage all jobs, in its order: what memory follows from.
        recomputing: chunks whose B computes layers again.
    """

    name: str
    placement: Placement
    n_microbatches: int
    slots: tuple[tuple[Slot, ...], ...]
    recomputing: frozenset[int] = frozenset()

    @cached_property
    def rows(self) -> tuple[tuple[Slot, ...], ...]:
        """The jobs of each stage that compute, or start something: in time order."""
        return self._on(computes=True)

    @cached_property
    def collectives(self) -> tuple[tuple[Slot, ...], ...]:
        """The work during the jobs of each stage; empty: there is none."""
        rows = self._on(computes=False)
        return rows if any(rows) else ()

    def _on(self, *, computes: bool) -> tuple[tuple[Slot, ...], ...]:
        return tuple(
            tuple(x for x in row if (Lane.COMPUTE in lanes_of(x.job)) is computes)
            for row in self.slots
        )

    @property
    def lines(self) -> tuple[tuple[Slot, ...], ...]:
        """All rows of slots: the jobs of each stage, then what overlaps with them.

        Line ``lane * n_stages + stage`` is one lane of one stage; lane 0 has its jobs.
        """
        return (*self.rows, *self.collectives)

    @property
    def has_parts(self) -> bool:
        """True if stages compute parts of passes."""
        return any(isinstance(slot.job, Part) for row in self.slots for slot in row)

    def passes(self, stage: int) -> list[Slot]:
        """Slots of a stage that compute; optimizer jobs are left out."""
        return [slot for slot in self.rows[stage] if passes_in(slot.job)]


def extent(slots: Iterable[Slot]) -> float:
    """Time from the first start to the last end; 0 if there is no slot."""
    slots = list(slots)
    if not slots:
        return 0.0
    return max(slot.end for slot in slots) - min(slot.start for slot in slots)
