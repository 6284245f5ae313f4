"""Figures of plans, and how they are compared: the first that differs decides."""

from collections.abc import Sequence
from functools import cached_property

from zbpp.core import (
    Costs,
    MemoryModel,
    Schedule,
    Slot,
    peaks,
    replay,
    step_behind_barrier,
)

__all__ = ["ROUNDING", "PlanFigures", "is_below"]

ROUNDING = 1e-9  # relative


class PlanFigures:
    """Figures of a plan that both kinds of candidates have, each made when asked for.

    A subclass has the fields below, and says in ``names`` which figures are compared.
    """

    plan: Schedule
    costs: Costs
    """Of the chunks, as the memory is."""
    memory: MemoryModel
    names: tuple[str, ...]

    @cached_property
    def rows(self) -> list[list[Slot]]:
        """Jobs of each stage with their times."""
        times = self.costs.on(self.plan.placement)
        m = self.plan.n_microbatches
        return [list(r) for r in replay(self.plan.orders, times, n_microbatches=m)]

    @cached_property
    def barrier_step(self) -> float:
        """Time of a step among many, behind a barrier."""
        times = self.costs.on(self.plan.placement)
        m = self.plan.n_microbatches
        return step_behind_barrier(self.plan.orders, times, n_microbatches=m)

    @cached_property
    def peak(self) -> float:
        """Largest memory of a stage."""
        return max(peaks(self.plan.orders, self.memory.on(self.plan.placement)))

    def is_better_than(self, other: "PlanFigures") -> bool:
        """Compare figure by figure; a tie in all of them is not better."""
        for name in self.names:  # a figure takes time: none more than is needed
            mine, theirs = getattr(self, name), getattr(other, name)
            if _differ(mine, theirs):
                return bool(mine < theirs)
        return False


def is_below(figures: Sequence[float], others: Sequence[float]) -> bool:
    """Compare figure by figure, but for rounding; a tie in all of them is not below."""
    for mine, theirs in zip(figures, others, strict=True):
        if _differ(mine, theirs):
            return mine < theirs
    return False


def _differ(one: float, other: float) -> bool:
    return abs(one - other) > ROUNDING * max(one, other)
