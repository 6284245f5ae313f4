"""Reduce a layer's gradients as soon as the last W of its chunk has done the layer.

W of the last micro-batch | layer 3 | layer 2 | layer 1 |
reduce                              | layer 3 | layer 2 | layer 1

With alternating buffers every W does so, for its own micro-batch.

Replicas may run other parts of a layer, which leaves work to W on one of them only. So
that their sums meet all the same, layers are reduced in one order, the last one first:
a layer waits for those behind it.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from zbpp.runtime.backward.queue import EachSum, Root
from zbpp.runtime.support.autograd_internals import leaves_behind

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
        self._left: list[tuple[int, int]] = []

    def begin(self, edges: Sequence[Sequence[Root]]) -> None:
        """Find the work that each layer waits for; B has done the rest."""
        last = dict.fromkeys(self._layer_of.values(), 0)
        for place, piece in enumerate(edges, start=1):
            leaves = [leaf for edge in piece for leaf in leaves_behind(edge)]
            if not leaves or any(leaf not in self._layer_of for leaf in leaves):
                self._left = []  # it may be of any layer: all wait for the job
                return
            for leaf in leaves:
                last[self._layer_of[leaf]] = place
        self._left = [(last[layer], layer) for layer in sorted(last, reverse=True)]

    def done(self, n: int) -> int:
        """Reduce the layers that needed no more than n pieces of work.

        Returns:
            The pieces that the next layer needs.
        """
        while self._left and self._left[0][0] <= n:
            self._reduce(self._left.pop(0)[1])
        return self._left[0][0] if self._left else sys.maxsize


class LayerSums(LayerProgress, EachSum):
    """Sums every micro-batch by itself.

    Args:
        layer_of: layer of every leaf of the chunk.
        reduce: called with each layer; it takes the gradients that are there.
        rest: called when all of a micro-batch are there.
        within_backward: within it layers are reduced when a full backward leaves them.
        left_over: called when a W follows another: the sums of a micro-batch are left
            to a job, and this reduces what no job has; None: W begins them itself.
    """

    def __init__(
        self,
        layer_of: Mapping[Tensor, int],
        reduce: Callable[[int], None],
        rest: Callable[[], None],
        within_backward: Callable[[], AbstractContextManager[object]] = nullcontext,
        *,
        left_over: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(layer_of, reduce)
        self._rest = rest
        self._within_backward = within_backward
        self._left_over = left_over

    def begin(self, edges: Sequence[Sequence[Root]]) -> None:
        """Find the work that each layer waits for, unless a job will reduce them."""
        if self._left_over is None:
            super().begin(edges)

    def before(self) -> None:
        """Reduce what no job has taken."""
        if self._left_over is not None:
            self._left_over()

    def within_backward(self) -> AbstractContextManager[object]:
        """Reduce layers as a full backward leaves them."""
        return self._within_backward()

    def rest(self) -> None:
        """Reduce what is there."""
        self._rest()
