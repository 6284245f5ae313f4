"""Find, in the graph of one forward, the weight gradients that can wait for W.

    y ── Addmm ──┬── x ...                      B goes on here
                 └── T ── weight (a leaf)       W starts here

A matrix product or convolution is split if one of its operands is a leaf that is used
nowhere else in the graph, or a view or cast of one. All that lies between the product
and the leaf (the transpose, autocast's cast, the leaf's hooks) then runs in W, by
autograd itself; so nothing has to be known about it.

A leaf with a second use stays in B: its gradients would be added up in another order.
But slices of a leaf that share no index may wait together, as no two of their gradients
are added to one element.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from zbpp.runtime.backward.causes import NO_WEIGHT
from zbpp.runtime.backward.ends import PLAIN, End
from zbpp.runtime.backward.paths import (
    LEAF,
    cut_of,
    follow,
    is_cut,
    is_dtensor,
    needs_gradient,
    refusal_of_slices,
)
from zbpp.runtime.backward.products import RULES, Product, Rule, SplitSite
from zbpp.runtime.backward.regions import RegionSite, plan_region
from zbpp.runtime.support.autograd_internals import (
    can_read_saved,
    has_saved,
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
        products: nodes to split, in the order in which autograd's engine runs them.
        regions: nodes of compiled regions that leave something to W, and what.
        leaves: all leaves whose gradient is computed in B.
        waiting: the leaves whose gradient is computed in W.
        reasons: why a leaf is not among those, by its id, where there is more to say
            than that no product uses it.
        is_reentrant: there is a reentrant checkpoint; B then runs all.
        has_slices: products wait that use slices of a leaf; another graph of the same
            nodes may take other slices.
        captures: autograd may return all gradients of B, which are then added to their
            leaves; see `zbpp.runtime.backward.engine`.
    """

    products: Sequence[SplitSite]
    regions: Sequence[tuple[Any, RegionSite]]
    leaves: list[Tensor]
    waiting: list[Tensor]
    reasons: dict[int, str]
    is_reentrant: bool = False
    has_slices: bool = False
    captures: bool = False

    def where(self) -> dict[Tensor, str]:
        """Give for each leaf ``"W"``, or ``"B: "`` and the reason."""
        where = dict.fromkeys(self.waiting, "W")
        for leaf in self.leaves:
            reason = self.reasons.get(id(leaf), NO_WEIGHT)
            where[leaf] = f"B: {REENTRANT if self.is_reentrant else reason}"
        return where


def plan_split(roots: Iterable[End], inputs: Iterable[Tensor] = ()) -> SplitPlan:
    """Walk the graph that ends in the roots, and plan its B and W.

    Args:
        roots: ends of tensors that require a gradient.
        inputs: leaves whose gradients the stage above waits for.
    """
    graph = _walk((node_of(root) for root in roots), {id(x) for x in inputs})
    if graph.is_reentrant:
        return SplitPlan([], [], graph.leaves_but(()), [], {}, is_reentrant=True)
    splits = [_split(node, rule, graph) for node, rule in graph.products]
    sites = [split for split in splits if split is not None]
    regions: list[tuple[Any, RegionSite]] = []
    deferred: dict[Any, None] = {}
    for node in graph.regions:
        region = plan_region(node, graph.waiting_leaf, graph.reasons)
        if region is not None:
            regions.append((node, region))
            deferred.update(dict.fromkeys(region.leaves))
    refused, has_slices = _refused_slices([site for site, _ in sites], graph)
    products = []
    for site, leaves in sites:
        if not refused.intersection(leaves):
            products.append(site)
            deferred.update(dict.fromkeys(leaves))
    # As autograd's engine comes to them, so that W frees what it needs in one order.
    products.sort(key=lambda site: -sequence_number(site[0]))
    return SplitPlan(
        products,
        regions,
        graph.leaves_but(deferred),
        [node.variable for node in deferred],
        graph.reasons,
        has_slices=has_slices,
    )


def node_of(end: End) -> Node:
    """The node that made an output."""
    edge = end if isinstance(end, GradientEdge) else get_gradient_edge(end)
    return edge.node


@dataclass
class _Graph:
    """The nodes of a graph that a plan has to look at."""

    uses: dict[Any, int]
    """Number of edges that lead to each node, roots included."""
    inputs: set[int]
    """Ids of leaves that are no parameters."""
    leaves: list[Any] = field(default_factory=list)
    products: list[tuple[Any, Rule]] = field(default_factory=list)
    regions: list[Any] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)
    is_reentrant: bool = False

    def leaves_but(self, deferred: Iterable[Any]) -> list[Tensor]:
        """Return the leaves that learn, without those whose nodes are given."""
        deferred = set(deferred)
        return [
            leaf
            for node in self.leaves
            if node not in deferred and (leaf := node.variable).requires_grad
        ]

    def waiting_leaf(self, node: Any, *, may_be_slice: bool = False) -> Any | None:
        """Follow the path from an operand to a leaf that it alone uses.

        Slices of it may be used by others; see `refusal_of_slices`.

        Returns:
            The leaf's node, or None, and the reason is noted.
        """
        count, is_slice = 1, False
        if not needs_gradient(node):
            return None
        while type(node).__name__ != LEAF:
            above = follow(node)
            if above is None:
                return None
            if is_cut(node):
                is_slice = True
            else:
                count = max(count, self.uses[node])
            node = above
        leaf = node.variable
        if id(leaf) in self.inputs or not leaf.requires_grad:
            return None
        if not is_slice:
            count = max(count, self.uses[node])
        reason = _refusal(leaf, count, is_slice=is_slice, may_be_slice=may_be_slice)
        if reason is None:
            return node
        self.reasons[id(leaf)] = reason
        return None


def _walk(roots: Iterable[Node], inputs: set[int]) -> _Graph:
    """Visit every node once, from the roots."""
    uses: dict[Any, int] = {}
    for root in roots:
        uses[root] = uses.get(root, 0) + 1
    graph = _Graph(uses, inputs)
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
        elif is_compiled(node):
            graph.regions.append(node)
        for child, _ in node.next_functions:
            if child is None:
                continue
            if child in uses:
                uses[child] += 1
                continue
            uses[child] = 1
            nodes.append(child)
    return graph


def _split(node: Any, rule: Rule, graph: _Graph) -> tuple[SplitSite, list[Any]] | None:
    """Take the first choice of operands that can all wait, with their leaves' nodes."""
    edges = node.next_functions
    for choice, reads in zip(rule.choices, rule.reads, strict=True):
        operands = tuple(i for i in choice if needs_gradient(edges[i][0]))
        if choice[0] not in operands:
            continue
        may_be_slice = len(operands) == 1
        leaves = [
            graph.waiting_leaf(edges[i][0], may_be_slice=may_be_slice) for i in operands
        ]
        if None in leaves:
            why = "goes with an operand that stays in B"
        elif not has_saved(node.__class__, rule.settings):
            why = "this torch hides what W needs"
        elif not all(can_read_saved(node, name) for name in reads):
            why = "packed by saved-tensor hooks"
        else:
            saved = tuple(f"_saved_{name}" for name in reads)
            product = Product(rule, operands, reads, saved)
            return (node, product, [edges[i] for i in operands]), leaves
        graph.reasons.update((id(x.variable), why) for x in leaves if x is not None)
    return None


def _refusal(
    leaf: Tensor, count: int, *, is_slice: bool, may_be_slice: bool
) -> str | None:
    """Return why a leaf that a product uses cannot wait, or None if it can."""
    if is_slice and (is_dtensor(leaf) or not may_be_slice):
        return "used in parts"
    if count > 1:
        return f"used {count} times"
    if not (type(leaf) in PLAIN or is_dtensor(leaf) or is_fake(leaf)):
        return f"a {type(leaf).__name__}"
    if leaf.layout is not torch.strided:
        return f"its layout is {leaf.layout}"
    return None


def _refused_slices(sites: Sequence[SplitSite], graph: _Graph) -> tuple[set[Any], bool]:
    """Return leaves whose slices stay in B, and whether those of others wait."""
    cuts: dict[Any, list[tuple[Any, int]]] = {}
    for site in sites:
        cut = cut_of(*site[2][0][:2])
        if cut is not None:
            leaf = cut[0].next_functions[0][0]
            cuts.setdefault(leaf, []).append(cut)
    refused = set()
    for leaf, slices in cuts.items():
        reason = refusal_of_slices(leaf, slices, graph.uses)
        if reason is not None:
            refused.add(leaf)
            graph.reasons.setdefault(id(leaf.variable), reason)
    return refused, len(refused) < len(cuts)
