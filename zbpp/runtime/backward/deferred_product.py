"""One product of the graph: the operands B takes from it, and W's gradients."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from zbpp.runtime.backward.hooks import watch
from zbpp.runtime.backward.weight_rules import Gradients, Rule

__all__ = ["LEAF", "DeferredWeightGrad", "Product", "is_dtensor", "may_add"]

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

    def take(self) -> tuple[Gradients, Tensor]:
        """Return what W needs of the node, and the tensor that it holds.

        Called before the node runs, which frees what is read here. An operand is cut
        off its graph, which leads to the chunk's input and would keep it until W.
        """
        saved = [getattr(self.node, f"_saved_{name}").detach() for name in self.reads]
        # a convolution's weight, if read, gives its shape only
        return self.rule.prepare(self.node, self.operands, *saved), saved[0]

    def defer(
        self, dy: Tensor, taken: tuple[Gradients, Tensor] | None = None
    ) -> "DeferredWeightGrad":
        """Return the work for W.

        Args:
            dy: gradient of the product.
            taken: from before the node has run; None: it has not.
        """
        gradients, x = taken or self.take()
        return DeferredWeightGrad(
            self.edges, gradients, (dy, x), (_version(dy), _version(x))
        )


class DeferredWeightGrad(NamedTuple):
    """The weight gradients of a product, for W; ``kept`` begins with dy."""

    edges: tuple[GradientEdge, ...]
    gradients: Gradients
    kept: tuple[Tensor, Tensor]
    versions: tuple[int, int]

    def compute(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of the edges.

        Raises:
            RuntimeError: an operand is no longer what B has left.
        """
        self._check()
        return self.gradients.of(self.kept[0])

    def add_exactly(self) -> bool:
        """Add the gradient as autograd would, where it would only add.

        A first gradient is taken as it is if it has the parameter's layout.
        """
        leaf, is_transposed = self._only_leaf()
        if leaf is None or not may_add(leaf, self.kept[0].dtype):
            return False
        total = leaf.grad
        self._check()
        (gradient,) = self.gradients.of(self.kept[0])
        assert gradient is not None
        if is_transposed:
            gradient = gradient.t()
        if total is not None:
            total.add_(gradient)
        elif gradient.stride() == leaf.stride():
            leaf.grad = gradient
        else:
            leaf.grad = torch.empty_like(leaf).copy_(gradient)
        return True

    def add_in_place(self) -> bool:
        """Add the gradient within the product's kernel, where that is possible."""
        leaf, is_transposed = self._only_leaf()
        if leaf is None or not may_add(leaf, self.kept[0].dtype):
            return False
        total = leaf.grad
        if total is None:
            return self.add_exactly()
        self._check()
        return self.gradients.add_to(
            total.t() if is_transposed else total, self.kept[0]
        )

    def _only_leaf(self) -> tuple[Tensor | None, bool]:
        """Return the leaf whose gradient this is, and whether it is transposed.

        None where autograd may do more than to add: where the only edge leads to
        something else than a trainable leaf, at most transposed, with dense gradients
        and no hook on the way.
        """
        if len(self.edges) > 1:
            return None, False
        above = self.edges[0].node
        node, is_transposed = _leaf_node_below(above)
        if node is None:
            return None, False
        leaf: Tensor = node.variable
        if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
            return None, False
        if not leaf.requires_grad or is_dtensor(leaf):
            return None, False
        if not self.kept[1].layout is self.kept[0].layout is _STRIDED:
            return None, False
        watch.look()
        if is_transposed and not watch.is_free(above):
            return None, False
        if not watch.is_clean_leaf(leaf, node):
            return None, False
        return leaf, is_transposed

    def _check(self) -> None:
        dy, x = self.kept
        if self.versions != (_version(dy), _version(x)):
            raise RuntimeError(
                "a tensor that W needs was changed in place after B; change a copy"
            )


def _leaf_node_below(node: Any) -> tuple[Any, bool]:
    """Return the leaf's node that a node is, or is the transpose of, else None."""
    is_transposed = type(node).__name__ == "TBackward0"
    if is_transposed:
        node = node.next_functions[0][0]
    return node if type(node).__name__ == LEAF else None, is_transposed


def may_add(leaf: Tensor, dtype: torch.dtype) -> bool:
    """True if a gradient of this dtype is added, or taken, without a cast."""
    total = leaf.grad
    if total is not None:
        return total.dtype == dtype and total.layout is _STRIDED
    return dtype == leaf.dtype == getattr(leaf, "grad_dtype", dtype)


def _version(tensor: Tensor) -> int:
    """Return how often it was changed in place; inference tensors do not tell."""
    try:
        return tensor._version
    except RuntimeError:  # rare, and cheaper than to ask each time
        return 0


def is_dtensor(tensor: Tensor) -> bool:
    """True if it is split over processes, by tensor parallelism; W sends nothing."""
    return type(tensor).__name__ == "DTensor"
