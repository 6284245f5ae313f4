"""One product of the graph: what B takes from it, and what W makes of that."""

from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge

from zbpp.runtime.backward.weight_rules import Gradients, Rule

__all__ = ["LEAF", "DeferredWeightGrad", "Product", "is_dtensor"]

LEAF = "AccumulateGrad"
"""The name of a leaf's node."""


class Product(NamedTuple):
    """A node to split: its rule, the deferred operands, and where W goes on."""

    node: Any
    rule: Rule
    operands: tuple[int, ...]
    reads: tuple[str, ...]
    edges: tuple[GradientEdge, ...]

    def defer(self, dy: Tensor) -> "DeferredWeightGrad":
        """Return the work for W.

        Called before the node runs, which frees what is read here.
        """
        saved = [getattr(self.node, f"_saved_{name}") for name in self.reads]
        gradients = self.rule.prepare(self.node, self.operands, *saved)
        kept = (dy, saved[0])  # a convolution's weight, if read, gives its shape only
        versions = [tensor._version for tensor in kept]
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

        That is so if the only edge leads to a leaf, at most transposed, that has a
        gradient of the same dtype, and no hook that would have to see the summand.
        """
        if len(self.edges) > 1:
            return False
        leaf, is_transposed = _leaf_below(self.edges[0].node)
        if leaf is None or leaf.grad is None or leaf.grad.dtype != self.kept[0].dtype:
            return False
        if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
            return False
        if is_dtensor(leaf):
            return False
        self._check()
        total = leaf.grad.t() if is_transposed else leaf.grad
        return self.gradients.add_to(total, self.kept[0])

    def _check(self) -> None:
        if self.versions != [tensor._version for tensor in self.kept]:
            raise RuntimeError(
                "a tensor that W needs was changed in place after B; change a copy"
            )


def _leaf_below(node: Any) -> tuple[Tensor | None, bool]:
    """The leaf that a node is, or is the transpose of."""
    is_transposed = type(node).__name__ == "TBackward0"
    if is_transposed:
        node = node.next_functions[0][0]
    if type(node).__name__ != LEAF:
        return None, is_transposed
    return node.variable, is_transposed


def is_dtensor(tensor: Tensor) -> bool:
    """Whether it is split over processes, by tensor parallelism; W sends nothing."""
    return type(tensor).__name__ == "DTensor"
