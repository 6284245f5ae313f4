"""Plans of graphs that have been seen before: a chunk's graphs are mostly alike.

    graph        Addmm(bias, x, T(weight)) -> Tanh -> y
    signature    Tanh 1 | Addmm bias -1 2 | T weight

The signature names each node by its type and by what its edges lead to: nodes by the
number in which they come up, inputs by their place, parameters by their own node, which
the signature keeps, so that later graphs have the same. A graph with another signature
is planned anew.

A plan depends on saved tensors too, which hooks may have packed: these are compared
beside the signature.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from zbpp.runtime.backward.ends import End
from zbpp.runtime.backward.grads import has_hooks
from zbpp.runtime.backward.graph import SplitPlan, plan_split
from zbpp.runtime.backward.layouts import InputLayouts
from zbpp.runtime.backward.paths import find_target, is_dtensor
from zbpp.runtime.backward.products import SplitSite, can_read
from zbpp.runtime.backward.regions import RegionSite
from zbpp.runtime.support.autograd_internals import LeafNode, is_built_in

__all__ = ["SplitPlanCache"]

_MAX_PLANS = 8
_SMALL_BYTES = 2**16
"""Bytes of a gradient of B that may wait for the end of B, where it is captured."""


class SplitPlanCache:
    """The plans of one chunk's graphs."""

    def __init__(self) -> None:
        self._plans: dict[tuple[Any, ...], _KnownPlan] = {}
        self.layouts = InputLayouts()

    def plan(self, ends: Sequence[End], inputs: Sequence[Tensor]) -> SplitPlan:
        """Return `plan_split`'s plan.

        Args:
            ends: where the graph ends, as `plan_split` takes them.
            inputs: leaves.
        """
        if not all([end.__class__ is GradientEdge for end in ends]):
            return plan_split(ends, inputs)
        graph = _Graph(ends, inputs)
        known_plan = self._plans.get(graph.signature)
        plan = None if known_plan is None else known_plan.plan_of(graph, inputs)
        if plan is not None:
            return plan
        self._plans.pop(graph.signature, None)
        plan = plan_split(ends, inputs)
        if not plan.is_reentrant and not plan.has_slices:
            if len(self._plans) == _MAX_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[graph.signature] = _KnownPlan(graph, inputs, plan)
        return plan


class _Graph:
    """The nodes of a graph but for its leaves, their edges, and its signature."""

    __slots__ = ("edges", "nodes", "signature")

    def __init__(self, ends: Sequence[End], inputs: Sequence[Tensor]) -> None:
        # a part of every B, so it is kept short
        places = {id(x): ~i for i, x in enumerate(inputs)}
        nodes: list[Any] = []
        all_edges: list[Any] = []
        signature: list[Any] = []
        numbers: dict[Any, int] = {}
        edges: Any = ends
        at = 0
        while True:
            for edge in edges:
                child = edge[0]
                number = numbers.get(child)
                if number is not None:
                    signature.append(number)
                elif child.__class__ is LeafNode:
                    leaf = child.variable
                    signature.append(places.get(id(leaf), child))
                    if not leaf.requires_grad:
                        signature.append("frozen")
                elif child is None:
                    signature.append(None)
                else:
                    numbers[child] = number = len(nodes)
                    nodes.append(child)
                    signature.append(number)
            if at == len(nodes):
                break
            node = nodes[at]
            signature.append(node.__class__)
            edges = node.next_functions
            all_edges.append(edges)
            at += 1
        self.nodes, self.edges, self.signature = nodes, all_edges, tuple(signature)


class _KnownPlan:
    """The plan of a graph, by the numbers of its nodes."""

    def __init__(
        self, graph: _Graph, inputs: Sequence[Tensor], plan: SplitPlan
    ) -> None:
        numbers = {node: number for number, node in enumerate(graph.nodes)}
        leaf_nodes = {
            node.variable: node
            for node in graph.signature
            if node.__class__ is LeafNode
        }
        self._sites = [
            (
                numbers[node],
                product._replace(target=find_target(edges)),
                [f"_raw_saved_{name}" for name in product.reads],
            )
            for node, product, edges in plan.products
        ]
        """With the attributes that tell whether a hook has packed a saved tensor."""
        own_nodes = set(leaf_nodes.values())
        self._regions = [
            (numbers[node], site, site.leads_to(own_nodes))
            for node, site in plan.regions
        ]
        self._leaves_in_b = [x for x in plan.leaves if x in leaf_nodes]
        places = {id(x): place for place, x in enumerate(inputs)}
        self._inputs_in_b = [places[id(x)] for x in plan.leaves if id(x) in places]
        self._waiting, self._reasons = plan.waiting, plan.reasons
        self._captures = all(map(is_built_in, graph.nodes)) and all(
            map(_may_be_captured, self._leaves_in_b)
        )

    def plan_of(self, graph: _Graph, inputs: Sequence[Tensor]) -> SplitPlan | None:
        """Return the plan of a graph with this signature; None: it needs another."""
        nodes = graph.nodes
        products: list[SplitSite] = []
        is_packed = False
        for number, product, raw in self._sites:
            node, edges = nodes[number], graph.edges[number]
            for name in raw:
                if getattr(node, name).unpack_hook is not None:
                    is_packed = True
            products.append((node, product, [edges[i] for i in product.operands]))
        if is_packed and not can_read(products):
            return None
        regions: list[tuple[Any, RegionSite]] = []
        for number, site, is_same in self._regions:
            node = nodes[number]
            regions.append((node, site if is_same else site.in_graph_of(node)))
        return SplitPlan(
            products,
            regions,
            [*self._leaves_in_b, *[inputs[i] for i in self._inputs_in_b]],
            self._waiting,
            self._reasons,
            captures=self._captures
            and not is_packed
            and not any(map(has_hooks, self._leaves_in_b)),
        )


def _may_be_captured(leaf: Tensor) -> bool:
    """True if the gradient of a leaf may be added in the end of B."""
    return not is_dtensor(leaf) and leaf.nbytes <= _SMALL_BYTES
