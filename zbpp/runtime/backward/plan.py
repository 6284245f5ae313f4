"""Find, in the graph of one forward, the products whose weight gradients can wait.

    y ── Addmm ──┬── x ...                      B continues here
                 └── T ── weight (a leaf)       W starts here

A leaf waits if every path to it leads from a product over nodes of one operand: the
transpose, autocast's cast, a slice. Autograd runs the nodes between the product and the
leaf in W, so this package needs no rules for them.

A leaf that a node uses in any other way stays in B: W would add its
gradients in another order.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zbpp.runtime.backward.products import RULES, Rule
from zbpp.runtime.compiled.backend import pieces_of
from zbpp.runtime.support.autograd_internals import (
    LeafNode,
    is_built_in,
    may_be_read,
    packed_by_hooks,
)
from zbpp.runtime.support.torch_internals import is_fake

_VIEWS = (
    "T Transpose Permute View UnsafeView ReshapeAlias ToCopy Unsqueeze Squeeze Alias "
    "Expand Clone Select Slice Split SplitWithSizes UnsafeSplit UnsafeSplitWithSizes "
    "Unbind Index IndexSelect"
)
_ONE_OPERAND = {f"{name}Backward{i}" for name in _VIEWS.split() for i in (0, 1)}
"""Nodes that autograd can run in W: one operand, and no other tensor."""

_LOOKUPS = {
    "IndexBackward0": "_raw_saved_indices",
    "IndexSelectBackward0": "_raw_saved_index",
}
"""But these need an index; one that a checkpoint has packed is computed once more."""

_REENTRANT = "CheckpointFunctionBackward"
"""Refuses a backward to some leaves only."""

_SMALL_BYTES = 2**16
"""The largest gradient of B that may be returned at the end of B."""

_MAX_PLANS = 8

Edge = Any
"""A node and the number of its output, as a tuple or a `GradientEdge`."""


class Product(NamedTuple):
    """A product whose weights wait; the same in all similar graphs."""

    rule: Rule
    edges: Sequence[int]
    """Numbers of the node's edges that lead to the weights."""
    leaves: Sequence[Tensor]
    """The weights."""
    raw: Sequence[str] = ()
    """Attributes of the node that show which saved tensors a hook has packed."""
    adds_transposed: bool | None = None
    """W may add to the only weight's ``.grad`` by itself: the weight has no other use,
    and is multiplied as it is (False) or transposed (True). None: autograd adds."""


_Slot = tuple[Any, int]
"""A node, and the number of its edge; None: the end of the graph."""

Site = tuple[Any, Product, Sequence[Edge]]
"""A node of one graph, its product, and the edges that the weights' gradients enter."""


class Plan(NamedTuple):
    """The work of B, and the work that it leaves for W."""

    sites: Sequence[Site]
    """In the order in which autograd runs them."""
    leaves: Sequence[Tensor]
    """Other parameters, whose gradients B computes."""
    may_capture: bool = False
    """Autograd may return all gradients of B at once: all nodes are torch's, no hook
    has packed what W reads, and the leaves are small."""


def is_plain(leaf: Tensor) -> bool:
    """True if W can add a leaf's gradient: subclasses may define another sum."""
    return type(leaf) in (Tensor, nn.Parameter) or is_fake(leaf)


def grad_dtype_of(leaf: Tensor) -> torch.dtype | None:
    """Return the dtype that autograd casts a leaf's gradients to; None: any."""
    dtype: torch.dtype | None = getattr(leaf, "grad_dtype", leaf.dtype)
    return dtype


def _make_plan(
    nodes: Sequence[Any],
    all_edges: Sequence[Sequence[Edge]],
    input_ids: Collection[int],
) -> Plan:
    """Plan B and W; `all_edges` has those to the outputs, then those of each node."""
    users: dict[Any, list[_Slot]] = {}
    for user, edges in zip((None, *nodes), all_edges, strict=True):
        for i, (node, *_) in enumerate(edges):
            if node is not None:
                users.setdefault(node, []).append((user, i))
    leaf_nodes = {node.variable: node for node in users if node.__class__ is LeafNode}
    leaves = [x for x in leaf_nodes if x.requires_grad and id(x) not in input_ids]
    if any(type(node).__name__ == _REENTRANT for node in nodes):
        return Plan([], leaves)
    waiting = {
        slot: leaf
        for leaf in leaves
        if _may_wait(leaf)
        for slot in _slots_of(leaf_nodes[leaf], users)
    }
    while True:
        sites = [site for node in nodes for site in _sites_of(node, waiting)]
        slots = {(node, i) for node, product, _ in sites for i in product.edges}
        in_b = {leaf for slot, leaf in waiting.items() if slot not in slots}
        if not in_b:
            break
        waiting = {slot: x for slot, x in waiting.items() if x not in in_b}
    sites.sort(key=_turn_of)
    n_uses = Counter(waiting.values())
    return Plan(
        [
            (node, product._replace(adds_transposed=_adds(edges, n_uses)), edges)
            for node, product, edges in sites
        ],
        [leaf for leaf in leaves if leaf not in n_uses],
    )


def _may_wait(leaf: Tensor) -> bool:
    is_known = is_plain(leaf) or type(leaf).__name__ == "DTensor"
    return is_known and leaf.layout is torch.strided


def _slots_of(node: Any, users: Mapping[Any, Sequence[_Slot]]) -> Iterator[_Slot]:
    """Yield all uses of a node's result, over nodes of one operand."""
    is_view = [_has_one_operand(user) for user, _ in users[node]]
    # in W autograd would add a gradient at the node before one over other nodes
    if len(set(is_view)) > 1:
        yield None, 0  # which is no product's
    for slot, goes_on in zip(users[node], is_view, strict=True):
        if goes_on:
            yield from _slots_of(slot[0], users)
        else:
            yield slot


def _has_one_operand(node: Any) -> bool:
    name = type(node).__name__
    is_packed = name in _LOOKUPS and packed_by_hooks(node, [_LOOKUPS[name]])
    return name in _ONE_OPERAND and not is_packed


def _sites_of(node: Any, waiting: Mapping[_Slot, Tensor]) -> Iterator[Site]:
    """Yield the products of a node whose weights all may wait."""
    kind, below = type(node), node.next_functions
    pieces = (Rule(x.compute, (x.edge,), slot=x.slot) for x in pieces_of(node))
    for rule in (*RULES.get(kind.__name__, ()), *pieces):
        first, *more = rule.weights
        edges = [first, *(i for i in more if below[i][0] is not None)]
        leaves = [waiting[node, i] for i in edges if (node, i) in waiting]
        saved = [*rule.operands, *rule.settings]
        raw = [f"_raw{name}" for name in saved if hasattr(kind, f"_raw{name}")]
        is_known = all(hasattr(kind, name) for name in saved)
        if len(leaves) == len(edges) and is_known and may_be_read(node, raw):
            yield node, Product(rule, edges, leaves, raw), [below[i] for i in edges]
            if rule.slot is None:
                return


def _turn_of(site: Site) -> int:
    """Autograd runs products from the last to the first, and adds gradients so."""
    return -int(site[0]._sequence_nr())


def _adds(edges: Sequence[Edge], n_uses: Counter[Tensor]) -> bool | None:
    """Return `Product.adds_transposed` for the edges of a product's weights."""
    node, _ = edges[0]
    is_transposed = type(node).__name__ == "TBackward0"
    if is_transposed:
        node = node.next_functions[0][0]
    if len(edges) > 1 or node.__class__ is not LeafNode:
        return None
    leaf = node.variable
    return is_transposed if n_uses[leaf] == 1 and is_plain(leaf) else None


class PlanCache:
    """The plans of one chunk's graphs, most of which are alike.

        graph        Addmm(bias, x, T(weight)) -> Tanh -> y
        signature    Tanh 1 | Addmm bias ~0 2 | T weight

    The signature lists the type of each node and the targets of its edges: nodes by
    number, inputs by place, parameters by their nodes. It keeps these alive, so
    that later graphs have the same ones.
    """

    def __init__(self) -> None:
        self._plans: dict[Any, tuple[list[tuple[int, Product]], Plan]] = {}
        """By signature: a plan, its products, and the numbers of their nodes."""

    def plan(self, ends: Sequence[Edge], inputs: Sequence[Tensor]) -> Plan:
        """Plan B and W of the graph below some edges; every B does, so it is fast."""
        places = {id(x): ~i for i, x in enumerate(inputs)}
        nodes: list[Any] = []
        all_edges: list[Any] = [ends]
        signature: list[Any] = []
        numbers: dict[Any, int] = {}
        for edges in all_edges:  # which grows
            for edge in edges:
                node = edge[0]
                number: Any = numbers.get(node)
                if number is None and node is not None:
                    if node.__class__ is LeafNode:
                        leaf = node.variable
                        number = places.get(id(leaf), node)
                        if not leaf.requires_grad:
                            signature.append("frozen")
                    else:
                        numbers[node] = number = len(nodes)
                        nodes.append(node)
                        all_edges.append(node.next_functions)
                        signature.append(node.__class__)
                signature.append(number)
        key = tuple(signature)
        if key not in self._plans:
            plan = _make_plan(nodes, all_edges, places)
            is_simple = all(map(is_built_in, nodes)) and all(
                map(_is_small, plan.leaves)
            )
            if len(self._plans) == _MAX_PLANS:
                del self._plans[next(iter(self._plans))]
            found = [(numbers[x[0]], x[1]) for x in plan.sites]
            # without its nodes, which lead to the chunk's input
            self._plans[key] = found, plan._replace(sites=[], may_capture=is_simple)
        products, plan = self._plans[key]
        sites: list[Site] = []
        is_packed = False
        for number, product in products:
            node, edges = nodes[number], all_edges[number + 1]
            for name in product.raw:
                if getattr(node, name).unpack_hook is not None:
                    is_packed = True
            sites.append((node, product, [edges[i] for i in product.edges]))
        if any([product.adds_transposed is None for _, product in products]):
            sites.sort(key=_turn_of)  # it may have run in another order
        if is_packed and not all(may_be_read(node, x.raw) for node, x, _ in sites):
            return _make_plan(nodes, all_edges, places)
        return Plan(sites, plan.leaves, plan.may_capture and not is_packed)


def _is_small(leaf: Tensor) -> bool:
    """True if a gradient of B may wait for the end of B, and is then only added."""
    casts = leaf.dtype != grad_dtype_of(leaf)
    return is_plain(leaf) and not casts and leaf.nbytes <= _SMALL_BYTES
