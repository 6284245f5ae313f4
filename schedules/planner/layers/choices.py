"""Choices of recomputed layers of one split, by how many of each chunk.

A choice is a number of layers for each chunk. Of a chunk those come first that save
most memory, m_b - m_r, for their time f; of equal ones the first layers, whose
backward runs last, when the others have given back what they held.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from zbpp.core import LayerCosts, Placement
from zbpp.schedules.planner.layers.trials import SplitPlanner, Trial, Trials

__all__ = ["Choices", "Counts"]

Counts = tuple[int, ...]
"""Layers of each chunk that are recomputed."""


class Choices:
    """Plans of any choice, each made once for an effort.

    Args:
        planner: a mode with its sizes.
        layers: times, memories, with m_r, and limit.
        placement: chunk to stage.
        n_microbatches: in a step.
        split: layers of each chunk.
    """

    def __init__(
        self,
        planner: SplitPlanner,
        layers: LayerCosts,
        placement: Placement,
        n_microbatches: int,
        split: Sequence[int],
    ) -> None:
        self.placement = placement
        self.split = tuple(split)
        self._layers = layers
        self._planner = planner
        self._n_microbatches = n_microbatches
        ends = pairwise(accumulate(split, initial=0))
        self._ranked = [_ranked(layers, range(*one)) for one in ends]
        self.most: Counts = tuple(map(len, self._ranked))
        """Layers of each chunk that save memory."""
        self._bounds: dict[Counts, tuple[float, float]] = {}
        self._plans: dict[tuple[Counts, str], Trial | None] = {}

    def layers_of(self, counts: Counts) -> frozenset[int]:
        """The layers that are recomputed, of the whole model."""
        pairs = zip(self._ranked, counts, strict=True)
        return frozenset(i for ranked, n in pairs for i in ranked[:n])

    def bound(self, counts: Counts) -> float:
        """A lower bound of the step; inf: no micro-batch fits."""
        return self._both(counts)[0]

    def outlook(self, counts: Counts) -> float:
        """Mean of all lower bounds, as `Trials.outlook`."""
        return self._both(counts)[1]

    def _both(self, counts: Counts) -> tuple[float, float]:
        if counts not in self._bounds:
            trials = self._trials(counts)
            both = trials.bound(self.split), trials.outlook(self.split)
            self._bounds[counts] = both
        return self._bounds[counts]

    def is_done(self, counts: Counts, effort: str = "fast") -> bool:
        """True if there is nothing to plan."""
        return (counts, effort) in self._plans

    def of(self, counts: Counts, effort: str = "fast") -> Trial | None:
        """Plan a choice; None if it does not fit the memory."""
        key = counts, effort
        if key not in self._plans:
            self._plans[key] = self._trials(counts).of(self.split, effort)
        return self._plans[key]

    @property
    def price(self) -> float:
        """Passes that a plan with effort fast places, roughly."""
        return self._trials((0,) * len(self.most)).price

    def _trials(self, counts: Counts) -> Trials:
        return Trials(
            *(self._planner, self._layers, self.placement, self._n_microbatches),
            recompute=self.layers_of(counts),
        )


def _ranked(layers: LayerCosts, own: range) -> list[int]:
    m_b, m_r, f = (layers.of(name) for name in ("m_b", "m_r", "f"))

    def worth(layer: int) -> float:
        saved = m_b[layer] - m_r[layer]
        return saved / f[layer] if f[layer] > 0 else math.inf

    return sorted((i for i in own if m_b[i] > m_r[i]), key=lambda i: (-worth(i), i))
