"""Which of two plans is better.

Of two plans the first figure that differs decides: the time of a step, then the step
behind a barrier, which waits for the last stage, then the largest memory of a stage.

    p = 8, m = 16, F = B = W = 1    span   behind a barrier   memory, M_B
    one chunk a stage               48     55                 15
    V                               48     51.5               8              better
"""

from collections.abc import Iterable
from functools import cached_property

from zbpp.core import (
    ChunkCosts,
    Costs,
    Order,
    Schedule,
    Slot,
    longest_span,
    pass_span,
    peaks,
    replay,
    step_behind_barrier,
)

__all__ = ["ROUNDING", "PlanFigures", "is_below"]

ROUNDING = 1e-9  # relative


class PlanFigures:
    """Figures of a plan, each made when it is asked for.

    A subclass has the fields below, and says in ``names`` which figures are compared.
    """

    schedule: Schedule
    costs: Costs
    """Of the chunks."""
    names: tuple[str, ...]

    @cached_property
    def chunk_costs(self) -> ChunkCosts:
        """The costs on the placement."""
        return self.costs.on(self.schedule.placement)

    @cached_property
    def rows(self) -> list[list[Slot]]:
        """Jobs of each stage with their times."""
        m, orders = self.schedule.n_microbatches, self._orders
        return replay(orders, self.chunk_costs, n_microbatches=m)

    @property
    def _orders(self) -> tuple[Order, ...]:
        return self.schedule.rows_for(self.chunk_costs)

    @cached_property
    def span(self) -> float:
        """Longest span of a stage."""
        return longest_span(self.rows)

    @cached_property
    def steps(self) -> list[float]:
        """Span and optimizer of each stage."""
        pairs = zip(self.rows, self.chunk_costs.optimizer, strict=True)
        return [pass_span(row) + optimizer for row, optimizer in pairs]

    @cached_property
    def step(self) -> float:
        """Longest span of a stage with its optimizer, in the unit of the costs."""
        return max(self.steps)

    @cached_property
    def barrier_step(self) -> float:
        """Time of a step among many, behind a barrier."""
        m, orders = self.schedule.n_microbatches, self._orders
        return step_behind_barrier(orders, self.chunk_costs, n_microbatches=m)

    @cached_property
    def peak(self) -> float:
        """Largest memory of a stage."""
        return max(peaks(self._orders, self.chunk_costs))

    @property
    def time(self) -> float:
        """The figure that is compared first."""
        return float(getattr(self, self.names[0]))

    def is_better_than(self, rival: "PlanFigures") -> bool:
        """Compare figure by figure; a tie in all of them is not better."""
        mine = (getattr(self, name) for name in self.names)
        return is_below(mine, (getattr(rival, name) for name in self.names))


def is_below(figures: Iterable[float], others: Iterable[float]) -> bool:
    """Compare figure by figure, but for rounding; a tie in all of them is not below.

    Figures of iterators are made one by one: none more than the comparison needs.
    """
    for mine, theirs in zip(figures, others, strict=True):
        if abs(mine - theirs) > ROUNDING * max(mine, theirs):
            return mine < theirs
    return False
