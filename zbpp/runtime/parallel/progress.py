"""Reduce a layer's gradients as soon as the last W of its chunk has done the layer.

W of the last micro-batch | layer 3 | layer 2 | layer 1 |
reduce                              | layer 3 | layer 2 | layer 1

With alternating buffers every W does so, for its own micro-batch.

Replicas may run other parts of a layer, which leaves work to W on one of them only. So
that their sums meet all the same, layers are reduced in one order, the last one first:
a layer waits for those behind it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from zbpp.runtime.backward.order import EachSum

__all__ = ["LayerProgress", "LayerSums"]


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
        self._left: Counter[int] = Counter()
        self._order: list[int] = []

    def begin(self, leaves: Sequence[Tensor]) -> None:
        """Learn which leaves W will add to; B has done the rest."""
        self._left = Counter(self._layer_of[leaf] for leaf in leaves)
        self._order = sorted({*self._layer_of.values()})
        self._go_on()

    def done(self, leaf: Tensor) -> None:
        """All gradients of a leaf are there."""
        self._left[self._layer_of[leaf]] -= 1
        self._go_on()

    def _go_on(self) -> None:
        while self._order and not self._left[self._order[-1]]:
            self._reduce(self._order.pop())


class LayerSums(LayerProgress, EachSum):
    """Sums every micro-batch by itself.

    Args:
        layer_of: layer of every leaf of the chunk.
        reduce: called with each layer; it takes the gradients that are there.
        rest: called when all of a micro-batch are there.
    """

    def __init__(
        self,
        layer_of: Mapping[Tensor, int],
        reduce: Callable[[int], None],
        rest: Callable[[], None],
    ) -> None:
        super().__init__(layer_of, reduce)
        self._rest = rest

    def rest(self) -> None:
        """Reduce what is there."""
        self._rest()
