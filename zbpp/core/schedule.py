"""The order of jobs on every stage; an invalid one cannot exist."""

from dataclasses import dataclass

from zbpp.core.costs import Costs
from zbpp.core.jobs import Check, Job, PassKind, passes_in
from zbpp.core.placement import Placement
from zbpp.core.validation import Recompute, check_layers, validate

__all__ = ["Order", "Recompute", "Schedule"]

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
        costs: if given, no stage may exceed their memory limit.
        split: layers of each chunk that it was planned for; None: any.
        recompute: for each chunk True if B computes all its layers again, False, or
            the layers, counted from 0 in the chunk, that it does so with; None: none.

    Raises:
        ScheduleError: a pass is missing, doubled, on a wrong stage or before its
            input; the stages wait for one another; or memory exceeds the limit.
        RequestError: split or recompute do not fit the chunks.
    """

    name: str
    placement: Placement
    n_microbatches: int
    orders: tuple[Order, ...]
    costs: Costs | None = None
    split: tuple[int, ...] | None = None
    recompute: tuple[Recompute, ...] | None = None

    def __post_init__(self) -> None:
        check_layers(self.placement, self.split, self.recompute)
        validate(self.placement, self.n_microbatches, self.orders, self.costs)

    @property
    def n_stages(self) -> int:
        """Number of stages."""
        return self.placement.n_stages

    @property
    def is_post_validated(self) -> bool:
        """True if steps are validated in the next warm-up: all stages have a V."""
        return any(isinstance(job, Check) for job in self.orders[0])

    def recomputes(self, chunk: int, n_layers: int) -> frozenset[int]:
        """Layers of a chunk, counted from 0 in it, that B computes again."""
        which = False if self.recompute is None else self.recompute[chunk]
        if isinstance(which, bool):
            return frozenset(range(n_layers) if which else ())
        return frozenset(which)

    @property
    def recomputing(self) -> frozenset[int]:
        """Chunks whose B computes layers again."""
        which = self.recompute or ()
        return frozenset(chunk for chunk, layers in enumerate(which) if layers)

    def runs(self, kind: PassKind) -> bool:
        """True if there is a pass of this kind."""
        return any(
            part.kind is kind
            for order in self.orders
            for job in order
            for part in passes_in(job)
        )
