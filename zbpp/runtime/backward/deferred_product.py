"""One product of the graph: the operands B takes from it, and W's gradients."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zbpp.runtime.backward.hooks import watch
from zbpp.runtime.backward.ways import Way, is_view, part_of, way_of, whole_of
from zbpp.runtime.backward.weight_rules import Gradients, OfMatrix, Rule
from zbpp.runtime.support.autograd_internals import can_read_saved

__all__ = [
    "DeferredWeightGrad",
    "Edges",
    "Product",
    "Site",
    "Target",
    "can_read",
    "check_versions",
    "edges_by_leaf",
    "find_target",
    "is_dtensor",
    "may_add",
    "versions_of",
]

_STRIDED = torch.strided

Edges = Sequence[tuple[Any, int]]
"""Nodes and outputs: `GradientEdge`s, which torch is slow to make."""

Taken = tuple[Gradients, list[Tensor]]


class Target(NamedTuple):
    """A leaf to whose gradient W may add by itself.

    Args:
        leaf: the parameter.
        is_turned: the operand is its transpose.
        way: to it; None if it is no more than that.
    """

    leaf: Tensor
    is_turned: bool = False
    way: Way | None = None

    def part(self, total: Tensor) -> Tensor:
        """Return the part of a sum for the leaf that is the operand's."""
        if self.way is not None:
            return part_of(total, self.way)
        return total.t() if self.is_turned else total


class Product(NamedTuple):
    """The way to split a node, alike in all graphs of a kind.

    Args:
        rule: of the node's kind.
        operands: those that are deferred.
        reads: saved tensors that W needs.
        saved: the attributes of the node that hold them.
        leaf: its node, if the operand is a part of a leaf, else None.
        target: the leaf that is known to be the operand, or its transpose, as long as
            no hook is registered anywhere.
    """

    rule: Rule
    operands: tuple[int, ...]
    reads: tuple[str, ...]
    saved: tuple[str, ...]
    leaf: Any = None
    target: Target | None = None

    def take(self, node: Any) -> Taken:
        """Return what W needs of a node, and the tensors that it holds.

        Called before the node runs, which frees what is read here. An operand is cut
        off its graph, which leads to the chunk's input and would keep it until W.
        """
        found = [getattr(node, name) for name in self.saved]
        saved = [None if x is None else x.detach() for x in found]
        gradients = self.rule.prepare(node, self.operands, *saved)
        kept = saved[: self.rule.n_kept]
        if kept[-1] is None:
            kept.pop()
        return gradients, kept  # type: ignore[return-value]  # the first is there

    def defer(self, edges: Edges, dy: Tensor, taken: Taken) -> "DeferredWeightGrad":
        """Return the work for W.

        Args:
            edges: where it goes on.
            dy: gradient of the product.
            taken: from before the node has run.
        """
        gradients, operands = taken
        kept = [dy, *operands]
        return DeferredWeightGrad(
            edges, gradients, kept, versions_of(kept), self.target, watch.n_others
        )


Site = tuple[Any, Product, Edges]
"""A node to split, how, and where W goes on."""


def edges_by_leaf(products: Sequence[Site]) -> dict[Any, list[tuple[Any, int]]]:
    """Collect where W goes on for each leaf that is used in parts, by its node."""
    found: dict[Any, list[tuple[Any, int]]] = {}
    for _, product, edges in products:
        if product.leaf is not None:
            found.setdefault(product.leaf, []).extend(edges)
    return found


def can_read(products: Sequence[Site]) -> bool:
    """True if what these have saved may be read once more; see `can_read_saved`."""
    return all(
        can_read_saved(node, name)
        for node, product, _ in products
        for name in product.reads
    )


class DeferredWeightGrad(NamedTuple):
    """The weight gradients of a product, for W; ``kept`` begins with dy."""

    edges: Edges
    gradients: Gradients
    kept: list[Tensor]
    versions: list[int]
    known: Target | None
    n_hooks: int
    """Of others, when the target was known."""
    dtype: torch.dtype | None = None
    """Of the gradient; None: dy's."""

    def compute(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of the edges.

        Raises:
            RuntimeError: an operand is no longer what B has left.
        """
        self.check()
        return self.gradients.of(self.kept[0])

    def add_exactly(self) -> bool:
        """Add the gradient as autograd would, where it would only add.

        A first gradient is taken as it is if it has the parameter's layout.
        """
        target = self.target()
        if target is None:
            return False
        self.check()
        leaf, is_turned, way = target
        total = leaf.grad
        if total is not None and not is_turned:
            total = total if way is None else part_of(total, way)
            total.add_(self.only_gradient())
            return True
        gradient = self._as_leaf(is_turned, way)
        if total is not None:
            total.add_(gradient)
        elif gradient.stride() == leaf.stride():
            leaf.grad = gradient
        else:
            leaf.grad = torch.empty_like(leaf).copy_(gradient)
        return True

    def _as_leaf(self, is_turned: bool, way: Way | None) -> Tensor:
        """Return the only gradient in the shape of its leaf."""
        if is_turned and isinstance(self.gradients, OfMatrix):
            return self.gradients.turned(self.kept[0])
        gradient = self.only_gradient()
        if way is not None:
            return whole_of(gradient, way)
        return gradient.t() if is_turned else gradient

    def add_in_place(self) -> bool:
        """Add the gradient within the product's kernel, where that is possible."""
        target = self.target()
        if target is None:
            return False
        total = target.leaf.grad
        if total is None:
            return self.add_exactly()
        self.check()
        part = target.part(total)
        return self.gradients.add_to(part, self.kept[0]) or self.add_exactly()

    def only_gradient(self) -> Tensor:
        """Return the gradient of the only edge."""
        (gradient,) = self.gradients.of(self.kept[0])
        assert gradient is not None
        return gradient

    def target(self) -> Target | None:
        """Return where this gradient may be added without autograd; `watch` has looked.

        None where autograd may do more than to add: where the only edge leads to
        something else than a trainable leaf, or a plain view of it, with dense
        gradients and no hook on the way.
        """
        found = self.known
        if found is None or self.n_hooks != watch.n_others:
            found = find_target(self.edges)
        if found is None or not found.leaf.requires_grad:
            return None
        for x in self.kept:
            if x.layout is not _STRIDED:
                return None
        dtype = self.dtype or self.kept[0].dtype
        return found if may_add(found.leaf, dtype) else None

    def check(self) -> None:
        """Compare the versions of what B has left.

        Raises:
            RuntimeError: something was changed in place.
        """
        check_versions(self.kept, self.versions)


def find_target(edges: Edges, *, may_be_dealt: bool = False) -> Target | None:
    """Return where the gradient of an only edge may be added; `watch` has looked.

    Args:
        edges: of the deferred operands.
        may_be_dealt: take DTensors as well.
    """
    if len(edges) > 1:
        return None
    way, node = way_of(*edges[0])
    leaf: Tensor = node.variable
    if is_dtensor(leaf) and not may_be_dealt:
        return None
    if not watch.is_clean(leaf, node):
        return None
    if not all(is_view(above) and watch.is_free(above) for above, _ in way):
        return None
    if not way:
        return Target(leaf)
    is_turned = len(way) == 1 and type(way[0][0]).__name__ == "TBackward0"
    return Target(leaf, is_turned, None if is_turned else way)


def may_add(leaf: Tensor, dtype: torch.dtype) -> bool:
    """True if a gradient of this dtype is added, or taken, without a cast."""
    total = leaf.grad
    if total is not None:
        return total.dtype == dtype and total.layout is _STRIDED
    return dtype == leaf.dtype == getattr(leaf, "grad_dtype", dtype)


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often each was changed in place."""
    try:
        return [x._version for x in tensors]
    except RuntimeError:  # rare, and cheaper than to ask each time
        return [0 if x.is_inference() else x._version for x in tensors]


def check_versions(kept: Sequence[Tensor], versions: list[int]) -> None:
    """Compare how often each was changed in place with what it was.

    Raises:
        RuntimeError: something was changed.
    """
    if versions_of(kept) != versions:
        raise RuntimeError(
            "a tensor that W needs was changed in place after B; change a copy"
        )


def is_dtensor(tensor: Tensor) -> bool:
    """True if it is split over processes, by tensor parallelism; W sends nothing."""
    return type(tensor).__name__ == "DTensor"
