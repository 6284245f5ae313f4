"""The order of jobs on every stage; an invalid one cannot exist."""

from dataclasses import dataclass

from zbpp.core.costs import MemoryModel
from zbpp.core.jobs import Check, Job, Pass, PassKind
from zbpp.core.placement import Placement
from zbpp.core.validation import validate

__all__ = ["Order", "Schedule"]

Order = tuple[Job, ...]
"""The jobs of one stage, in the order in which it runs them."""


@dataclass(frozen=True)
class Schedule:
    """Orders of jobs on all stages, without times: those belong to `Timeline`.

    Args:
        name: the mode, for people.
        placement: chunk to stage.
        n_microbatches: micro-batches in a step, at least 1.
        orders: one order per stage.
        memory: if given, no stage may exceed its limit.

    Raises:
        ScheduleError: a pass is missing, doubled, on a wrong stage or before its
            input; the stages wait for one another; or the memory exceeds the limit.
    """

    name: str
    placement: Placement
    n_microbatches: int
    orders: tuple[Order, ...]
    memory: MemoryModel | None = None

    def __post_init__(self) -> None:
        validate(self.placement, self.n_microbatches, self.orders, self.memory)

    @property
    def n_stages(self) -> int:
        """Number of stages."""
        return self.placement.n_stages

    @property
    def is_post_validated(self) -> bool:
        """True if steps are validated in the next warm-up: all stages have a V."""
        return any(isinstance(job, Check) for job in self.orders[0])

    def runs(self, kind: PassKind) -> bool:
        """True if there is a pass of this kind."""
        return any(
            isinstance(job, Pass) and job.kind is kind
            for order in self.orders
            for job in order
        )
