"""Reduce a layer's gradients as soon as the last W of its chunk has done the layer.

W of the last micro-batch | layer 3 | layer 2 | layer 1 |
reduce                              | layer 3 | layer 2 | layer 1
"""

import sys
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from zbpp.runtime.backward.queue import Root
from zbpp.runtime.support.autograd_internals import leaves_behind

__all__ = ["LayerProgress"]


class LayerProgress:
    """Hears how far the last W of a chunk is.

    Args:
        layer_of: layer of every leaf of the chunk.
        reduce: called with each layer whose gradients are all there.
    """

    def __init__(
        self, layer_of: Mapping[Tensor, int], reduce: Callable[[int], None]
    ) -> None:
        self._layer_of = layer_of
        self._reduce = reduce
        self._left: list[tuple[int, int]] = []

    def begin(self, edges: Sequence[Sequence[Root]]) -> None:
        """Find the work that each layer waits for; B has done the rest."""
        last = dict.fromkeys(self._layer_of.values(), 0)
        for place, own in enumerate(edges, start=1):
            leaves = [leaf for edge in own for leaf in leaves_behind(edge)]
            if not leaves or any(leaf not in self._layer_of for leaf in leaves):
                self._left = []  # it may be of any layer: all wait for the job
                return
            for leaf in leaves:
                last[self._layer_of[leaf]] = place
        self._left = sorted((n, -layer) for layer, n in last.items())

    def done(self, n: int) -> int:
        """Reduce the layers that needed no more than n pieces of work.

        Returns:
            The pieces that the next layer needs.
        """
        while self._left and self._left[0][0] <= n:
            self._reduce(-self._left.pop(0)[1])
        return self._left[0][0] if self._left else sys.maxsize
