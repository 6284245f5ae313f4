"""One product of the graph: the operands B takes from it, and W's gradients."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from zbpp.runtime.backward.hooks import watch
from zbpp.runtime.backward.weight_rules import Gradients, Rule

__all__ = ["LEAF", "DeferredWeightGrad", "Product", "is_dtensor"]

LEAF = "AccumulateGrad"
"""The name of a leaf's node."""

_STRIDED = torch.strided


class Product(NamedTuple):
    """A node to split: its rule, the deferred operands, and where W goes on."""

    node: Any
    rule: Rule
    operands: tuple[int, ...]
    reads: tuple[str, ...]
    edges: tuple[GradientEdge, ...]

    def defer(self, dy: Tensor) -> "DeferredWeightGrad":
        """Return the work for W.

        Called before the node runs, which frees what is read here. An operand is cut
        off its graph, which leads to the chunk's input and would keep it until W.
        """
        saved = [getattr(self.node, f"_saved_{name}").detach() for name in self.reads]
        gradients = self.rule.prepare(self.node, self.operands, *saved)
        kept = (dy, saved[0])  # a convolution's weight, if read, gives its shape only
        versions = [_version(tensor) for tensor in kept]
        return DeferredWeightGrad(self.edges, gradients, kept, versions)


class DeferredWeightGrad(NamedTuple):
    """The weight gradients of a product, for W; ``kept`` begins with dy."""

    edges: tuple[GradientEdge, ...]
    gradients: Gradients
    kept: tuple[Tensor, ...]
    versions: list[int]

    def compute(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of the edges.

        Raises:
            RuntimeError: an operand is no longer what B has left.
        """
        self._check()
        return self.gradients.of(self.kept[0])

    def add(self) -> bool:
        """Add the gradient within the product's kernel, where that is possible.

        That is so if the only edge leads to a trainable leaf, at most transposed, that
        has a gradient of the same dtype and layout, and no hook on the way that would
        have to see the summand.
        """
        if len(self.edges) > 1:
            return False
        node, is_transposed = _leaf_node_below(self.edges[0].node)
        if node is None:
            return False
        leaf = node.variable
        total = leaf.grad
        if total is None or total.dtype != self.kept[0].dtype or not leaf.requires_grad:
            return False
        if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
            return False
        if is_dtensor(leaf):
            return False
        if total.layout is not _STRIDED or self.kept[1].layout is not _STRIDED:
            return False
        watch.look()
        if is_transposed and not watch.is_free(self.edges[0].node):
            return False
        if not watch.is_clean_leaf(leaf, node):
            return False
        self._check()
        return self.gradients.add_to(
            total.t() if is_transposed else total, self.kept[0]
        )

    def _check(self) -> None:
        if self.versions != [_version(tensor) for tensor in self.kept]:
            raise RuntimeError(
                "a tensor that W needs was changed in place after B; change a copy"
            )


def _leaf_node_below(node: Any) -> tuple[Any, bool]:
    """Return the leaf's node that a node is, or is the transpose of, else None."""
    is_transposed = type(node).__name__ == "TBackward0"
    if is_transposed:
        node = node.next_functions[0][0]
    return node if type(node).__name__ == LEAF else None, is_transposed


def _version(tensor: Tensor) -> int:
    """Return how often it was changed in place; inference tensors do not tell."""
    try:
        return tensor._version
    except RuntimeError:  # rare, and cheaper than to ask each time
        return 0


def is_dtensor(tensor: Tensor) -> bool:
    """True if it is split over processes, by tensor parallelism; W sends nothing."""
    return type(tensor).__name__ == "DTensor"
