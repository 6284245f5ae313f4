"""The gradients of a leaf that products use in parts: all are added together.

A hook on the leaf sees one gradient, as in a full backward; so parts go to autograd in
one call. Where it would only add, each part is added where it belongs, and the rest of
the leaf is left alone. (Autograd adds zeros to it, so a zero's sign may differ.)
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zbpp.runtime.backward.deferred_product import (
    DeferredWeightGrad,
    Site,
    edges_by_leaf,
)
from zbpp.runtime.backward.ways import overlap

__all__ = ["LeafParts", "has_overlaps"]


class LeafParts:
    """The work of W for the products with parts of one leaf, in the order of B."""

    def __init__(self) -> None:
        self.edges: list[tuple[Any, int]] = []
        self.kept: list[Tensor] = []
        self._works: list[DeferredWeightGrad] = []

    def append(self, work: DeferredWeightGrad) -> None:
        """Take what B has left of one product."""
        self.edges += work.edges
        self.kept += work.kept
        self._works.append(work)

    def compute(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of the edges.

        Raises:
            RuntimeError: an operand is no longer what B has left.
        """
        return tuple(work.compute()[0] for work in self._take())

    def add_exactly(self) -> bool:
        """Add each gradient to its part, if autograd would only add."""
        return self._add(is_exact=True)

    def add_in_place(self) -> bool:
        """Add each within its product's kernel, where that is possible."""
        return self._add(is_exact=False)

    def _add(self, *, is_exact: bool) -> bool:
        found = [work.target() for work in self._works]
        targets = [target for target in found if target is not None]
        if len(targets) < len(found):
            return False
        leaf = targets[0].leaf
        total = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        is_exact = is_exact or leaf.grad is None
        for work, target in zip(self._take(), targets, strict=True):
            part = target.part(total)
            work.check()
            if is_exact or not work.gradients.add_to(part, work.kept[0]):
                part.add_(work.only_gradient())
        leaf.grad = total
        return True

    def _take(self) -> Iterator[DeferredWeightGrad]:
        """Hand out the works, whose operands are freed one by one."""
        self.kept.clear()
        self._works.reverse()
        while self._works:
            yield self._works.pop()


def has_overlaps(products: Sequence[Site]) -> bool:
    """True if two parts of a leaf, which a graph may choose, have numbers in common."""
    return any(overlap(leaf, own) for leaf, own in edges_by_leaf(products).items())
