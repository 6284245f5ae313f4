"""The better of two plans, and the best of several: both rules stand here alone.

Of two plans the first figure that differs decides: the time of a step, then the step
behind a barrier, which waits for the last stage, then the largest memory of a stage.

    p = 8, m = 16, F = B = W = 1    span   behind a barrier   memory, M_B
    one chunk a stage               48     55                 15
    V                               48     51.5               8              better

Where predictions are trusted to a share of the step only, plans within that share of
the shortest one count as equal, and those with the fewest messages come first: each
takes time of the host that is in no cost.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import pairwise
from typing import Generic, TypeVar

from zbpp.core import (
    ChunkCosts,
    Costs,
    LimitError,
    Order,
    RequestError,
    Schedule,
    Slot,
    longest_span,
    pass_span,
    peaks,
    replay,
    step_behind_barrier,
)

__all__ = ["ROUNDING", "Contest", "Entry", "PlanFigures", "is_below"]

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


P = TypeVar("P", bound=PlanFigures)


@dataclass(frozen=True)
class Entry(Generic[P]):
    """A plan of a contest, or the reason why there is none."""

    name: str
    plan: P | None = None
    reason: str = ""
    error: RequestError | None = None


class Contest(Generic[P]):
    """Keeps the best of the plans that are offered, of equal ones the first."""

    def __init__(self) -> None:
        self.entries: list[Entry[P]] = []
        self.best: P | None = None

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Enter a plan that cannot be had with the beginning of its error."""
        try:
            yield
        except RequestError as error:
            reason = str(error).partition(";")[0].partition("\n")[0]
            self.entries.append(Entry(name, reason=reason, error=error))

    def reject(self, name: str, reason: str) -> None:
        """Enter what cannot be the best without a plan."""
        self.entries.append(Entry(name, reason=reason))

    def offer(self, name: str, plan: P) -> None:
        """Enter a plan."""
        self.entries.append(Entry(name, plan))
        if self.best is None or plan.is_better_than(self.best):
            self.best = plan

    def is_out(self, bound: float) -> bool:
        """True if a plan whose time has this lower bound cannot be the best."""
        return self.best is not None and bound > self.best.time * (1 + ROUNDING)

    def winner(self, *, trust: float = 0.0) -> tuple[str, P]:
        """Return the best plan and its name.

        Args:
            trust: share of a step to which predictions are trusted.

        Raises:
            LimitError: there is no plan; of several limits it names the smallest.
            RequestError: there is no plan; the error is that of the first attempt.
        """
        if self.best is None:
            errors = [entry.error for entry in self.entries if entry.error]
            limits = [error for error in errors if isinstance(error, LimitError)]
            raise min(limits, key=lambda error: error.smallest) if limits else errors[0]
        planned = [(e.name, e.plan) for e in self.entries if e.plan is not None]
        if trust:
            far = self.best.time * (1 + trust)
            near = [pair for pair in planned if pair[1].time <= far]
            fewest = min(_n_messages(plan.schedule) for _, plan in near)
            planned = [p for p in near if _n_messages(p[1].schedule) == fewest]
        return reduce(lambda a, b: b if b[1].is_better_than(a[1]) else a, planned)


def _n_messages(schedule: Schedule) -> int:
    """Edges between chunks that cross stages, for each micro-batch and direction."""
    return sum(a != b for a, b in pairwise(schedule.placement.stage_of))
