"""Plans of splits, and the figures by which they are compared.

A plan of a split is as good as its figures say, the first that differs:

1. the longest span of a stage and its optimizer: the time of a step where steps are
   post-validated;
2. the step behind a barrier, which waits for the last stage;
3. the largest memory of a stage.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

from zbpp.core import (
    Costs,
    LayerCosts,
    LimitError,
    MemoryModel,
    Pass,
    PassKind,
    Placement,
    Recompute,
    Schedule,
    lower_bounds,
)
from zbpp.schedules.planner.figures import PlanFigures
from zbpp.schedules.planner.layers.loads import Loads
from zbpp.schedules.planner.limits import check_one_fits

__all__ = [
    "SplitPlanner",
    "Trial",
    "Trials",
    "better",
    "recompute_by_chunk",
]


class SplitPlanner(Protocol):
    """A mode with its sizes: a schedule for the costs and memory of chunks."""

    def __call__(self, costs: Costs, memory: MemoryModel, effort: str) -> Schedule:
        """Plan.

        Raises:
            LimitError: it does not fit the memory limit.
        """


@dataclass(frozen=True)
class Trial(PlanFigures):
    """A split, its plan, and what it was planned for."""

    split: tuple[int, ...]
    recompute: frozenset[int]
    schedule: Schedule
    costs: Costs
    memory: MemoryModel
    names = "step", "barrier_step", "peak"


def better(one: Trial, other: Trial) -> Trial:
    """The better one of two; the first if they tie."""
    return other if other.is_better_than(one) else one


class Trials:
    """Plans of any split of the same layers; each is made once for an effort.

    Args:
        planner: a mode with its sizes.
        layers: times, memories and limit.
        placement: chunk to stage, of the planner's schedules.
        n_microbatches: likewise.
        recompute: layers that are recomputed.
    """

    def __init__(
        self,
        planner: SplitPlanner,
        layers: LayerCosts,
        placement: Placement,
        n_microbatches: int,
        *,
        recompute: Collection[int] = (),
    ) -> None:
        self.layers = layers
        self.placement = placement
        self.n_microbatches = n_microbatches
        self.recompute = frozenset(recompute)
        self.n_plans = 0
        """Plans made so far."""
        self.last_error: LimitError | None = None
        """Of the last split that did not fit the memory."""
        self._planner = planner
        self._done: dict[tuple[tuple[int, ...], str], Trial | None] = {}
        self._bounds: dict[tuple[int, ...], tuple[float, float]] = {}
        self.loads = Loads.of(
            layers, placement, n_microbatches, recompute=self.recompute
        )

    @property
    def price(self) -> float:
        """Passes that a plan with effort fast places, roughly."""
        n_chunks = self.placement.n_chunks
        runs = 1.0 if n_chunks == self.placement.n_stages else 6.0
        return 3.0 * runs * n_chunks * self.n_microbatches

    def in_flight(self, split: Sequence[int]) -> list[int]:
        """Micro-batches that each chunk holds at most where no memory limit is."""
        costs, memory = self.layers.on(self.placement, split, recompute=self.recompute)
        plan = self._planner(costs, memory.without_limit(), "fast")
        most = [0] * self.placement.n_chunks
        for order in plan.orders:
            held = dict.fromkeys(range(len(most)), 0)
            for job in order:
                if isinstance(job, Pass) and job.kind is not PassKind.W:
                    held[job.chunk] += 1 if job.kind is PassKind.F else -1
                    most[job.chunk] = max(most[job.chunk], held[job.chunk])
        return most

    def load(self, split: Sequence[int]) -> float:
        """Load of the busiest stage: no plan of the split has a shorter step."""
        return max(self.loads.by_stage(split)[0])

    def bound(self, split: Sequence[int]) -> float:
        """Lower bound of the step of every plan; inf: no micro-batch fits."""
        return self._both(split)[0]

    def outlook(self, split: Sequence[int]) -> float:
        """Mean of all lower bounds: low where much is in favour of a split.

        The highest bound alone says less about plans: it is often the same work of one
        stage, while memory and the way through the pipeline differ.
        """
        return self._both(split)[1]

    def _both(self, split: Sequence[int]) -> tuple[float, float]:
        key = tuple(split)
        if key not in self._bounds:
            self._bounds[key] = self._bound(key)
        return self._bounds[key]

    def _bound(self, split: tuple[int, ...]) -> tuple[float, float]:
        placement, m = self.placement, self.n_microbatches
        costs, memory = self.layers.on(placement, split, recompute=self.recompute)
        try:
            check_one_fits("split", placement, memory, m)
        except LimitError:
            return math.inf, math.inf
        bounds = list(lower_bounds(placement, m, costs, memory).values())
        return max(*bounds, self.load(split)), sum(bounds) / len(bounds)

    def fast(self) -> list[Trial]:
        """All splits that were planned with effort fast and fit, in turn."""
        pairs = self._done.items()
        return [one for (_, effort), one in pairs if one and effort == "fast"]

    def is_done(self, split: tuple[int, ...], effort: str = "fast") -> bool:
        """True if there is nothing to plan."""
        return (split, effort) in self._done

    def of(self, split: Sequence[int], effort: str = "fast") -> Trial | None:
        """Plan a split; None if it does not fit the memory.

        Raises:
            RequestError: the split does not fit the placement or the layers.
        """
        key = tuple(split), effort
        if key not in self._done:
            self._done[key] = self._plan(*key)
        return self._done[key]

    def _plan(self, split: tuple[int, ...], effort: str) -> Trial | None:
        costs, memory = self.layers.on(self.placement, split, recompute=self.recompute)
        self.n_plans += 1
        try:
            plan = self._planner(costs, memory, effort)
        except LimitError as error:
            self.last_error = error
            return None
        return Trial(split, self.recompute, plan, costs, memory)


def recompute_by_chunk(
    split: Iterable[int], recompute: Collection[int]
) -> tuple[Recompute, ...] | None:
    """Layers that are recomputed, as a `Schedule` says it; None: none.

    >>> recompute_by_chunk((2, 2, 2), {1, 2, 3})
    ((1,), True, False)
    """
    if not recompute:
        return None
    found: list[Recompute] = []
    for first, end in pairwise(accumulate(split, initial=0)):
        own = tuple(i - first for i in range(first, end) if i in recompute)
        found.append(own if 0 < len(own) < end - first else bool(own))
    return tuple(found)
