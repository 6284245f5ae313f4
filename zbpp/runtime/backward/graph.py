"""Find, in the graph of one forward, the weight gradients that can wait for W.

    y ── Addmm ──┬── x ...                      B goes on here
                 └── T ── weight (a leaf)       W starts here

A matrix product or convolution is split if one of its operands is a leaf that is used
nowhere else in the graph, or a view or cast of one. All that lies between the product
and the leaf (the transpose, autocast's cast, the leaf's hooks) then runs in W, by
autograd itself; so nothing has to be known about it.

A leaf with a second use stays in B: its gradients would be added up in another order.
But parts of a leaf that overlap nowhere may wait together, as they add no two numbers.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from zbpp.runtime.backward.causes import NO_WEIGHT
from zbpp.runtime.backward.deferred_product import (
    Product,
    Site,
    edges_by_leaf,
    find_target,
    is_dtensor,
)
from zbpp.runtime.backward.ends import PLAIN, End, check_cut
from zbpp.runtime.backward.hooks import watch
from zbpp.runtime.backward.ways import (
    CUTS,
    LEAF,
    follow,
    is_part,
    needs_gradient,
    refusal,
)
from zbpp.runtime.backward.weight_rules import RULES, Rule
from zbpp.runtime.compiled.plan import RegionSite, plan_region
from zbpp.runtime.support.autograd_internals import (
    can_read_saved,
    has_saved,
    is_multi_grad_hook,
    sequence_number,
)
from zbpp.runtime.support.compile_internals import is_compiled
from zbpp.runtime.support.torch_internals import is_fake

__all__ = ["REENTRANT", "SplitPlan", "node_of", "plan_split"]

REENTRANT = "reentrant checkpoint"
"""The reason of all leaves of a graph that has one."""

_REENTRANT = "CheckpointFunctionBackward"


class SplitPlan(NamedTuple):
    """The work of B, and what it leaves for W.

    Args:
        products: nodes to split, those of later operators first.
        leaves: all leaves whose gradient is computed in B.
        waiting: the other leaves.
        reasons: why a leaf is none of those, where there is more to say than that no
            product uses it.
        is_reentrant: there is a reentrant checkpoint; B then runs all.
        returns: gradients may be returned to B, which adds them itself.
        regions: nodes of compiled ones that leave something to W, and what.
        is_alone: only pieces of regions wait, and W adds to their leaves by itself; B
            may run down to all leaves, as those get no gradient.
        may_stop: and it may be asked for its own leaves: each region leads to one.
    """

    products: list[Site]
    leaves: list[Tensor]
    waiting: list[Tensor]
    reasons: dict[int, str]
    is_reentrant: bool
    returns: bool = False
    regions: Sequence[tuple[Any, RegionSite]] = ()
    is_alone: bool = False
    may_stop: bool = False

    def where(self) -> dict[Tensor, str]:
        """Give for each leaf ``"W"``, or ``"B: "`` and the reason."""
        found = dict.fromkeys(self.waiting, "W")
        for leaf in self.leaves:
            reason = self.reasons.get(id(leaf), NO_WEIGHT)
            found[leaf] = f"B: {REENTRANT if self.is_reentrant else reason}"
        return found


def plan_split(roots: Iterable[End], inputs: Iterable[Tensor] = ()) -> SplitPlan:
    """Walk the graph that ends in the roots and begins with the inputs.

    Args:
        roots: ends of tensors that require a gradient.
        inputs: tensors whose gradients the stage above waits for.

    Raises:
        RequestError: a leaf is also used above an input that is no leaf.
    """
    inputs = list(inputs)
    kept = {id(x) for x in inputs}
    first: dict[Any, None] = {x.grad_fn: None for x in inputs if not x.is_leaf}
    graph = _walk((node_of(root) for root in roots), first)
    if first:
        check_cut(graph.uses, first, is_reentrant=graph.is_reentrant)
    products: list[Site] = []
    reasons: dict[int, str] = {}
    deferred: dict[Any, None] = {}
    for node, rule in graph.products if not graph.is_reentrant else ():
        found = _split(node, rule, graph.uses, kept, reasons, is_cut=bool(first))
        if found is not None:
            product, leaves = found
            products.append(product)
            deferred.update(dict.fromkeys(leaves))
    regions = []
    for node in graph.regions if not graph.is_reentrant else ():
        site = _split_region(node, graph.uses, kept, reasons)
        if site is not None:
            regions.append((node, site))
            deferred.update(dict.fromkeys(site.leaves))
    if any(product.leaf is not None for _, product, _ in products):
        products = _keep_parts(products, deferred, graph.uses, reasons)
    # As autograd's engine comes to them, so that W frees what it needs in one order.
    products.sort(key=lambda site: -sequence_number(site[0]))
    leaves = [
        leaf
        for node in graph.leaves
        if node not in deferred and (leaf := node.variable).requires_grad
    ]
    waiting = [node.variable for node in deferred]
    return SplitPlan(
        *(products, leaves, waiting, reasons, graph.is_reentrant), regions=regions
    )


def node_of(end: End) -> Node:
    """The node that made an output."""
    edge = end if isinstance(end, GradientEdge) else get_gradient_edge(end)
    return edge.node


@dataclass
class _Graph:
    uses: dict[Any, int]
    """Number of edges that lead to each node, roots included."""
    leaves: list[Any]
    products: list[tuple[Any, Rule]]
    regions: list[Any]
    is_reentrant: bool = False


def _walk(roots: Iterable[Node], first: Container[Any]) -> _Graph:
    """Visit every node once, from the roots, and go no further from the first."""
    uses: dict[Any, int] = {}
    for root in roots:
        uses[root] = uses.get(root, 0) + 1
    graph = _Graph(uses, [], [], [])
    nodes: list[Any] = [node for node in uses if node not in first]
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
        elif is_compiled(node):
            graph.regions.append(node)
        for below, _ in node.next_functions:
            if below is None:
                continue
            if below in uses:
                uses[below] += 1
                continue
            uses[below] = 1
            if below not in first:
                nodes.append(below)
    return graph


def _split(
    node: Any,
    rule: Rule,
    uses: dict[Any, int],
    kept: set[int],
    reasons: dict[int, str],
    *,
    is_cut: bool,
) -> tuple[Site, list[Any]] | None:
    """Take the first choice of operands that can all be deferred."""
    edges = node.next_functions
    for choice, reads in zip(rule.choices, rule.reads, strict=True):
        operands = tuple(i for i in choice if needs_gradient(edges[i][0]))
        if choice[0] not in operands:
            continue
        may_be_part = len(operands) == 1
        leaves = [
            _leaf_above(edges[i][0], uses, kept, reasons, may_be_part=may_be_part)
            for i in operands
        ]
        if None in leaves:
            why = "goes with an operand that stays in B"
        elif not watch.is_free(node) and watch.has_hooks(node, before=is_cut):
            why = "a hook on its product"
        elif not has_saved(node.__class__, rule.settings):
            why = "this torch hides what W needs"
        elif not all(can_read_saved(node, name) for name in reads):
            why = "packed by saved-tensor hooks"
        else:
            whole = leaves[0] if is_part(edges[operands[0]][0]) else None
            saved = tuple(f"_saved_{name}" for name in reads)
            product = Product(rule, operands, reads, saved, whole)
            return (node, product, [edges[i] for i in operands]), leaves
        reasons.update((id(leaf.variable), why) for leaf in leaves if leaf is not None)
    return None


def _split_region(
    node: Any, uses: dict[Any, int], kept: set[int], reasons: dict[int, str]
) -> RegionSite | None:
    """Take the pieces of a compiled region whose leaves can all wait."""
    is_hooked = not watch.is_free(node) and watch.has_hooks(node, before=False)

    def leaf_above(child: Any) -> Any | None:
        if not needs_gradient(child) or is_hooked:
            return None
        return _leaf_above(child, uses, kept, reasons, may_be_part=False)

    site = plan_region(node, leaf_above, reasons)
    if site is None:
        return None
    found = [find_target(x, may_be_dealt=True) if x else None for x in site.edges]
    own = [x if x is not None and x.way is None else None for x in found]
    return site.aimed_at(own)


def _keep_parts(
    products: list[Site],
    deferred: dict[Any, None],
    uses: dict[Any, int],
    reasons: dict[int, str],
) -> list[Site]:
    """Leave out products with a part of a leaf that cannot wait; it stays in B."""
    refused = set()
    for leaf, own in edges_by_leaf(products).items():
        why = refusal(leaf, own, uses)
        if why is not None:
            refused.add(leaf)
            reasons.setdefault(id(leaf.variable), why)
            del deferred[leaf]
    return [site for site in products if site[1].leaf not in refused]


def _leaf_above(
    node: Any,
    uses: dict[Any, int],
    kept: set[int],
    reasons: dict[int, str],
    *,
    may_be_part: bool,
) -> Any | None:
    """Follow views and casts to a leaf that waits for nothing but this operand.

    Or for others that are parts of it as well: those are counted later.
    """
    count, is_part = uses[node], False
    while type(node).__name__ != LEAF:
        is_part = is_part or type(node).__name__ in CUTS
        node = follow(node)
        if node is None:
            return None
        count = max(count, uses[node])
    leaf = node.variable
    if id(leaf) in kept or not leaf.requires_grad:
        return None
    why = None
    if is_part and (is_dtensor(leaf) or not may_be_part):
        why = "used in parts"
    elif count > 1 and not is_part:
        why = f"used {count} times"
    elif not (type(leaf) in PLAIN or is_dtensor(leaf) or is_fake(leaf)):
        why = f"a {type(leaf).__name__}"
    elif leaf.layout is not torch.strided:
        why = f"its layout is {leaf.layout}"
    elif leaf._backward_hooks and any(
        map(is_multi_grad_hook, leaf._backward_hooks.values())
    ):
        why = "a hook on several gradients at once"
    if why is None:
        return node
    reasons[id(leaf)] = why
    return None
