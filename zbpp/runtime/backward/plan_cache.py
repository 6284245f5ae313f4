"""Plans of graphs that have been seen before: a chunk's graphs are mostly alike.

    first graph    walk, plan, and note its signature: types of nodes, and where edges
                   lead
    then           go through the graph in the same order and compare

The signature numbers nodes as they come up. A graph that differs is planned anew. A
plan depends on more: on the leaves, and which of them are frozen; on saved tensors,
which hooks may have packed; both are compared. And on hooks: where others have
registered any since, those of the graph are looked for.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zbpp.runtime.backward.ends import End
from zbpp.runtime.backward.graph import SplitPlan, plan_split
from zbpp.runtime.backward.hooks import UNKNOWN, watch
from zbpp.runtime.backward.paths import LEAF, find_target, is_dtensor
from zbpp.runtime.backward.products import Product, SplitSite, can_read
from zbpp.runtime.backward.regions import RegionSite
from zbpp.runtime.support.autograd_internals import is_built_in

__all__ = ["SplitPlanCache"]

_MAX_SIGNATURES = 8
_SMALL_BYTES = 2**16
"""Bytes of a gradient of B that may wait for the end of B, where it is captured."""

_NEW = -1
"""An edge to a node that was not seen before."""


class SplitPlanCache:
    """The plans of one chunk's graphs."""

    def __init__(self) -> None:
        self._signatures: list[_GraphSignature] = []

    def plan(self, ends: Sequence[End], inputs: Sequence[Tensor]) -> SplitPlan:
        """Return `plan_split`'s plan; `watch` has looked.

        Args:
            ends: where the graph ends, as `plan_split` takes them.
            inputs: leaves.
        """
        has_edges = all([end.__class__ is GradientEdge for end in ends])
        if watch.n_others == UNKNOWN or not has_edges:
            return plan_split(ends, inputs)
        for signature in self._signatures:
            plan = signature.match(ends, inputs)
            if plan is not None:
                return plan
        plan = plan_split(ends, inputs)
        if not plan.is_reentrant and not plan.has_slices:
            kept = self._signatures[: _MAX_SIGNATURES - 1]
            self._signatures = [_GraphSignature(ends, inputs, plan), *kept]
        return plan


class _Step(NamedTuple):
    """The nodes that a node's edges must lead to.

    Args:
        number: of the node.
        kind: its type.
        fixed: the edges as they are in all graphs of the kind: to parameters, or to
            nothing; None in the place of others.
        others: places of edges, and what they lead to: a node by its number, `_NEW`, or
            a `_Transpose`.
    """

    number: int
    kind: type
    fixed: list[Any]
    others: list[tuple[int, Any]]


class _Transpose(NamedTuple):
    """The transpose of a parameter: the type of its node, and the parameter's node."""

    kind: type
    leaf: Any


class _Leaf(NamedTuple):
    """A leaf of the graph: the number of its node, and what it must be.

    Args:
        number: of its node.
        parameter: None for an input.
        place: among the inputs.
        requires_grad: when the plan was made.
    """

    number: int
    parameter: Tensor | None
    place: int
    requires_grad: bool


class _Site(NamedTuple):
    """A product of the plan by the numbers of nodes: its own, and those it leads to.

    Args:
        number: of its node.
        product: with its target.
        below: numbers and outputs; None: they have no number, as a parameter's node.
        raw: attributes of the node that tell whether a hook has packed a saved tensor.
    """

    number: int
    product: Product
    below: list[tuple[int, int]] | None
    raw: list[str]


class _GraphSignature:
    """One graph, as the first of its kind was, and its plan."""

    def __init__(
        self, ends: Sequence[End], inputs: Sequence[Tensor], plan: SplitPlan
    ) -> None:
        self._n_hooks = watch.n_others
        self._inputs = {id(x): i for i, x in enumerate(inputs)}
        self._parameters: dict[Tensor, Any] = {}
        """With their nodes: kept, so that later graphs have the same."""
        self._leaf_type: type | None = None
        self._leaves: list[_Leaf] = []
        self._steps: list[_Step] = []
        nodes: list[Any] = []
        numbers: dict[Any, int] = {}
        self._roots = [_number(end.node, numbers, nodes) for end in ends]
        transposes: set[Any] = set()
        for number, node in enumerate(nodes):  # a step finds further nodes
            if type(node).__name__ == LEAF:
                self._leaves.append(self._leaf(number, node))
            elif node not in transposes:
                self._steps.append(self._step(number, node, numbers, nodes, transposes))
        self._sites = [_numbered(site, numbers) for site in plan.products]
        parameters = set(self._parameters.values())
        self._regions = [
            (numbers[node], site, site.leads_to(parameters))
            for node, site in plan.regions
        ]
        places = [self._inputs.get(id(x)) for x in plan.leaves]
        self._inputs_in_b = [place for place in places if place is not None]
        self._leaves_in_b = [x for x in plan.leaves if id(x) not in self._inputs]
        self._plan = plan._replace(products=(), regions=(), leaves=[])
        self._learns = [leaf.requires_grad for leaf in self._parameters]
        self._captures = all(map(is_built_in, nodes)) and all(
            _may_be_captured(leaf, self._parameters[leaf]) for leaf in self._leaves_in_b
        )

    def _leaf(self, number: int, node: Any) -> _Leaf:
        parameter = self._parameter(node)
        place = -1 if parameter is not None else self._inputs[id(node.variable)]
        self._leaf_type = type(node)
        return _Leaf(number, parameter, place, node.variable.requires_grad)

    def _step(
        self,
        number: int,
        node: Any,
        numbers: dict[Any, int],
        nodes: list[Any],
        transposes: set[Any],
    ) -> _Step:
        fixed: list[Any] = []
        others: list[tuple[int, Any]] = []
        for place, edge in enumerate(node.next_functions):
            child = edge[0]
            if child is None or self._parameter(child) is not None:
                fixed.append(edge)
                continue
            fixed.append(None)
            if child in numbers:
                others.append((place, numbers[child]))
                continue
            _number(child, numbers, nodes)
            transpose = self._transpose(child)
            if transpose is not None:
                transposes.add(child)
            others.append((place, transpose or _NEW))
        return _Step(number, type(node), fixed, others)

    def _transpose(self, node: Any) -> _Transpose | None:
        """Return what tells the transpose of a parameter, which is no step of its own.

        Every linear layer has one.
        """
        if type(node).__name__ != "TBackward0":
            return None
        leaf = node.next_functions[0][0]
        return None if self._parameter(leaf) is None else _Transpose(type(node), leaf)

    def _parameter(self, node: Any) -> Tensor | None:
        """Return the parameter of a leaf's node, and note it; None for another node."""
        if type(node).__name__ != LEAF or id(node.variable) in self._inputs:
            return None
        parameter: Tensor = node.variable
        self._parameters[parameter] = node
        return parameter

    def match(self, ends: Sequence[End], inputs: Sequence[Tensor]) -> SplitPlan | None:
        """Return the plan of a graph if it is alike in everything."""
        if [x.requires_grad for x in self._parameters] != self._learns:
            return None
        nodes = self._nodes(ends)
        if nodes is None or not self._has_same_leaves(nodes, inputs):
            return None
        if self._n_hooks != watch.n_others and not self._has_no_hooks(nodes):
            return None
        products: list[SplitSite] = []
        is_packed = False
        for number, product, below, raw in self._sites:
            node = nodes[number]
            for name in raw:
                if getattr(node, name).unpack_hook is not None:
                    is_packed = True
            if below is None:
                edges = node.next_functions
                waiting = [edges[i] for i in product.operands]
            else:
                waiting = [(nodes[i], output) for i, output in below]
            products.append((node, product, waiting))
        if is_packed and not can_read(products):
            return None
        regions: list[tuple[Any, RegionSite]] = []
        for number, site, is_same in self._regions:
            node = nodes[number]
            regions.append((node, site if is_same else site.in_graph_of(node)))
        leaves = [*self._leaves_in_b, *[inputs[i] for i in self._inputs_in_b]]
        captures = self._captures and not is_packed
        return SplitPlan(
            products,
            regions,
            leaves,
            self._plan.waiting,
            self._plan.reasons,
            captures=captures,
        )

    def _has_same_leaves(self, nodes: list[Any], inputs: Sequence[Tensor]) -> bool:
        kind = self._leaf_type
        for number, parameter, place, requires_grad in self._leaves:
            leaf = nodes[number].variable if nodes[number].__class__ is kind else None
            wanted = inputs[place] if parameter is None else parameter
            if leaf is not wanted or leaf.requires_grad is not requires_grad:
                return False
        return True

    def _has_no_hooks(self, nodes: list[Any]) -> bool:
        """True if hooks that were registered since are none here."""
        for number, product, below, _ in self._sites:
            node = nodes[number]
            if not watch.is_free(node) and watch.has_hooks(node, before=True):
                return False
            target = product.target
            is_transposed = target is not None and target.is_transposed
            if is_transposed and below and not watch.is_free(nodes[below[0][0]]):
                return False
        for number, *_ in self._regions:
            node = nodes[number]
            if not watch.is_free(node) and watch.has_hooks(node, before=False):
                return False
        for parameter in self._parameters:
            if not watch.is_clean(parameter, get_gradient_edge(parameter).node):
                return False
        self._n_hooks = watch.n_others
        return True

    def _nodes(self, ends: Sequence[End]) -> list[Any] | None:
        """Go through a graph; this is a part of every B, so it is kept short."""
        nodes: list[Any] = [ends[0].node] if len(ends) == 1 == len(self._roots) else []
        numbers: dict[Any, int] = {}
        if not nodes and self._roots != [_number(x.node, numbers, nodes) for x in ends]:
            return None
        for number, kind, fixed, others in self._steps:
            if nodes[number].__class__ is not kind:
                return None
            edges: list[Any] = [*nodes[number].next_functions]
            if len(edges) != len(fixed):
                return None
            for place, wanted in others:
                child: Any = edges[place][0]
                edges[place] = None
                if wanted.__class__ is int:
                    if wanted == _NEW:
                        nodes.append(child)
                    elif nodes[wanted] is not child:
                        return None
                    continue
                if child.__class__ is not wanted.kind:
                    return None
                nodes.append(child)
                if child.next_functions[0][0] is not wanted.leaf:
                    return None
            if edges != fixed:
                return None
        return nodes if len(set(nodes)) == len(nodes) else None


def _numbered(site: SplitSite, numbers: dict[Any, int]) -> _Site:
    node, product, edges = site
    product = product._replace(target=find_target(edges))
    below = None
    if all(child in numbers for child, *_ in edges):
        below = [(numbers[child], output) for child, output, *_ in edges]
    raw = [f"_raw_saved_{name}" for name in product.reads]
    return _Site(numbers[node], product, below, raw)


def _number(node: Any, numbers: dict[Any, int], nodes: list[Any]) -> int:
    number = numbers.setdefault(node, len(nodes))
    if number == len(nodes):
        nodes.append(node)
    return number


def _may_be_captured(leaf: Tensor, node: Any) -> bool:
    """True if nobody minds that the gradient of a leaf is added in the end of B."""
    if is_dtensor(leaf) or leaf.nbytes > _SMALL_BYTES:
        return False
    return watch.is_clean(leaf, node)
