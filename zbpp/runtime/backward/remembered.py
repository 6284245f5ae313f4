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
from torch.autograd.graph import GradientEdge

from zbpp.runtime.backward.deferred_product import LEAF, Product, is_dtensor
from zbpp.runtime.backward.ends import End
from zbpp.runtime.backward.graph import SplitPlan, plan_split
from zbpp.runtime.backward.hooks import watch
from zbpp.runtime.support.autograd_internals import (
    can_read_saved,
    hooks_made,
    is_built_in,
    is_packed,
)

__all__ = ["PlanMemory"]

_MOST_TRAILS = 8
_SMALL = 2**16
"""Bytes of a gradient of B that may wait for the end of B."""

_NO_NODE = -1


class PlanMemory:
    """The plans of one chunk's graphs."""

    def __init__(self) -> None:
        self._trails: list[_Trail] = []

    def plan(self, ends: Sequence[End], inputs: Sequence[Tensor]) -> SplitPlan:
        """Return `plan_split`'s plan; `watch` has looked.

        Args:
            ends: where the graph ends, as `plan_split` takes them.
            inputs: leaves; where one is none, nothing is remembered.

        Raises:
            RequestError: from `plan_split`.
        """
        known = hooks_made() is not None and all(x.is_leaf for x in inputs)
        if not known or not all(isinstance(end, GradientEdge) for end in ends):
            return plan_split(ends, inputs)
        for trail in self._trails:
            plan = trail.follow(ends, inputs)
            if plan is not None:
                return plan
        plan = plan_split(ends, inputs)
        if not plan.is_reentrant:
            kept = self._trails[: _MOST_TRAILS - 1]
            self._trails = [_Trail(ends, inputs, plan), *kept]
        return plan


class _Split(NamedTuple):
    """A product of the plan, its nodes by their numbers."""

    node: int
    like: Product
    edges: tuple[tuple[int, int], ...]


class _Trail:
    """One graph, as the first of its kind was, and its plan.

    Args:
        ends: of the graph.
        inputs: of it.
        plan: of it.
    """

    def __init__(
        self, ends: Sequence[End], inputs: Sequence[Tensor], plan: SplitPlan
    ) -> None:
        self._n_hooks = watch.n_others
        nodes: list[Any] = []
        numbers: dict[Any, int] = {}
        self._roots = [_number(end.node, numbers, nodes) for end in ends]
        self._steps: list[tuple[type, list[int]]] = []
        self._leaves: list[tuple[int, int, Tensor | None, bool]] = []
        places = {id(x): i for i, x in enumerate(inputs)}
        for n, node in enumerate(nodes):  # it grows
            below = [_number(child, numbers, nodes) for child, _ in node.next_functions]
            self._steps.append((type(node), below))
            if type(node).__name__ == LEAF:
                leaf = node.variable
                place = places.get(id(leaf), _NO_NODE)
                own = leaf if place == _NO_NODE else None
                self._leaves.append((n, place, own, leaf.requires_grad))
        self._products = [
            _Split(
                numbers[product.node],
                product._replace(node=None, edges=()),
                tuple((numbers[e.node], e.output_nr) for e in product.edges),
            )
            for product in plan.products
        ]
        self._in_b = [
            (places.get(id(leaf), _NO_NODE), None if id(leaf) in places else leaf)
            for leaf in plan.leaves
        ]
        own = {id(leaf) for leaf in plan.leaves if id(leaf) not in places}
        self._waiting, self._reasons = plan.waiting, plan.reasons
        self._returns = all(map(is_built_in, nodes)) and all(
            _is_returned(nodes[n])
            for n, *_ in self._leaves
            if id(nodes[n].variable) in own
        )
        """Whether torch may return the gradients of B's leaves to us."""

    def follow(self, ends: Sequence[End], inputs: Sequence[Tensor]) -> SplitPlan | None:
        """Return the plan of a graph if it is alike in everything."""
        nodes = self._nodes(ends)
        if nodes is None or not self._has_no_new_hooks(nodes):
            return None
        for n, place, own, learns in self._leaves:
            leaf = nodes[n].variable
            other = own if own is not None else inputs[place]
            if leaf is not other or leaf.requires_grad is not learns:
                return None
        products, packed = [], False
        for n, like, edges in self._products:
            node = nodes[n]
            for name in like.reads:
                if is_packed(node, name):
                    if not can_read_saved(node, name):
                        return None
                    packed = True
            own_edges = tuple(GradientEdge(nodes[i], nr) for i, nr in edges)
            products.append(Product(node, *like[1:4], own_edges))
        leaves = [inputs[i] if leaf is None else leaf for i, leaf in self._in_b]
        returns = self._returns and not packed
        return SplitPlan(
            *(products, leaves, self._waiting, self._reasons), False, returns
        )

    def _has_no_new_hooks(self, nodes: list[Any]) -> bool:
        """True if no hook was registered since, or none here."""
        if self._n_hooks == watch.n_others:
            return True
        for n, *_ in self._products:
            node = nodes[n]
            if not watch.is_free(node) and watch.has_hooks(node, before=True):
                return False
        for n, _, own, _ in self._leaves:
            if own is not None and not _is_clean(own, nodes[n]):
                return False
        self._n_hooks = watch.n_others
        return True

    def _nodes(self, ends: Sequence[End]) -> list[Any] | None:
        """Follow the edges; this is a part of every B, so it is kept short."""
        nodes: list[Any] = []
        numbers: dict[Any, int] = {}
        if [_number(end.node, numbers, nodes) for end in ends] != self._roots:
            return None
        for n, (kind, below) in enumerate(self._steps):
            node: Any = nodes[n]
            if node.__class__ is not kind:
                return None
            edges: Any = nodes[n].next_functions
            if len(edges) != len(below):
                return None
            for (child, _), expected in zip(edges, below, strict=True):
                if child is None:
                    number = _NO_NODE
                else:
                    number = numbers.setdefault(child, len(nodes))
                    if number == len(nodes):
                        nodes.append(child)
                if number != expected:
                    return None
        return nodes


def _number(node: Any, numbers: dict[Any, int], nodes: list[Any]) -> int:
    if node is None:
        return _NO_NODE
    number = numbers.setdefault(node, len(nodes))
    if number == len(nodes):
        nodes.append(node)
    return number


def _is_returned(node: Any) -> bool:
    """True if nobody minds that the gradient of a leaf is added in the end of B."""
    leaf = node.variable
    if leaf.nbytes > _SMALL or is_dtensor(leaf):
        return False
    return _is_clean(leaf, node)


def _is_clean(leaf: Tensor, node: Any) -> bool:
    has_hooks = leaf._backward_hooks or leaf._post_accumulate_grad_hooks
    return not has_hooks and watch.is_clean_leaf(leaf, node)
