"""Plans of graphs that have been seen before: a chunk's graphs are mostly alike.

    first graph    walk, plan, and note the trail: types of nodes, and where edges lead
    then           follow the trail; every node and edge must be as noted

The trail numbers nodes as they come up. A graph that leaves it is planned anew. A plan
depends on more: on the leaves, and which of them are frozen; on saved tensors, which
hooks may have packed; both are compared. And on hooks: where others have registered
any since, those of the graph are looked for.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zbpp.runtime.backward.deferred_product import (
    Edges,
    Product,
    Site,
    can_read,
    find_target,
    is_dtensor,
)
from zbpp.runtime.backward.ends import End
from zbpp.runtime.backward.graph import SplitPlan, plan_split
from zbpp.runtime.backward.hooks import HIDDEN, watch
from zbpp.runtime.backward.parts import has_overlaps
from zbpp.runtime.backward.ways import LEAF, OVERLAP
from zbpp.runtime.compiled.plan import leads_to_one
from zbpp.runtime.support.autograd_internals import is_built_in

__all__ = ["PlanMemory"]

_MOST_TRAILS = 8
_SMALL = 2**16
"""Bytes of a gradient of B that may wait for the end of B."""

_NEW = -1
"""An edge to a node that was not seen before."""

_NO_PLACE = -1


class PlanMemory:
    """The plans of one chunk's graphs."""

    def __init__(self) -> None:
        self._trails: list[_Trail] = []

    def plan(self, ends: Sequence[End], inputs: Sequence[Tensor]) -> SplitPlan:
        """Return `plan_split`'s plan; `watch` has looked.

        Args:
            ends: where the graph ends, as `plan_split` takes them.
            inputs: leaves.

        Raises:
            RequestError: from `plan_split`.
        """
        is_known = all([end.__class__ is GradientEdge for end in ends])
        if watch.n_others == HIDDEN or not is_known:
            return plan_split(ends, inputs)
        for trail in self._trails:
            plan = trail.follow(ends, inputs)
            if plan is not None:
                return plan
        plan = plan_split(ends, inputs)
        if not plan.is_reentrant and OVERLAP not in plan.reasons.values():
            kept = self._trails[: _MOST_TRAILS - 1]
            self._trails = [_Trail(ends, inputs, plan), *kept]
        return plan


class _Split(NamedTuple):
    """A product of the plan; its nodes by their numbers, None for parts of a leaf."""

    node: int
    like: Product
    above: list[tuple[int, int]] | None
    raw: list[str]


_Step = tuple[int, type, list[Any], list[tuple[int, Any]]]
"""A node's number and type, the edges that are alike, and where others must lead."""


class _Turned(NamedTuple):
    """The transpose of a parameter: the type of its node, and the parameter's node."""

    kind: type
    leaf: Any


class _Trail:
    """One graph, as the first of its kind was, and its plan."""

    def __init__(
        self, ends: Sequence[End], inputs: Sequence[Tensor], plan: SplitPlan
    ) -> None:
        self._n_hooks = watch.n_others
        self._places = places = {id(x): i for i, x in enumerate(inputs)}
        self._leaf_type: type | None = None
        self._own: dict[Tensor, Any] = {}
        """Parameters and their nodes: kept, so that later graphs have the same."""
        self._leaves: list[tuple[int, Tensor | None, int, bool]] = []
        self._steps: list[_Step] = []
        nodes: list[Any] = []
        numbers: dict[Any, int] = {}
        self._roots = [_number(end.node, numbers, nodes) for end in ends]
        turned: set[Any] = set()
        for n, node in enumerate(nodes):  # it grows
            if type(node).__name__ == LEAF:
                own = self._parameter(node)
                place = _NO_PLACE if own is not None else places[id(node.variable)]
                learns = node.variable.requires_grad
                self._leaves.append((n, own, place, learns))
                self._leaf_type = type(node)
            elif node not in turned:
                fixed: list[Any] = []
                open_: list[tuple[int, Any]] = []
                for place, edge in enumerate(node.next_functions):
                    child = edge[0]
                    wanted = self._wanted(child, numbers, nodes)
                    fixed.append(edge if wanted is child else None)
                    if wanted is not child:  # and is not kept: it leads to the input
                        open_.append((place, wanted))
                    if type(wanted) is _Turned:
                        turned.add(child)
                self._steps.append((n, type(node), fixed, open_))
        self._products = [_split(numbers, *site) for site in plan.products]
        kept = set(self._own.values())
        self._regions = [
            (numbers[node], x, x.leads_to(kept)) for node, x in plan.regions
        ]
        found = [places.get(id(x)) for x in plan.leaves]
        self._inputs_in_b = [i for i in found if i is not None]
        self._in_b = in_b = [x for x in plan.leaves if id(x) not in places]
        self._waiting, self._reasons = plan.waiting, plan.reasons
        self._has_parts = any(like.leaf is not None for _, like, _ in plan.products)
        self._returns = all(map(is_built_in, nodes)) and all(
            _is_returned(leaf, self._own[leaf]) for leaf in in_b
        )
        """True if torch may return the gradients of B's leaves to us."""
        learns = [leaf.requires_grad for leaf in self._own]
        regions, ids = dict(plan.regions), {id(x) for x in plan.leaves}
        are_alone = all(site.is_alone() for site in regions.values())
        self._is_alone = all(learns) and not plan.products and are_alone
        self._may_stop = self._is_alone and all(
            leads_to_one(x, ids) if x in regions else is_built_in(x) for x in nodes
        )
        self._learns = [] if self._is_alone else learns
        """Alone, a leaf that is frozen before B gets nothing, from B or from W."""

    def _wanted(self, child: Any, numbers: dict[Any, int], nodes: list[Any]) -> Any:
        """Return what an edge must lead to: None, a leaf, a number, or a new node.

        Of those that are new, a transposed parameter is looked through at once.
        """
        if child is None or child in numbers:
            return None if child is None else numbers[child]
        if self._parameter(child) is not None:
            return child
        _number(child, numbers, nodes)
        if type(child).__name__ == "TBackward0":
            leaf = child.next_functions[0][0]
            is_own = self._parameter(leaf) is not None
            return _Turned(type(child), leaf) if is_own else _NEW
        return _NEW

    def _parameter(self, node: Any) -> Tensor | None:
        """Return the parameter of a leaf's node, and note it; None for another node."""
        if type(node).__name__ != LEAF or id(node.variable) in self._places:
            return None
        self._leaf_type = type(node)
        own: Tensor = node.variable
        self._own[own] = node
        return own

    def follow(self, ends: Sequence[End], inputs: Sequence[Tensor]) -> SplitPlan | None:
        """Return the plan of a graph if it is alike in everything."""
        if self._learns and [x.requires_grad for x in self._own] != self._learns:
            return None
        nodes = self._nodes(ends)
        if nodes is None or not self._has_same_leaves(nodes, inputs):
            return None
        if self._n_hooks != watch.n_others and not self._has_no_hooks(nodes):
            return None
        products: list[Site] = []
        is_packed = False
        for n, like, above, raw in self._products:
            node = nodes[n]
            for name in raw:
                if getattr(node, name).unpack_hook is not None:
                    is_packed = True
            if above is None:
                below = node.next_functions
                edges = [below[i] for i in like.operands]
            else:
                edges = [(nodes[i], output) for i, output in above]
            products.append((node, like, edges))
        if is_packed and not can_read(products):
            return None
        if self._has_parts and has_overlaps(products):
            return None
        leaves = [*self._in_b, *[inputs[i] for i in self._inputs_in_b]]
        regions = [
            (nodes[n], x if own else x.like(nodes[n])) for n, x, own in self._regions
        ]
        returns = self._returns and not is_packed
        first = (products, leaves, self._waiting, self._reasons, False, returns)
        return SplitPlan(*first, regions, self._is_alone, self._may_stop)

    def _has_same_leaves(self, nodes: list[Any], inputs: Sequence[Tensor]) -> bool:
        kind = self._leaf_type
        for n, own, place, learns in self._leaves:
            leaf = nodes[n].variable if nodes[n].__class__ is kind else None
            wanted = inputs[place] if own is None else own
            if leaf is not wanted or leaf.requires_grad is not learns:
                return False
        return True

    def _has_no_hooks(self, nodes: list[Any]) -> bool:
        """True if hooks that were registered since are none here."""
        for n, like, above, _ in self._products:
            node = nodes[n]
            if not watch.is_free(node) and watch.has_hooks(node, before=True):
                return False
            is_turned = like.target is not None and like.target.is_turned
            if is_turned and above and not watch.is_free(nodes[above[0][0]]):
                return False
        for n, *_ in self._regions:
            node = nodes[n]
            if not watch.is_free(node) and watch.has_hooks(node, before=False):
                return False
        for own in self._own:
            if not watch.is_clean(own, get_gradient_edge(own).node):
                return False
        self._n_hooks = watch.n_others
        return True

    def _nodes(self, ends: Sequence[End]) -> list[Any] | None:
        """Follow the edges; this is a part of every B, so it is kept short."""
        nodes: list[Any] = [ends[0].node] if len(ends) == 1 == len(self._roots) else []
        numbers: dict[Any, int] = {}
        if not nodes and self._roots != [_number(x.node, numbers, nodes) for x in ends]:
            return None
        for n, kind, fixed, open_ in self._steps:
            if nodes[n].__class__ is not kind:
                return None
            edges: list[Any] = [*nodes[n].next_functions]
            if len(edges) != len(fixed):
                return None
            for place, want in open_:
                child: Any = edges[place][0]
                edges[place] = None
                if want.__class__ is int:
                    if want == _NEW:
                        nodes.append(child)
                    elif nodes[want] is not child:
                        return None
                    continue
                turn, leaf = want
                if child.__class__ is not turn:
                    return None
                nodes.append(child)
                if child.next_functions[0][0] is not leaf:
                    return None
            if edges != fixed:  # parameters' nodes, and None
                return None
        return nodes if len(set(nodes)) == len(nodes) else None


def _split(
    numbers: dict[Any, int], node: Any, product: Product, edges: Edges
) -> _Split:
    """Return what is alike in all graphs of a kind; parts of a leaf may differ."""
    found = find_target(edges)
    target = found if found is not None and found.way is None else None
    above = None
    if product.leaf is None and all(one in numbers for one, *_ in edges):
        above = [(numbers[one], output) for one, output, *_ in edges]
    raw = [f"_raw_saved_{name}" for name in product.reads]
    return _Split(numbers[node], product._replace(target=target), above, raw)


def _number(node: Any, numbers: dict[Any, int], nodes: list[Any]) -> int:
    number = numbers.setdefault(node, len(nodes))
    if number == len(nodes):
        nodes.append(node)
    return number


def _is_returned(leaf: Tensor, node: Any) -> bool:
    """True if nobody minds that the gradient of a leaf is added in the end of B."""
    return leaf.nbytes <= _SMALL and not is_dtensor(leaf) and watch.is_clean(leaf, node)
