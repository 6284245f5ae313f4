"""Jobs with start and end: what the simulator predicts and what real runs measure."""

from dataclasses import dataclass

from zbpp.core.jobs import Job, Pass
from zbpp.core.placement import Placement

__all__ = ["Slot", "Timeline"]


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
    """What each stage did when: one row of slots per stage, in time order."""

    name: str
    placement: Placement
    n_microbatches: int
    rows: tuple[tuple[Slot, ...], ...]

    def passes(self, stage: int) -> list[Slot]:
        """Slots of a stage that compute; optimizer jobs are left out."""
        return [slot for slot in self.rows[stage] if isinstance(slot.job, Pass)]
