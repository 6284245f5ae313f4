"""Find, in the graph of one forward, the weight gradients that can wait for W.

    y ── Addmm ──┬── x ...                      B goes on here
                 └── T ── weight (a leaf)       W starts here

A matrix product or convolution is split if one of its operands is a leaf that is used
nowhere else in the graph, or a view or cast of one. All that lies between the product
and the leaf (the transpose, autocast's cast, the leaf's hooks) then runs in W, by
autograd itself; so nothing has to be known about it.

A leaf with a second use stays in B: its gradients would be added up in another order.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from zbpp.runtime.backward.deferred_product import LEAF, Product, is_dtensor
from zbpp.runtime.backward.weight_rules import RULES, Rule
from zbpp.runtime.support.torch_internals import can_read_saved, has_saved

__all__ = ["SplitPlan", "plan_split"]

_REENTRANT = "CheckpointFunctionBackward"

_KNOWN = (Tensor, nn.Parameter)  # other subclasses may compute something else
_VIEWS_AND_CASTS = {
    *("TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0"),
    *("UnsafeViewBackward0", "ReshapeAliasBackward0", "ToCopyBackward0"),
    *("UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1"),
    *("AliasBackward0", "ExpandBackward0", "CloneBackward0"),
}


class SplitPlan(NamedTuple):
    """What B computes and what it leaves.

    Args:
        products: nodes to split.
        leaves: all leaves whose gradient is computed in B.
        waiting: the other leaves.
        reasons: why a leaf is none of those, where there is more to say than that no
            product uses it.
        is_reentrant: whether there is a reentrant checkpoint; B then runs all.
    """

    products: list[Product]
    leaves: list[Tensor]
    waiting: list[Tensor]
    reasons: dict[int, str]
    is_reentrant: bool

    def where(self) -> dict[Tensor, str]:
        """For each leaf ``"W"``, or ``"B: "`` and the reason."""
        found = dict.fromkeys(self.waiting, "W")
        for leaf in self.leaves:
            reason = self.reasons.get(id(leaf), "no product's weight")
            found[leaf] = (
                f"B: {'reentrant checkpoint' if self.is_reentrant else reason}"
            )
        return found


def plan_split(roots: Iterable[Tensor], inputs: Iterable[Tensor] = ()) -> SplitPlan:
    """Walk the graph that ends in the roots.

    Args:
        roots: tensors that require a gradient.
        inputs: leaves whose gradients the stage above waits for.
    """
    graph = _walk(get_gradient_edge(root).node for root in roots)
    kept = {id(x) for x in inputs}
    products: list[Product] = []
    reasons: dict[int, str] = {}
    deferred: dict[Any, None] = {}
    for node, rule in graph.products if not graph.is_reentrant else ():
        found = _split(node, rule, graph.uses, kept, reasons)
        if found is not None:
            product, leaves = found
            products.append(product)
            deferred.update(dict.fromkeys(leaves))
    leaves = [node.variable for node in graph.leaves if node not in deferred]
    waiting = [node.variable for node in deferred]
    return SplitPlan(products, leaves, waiting, reasons, graph.is_reentrant)


@dataclass
class _Graph:
    uses: dict[Any, int]
    """How many edges lead to each node, roots included."""
    leaves: list[Any]
    products: list[tuple[Any, Rule]]
    is_reentrant: bool = False


def _walk(roots: Iterable[Node]) -> _Graph:
    """Visit every node once; this is a part of every B, so it is kept short."""
    uses: dict[Any, int] = Counter(roots)
    graph = _Graph(uses, [], [])
    nodes: list[Any] = list(uses)
    while nodes:
        node = nodes.pop()
        name = type(node).__name__
        if name == LEAF:
            graph.leaves.append(node)
            continue
        if name in RULES:
            graph.products.append((node, RULES[name]))
        elif name == _REENTRANT:
            graph.is_reentrant = True
        for below, _ in node.next_functions:
            if below is None:
                continue
            if below in uses:
                uses[below] += 1
            else:
                uses[below] = 1
                nodes.append(below)
    return graph


def _split(
    node: Any,
    rule: Rule,
    uses: dict[Any, int],
    kept: set[int],
    reasons: dict[int, str],
) -> tuple[Product, list[Any]] | None:
    """Take the first choice of operands that can all be deferred."""
    edges = node.next_functions
    for choice, reads in zip(rule.choices, rule.reads, strict=True):
        operands = tuple(i for i in choice if edges[i][0] is not None)
        if choice[0] not in operands:
            continue
        leaves = [_leaf_above(edges[i][0], uses, kept, reasons) for i in operands]
        if None in leaves:
            why = "goes with an operand that stays in B"
        elif not has_saved(node.__class__, rule.settings):
            why = "this torch hides what W needs"
        elif not all(can_read_saved(node, name) for name in reads):
            why = "packed by saved-tensor hooks"
        else:
            chosen = tuple(GradientEdge(*edges[i]) for i in operands)
            return Product(node, rule, operands, reads, chosen), leaves
        reasons.update((id(leaf.variable), why) for leaf in leaves if leaf is not None)
    return None


def _leaf_above(
    node: Any, uses: dict[Any, int], kept: set[int], reasons: dict[int, str]
) -> Any | None:
    """Follow views and casts to a leaf that waits for nothing but this operand."""
    count = uses[node]
    while type(node).__name__ in _VIEWS_AND_CASTS:
        node = node.next_functions[0][0]
        if node is None:
            return None
        count = max(count, uses[node])
    if type(node).__name__ != LEAF or id(node.variable) in kept:
        return None
    if count > 1:
        reasons[id(node.variable)] = f"used {count} times"
        return None
    if type(node.variable) not in _KNOWN and not is_dtensor(node.variable):
        reasons[id(node.variable)] = f"a {type(node.variable).__name__}"
        return None
    return node
