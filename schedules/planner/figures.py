"""The better one of two plans.

Of two plans the first figure that differs decides: the time of a step, then the step
behind a barrier, which waits for the last stage, then the largest memory of a stage.

    p = 8, m = 16, F = B = W = 1    span   behind a barrier   memory, M_B
    one chunk a stage               48     55                 15
    V                               48     51.5               8              better
"""

from collections.abc import Iterable
from functools import cached_property

from zbpp.core import (
    Check,
    ChunkCosts,
    Collective,
    Costs,
    JobGraph,
    Order,
    Schedule,
    peaks,
)

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

    @property
    def _orders(self) -> tuple[Order, ...]:
        return self.schedule.rows_for(self.chunk_costs)

    @cached_property
    def _graph(self) -> JobGraph:
        return JobGraph(self._orders, self.chunk_costs)

    @cached_property
    def _spans(self) -> list[float]:
        return self._graph.run().spans

    @property
    def span(self) -> float:
        """Longest span of a stage."""
        return max(self._spans)

    @cached_property
    def steps(self) -> list[float]:
        """Span and optimizer of each stage."""
        pairs = zip(self._spans, self.chunk_costs.optimizer, strict=True)
        return [span + optimizer for span, optimizer in pairs]

    @cached_property
    def step(self) -> float:
        """Longest span of a stage with its optimizer, in the unit of the costs."""
        return max(self.steps)

    @cached_property
    def barrier_step(self) -> float:
        """Time of a step among many, optimizer included, if all stages step together.

        A step is known to be valid when all gradients are there and the norms are
        summed. Then each stage steps, and starts the next iteration: one iteration
        tells the time of all.
        """
        bare, times = self.schedule.without(Check).without(Collective), self.chunk_costs
        is_bare = bare is self.schedule
        graph = self._graph if is_bare else JobGraph(bare.rows_for(times), times)
        run = graph.run(free=times.optimizer, reduction=times.reduction)
        return run.all_gradients

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
