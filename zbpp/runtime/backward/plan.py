"""Find, in the graph of one forward, the products whose weight gradients can wait.

    y ── Addmm ──┬── x ...                      B goes on here
                 └── T ── weight (a leaf)       W starts here

A leaf waits if every path to it leads from a product over nodes of one operand: the
transpose, autocast's cast, a slice. Autograd runs the nodes between the product and the
leaf in W, so this package needs no rules for them.

A leaf that a node uses in any other way stays in B: W would add its
gradients in another order.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zbpp.runtime.backward.products import RULES, Rule
from zbpp.runtime.compiled.backend import pieces_of
from zbpp.runtime.support.autograd_internals import (
    LeafNode,
    is_built_in,
    may_be_read,
    no_hook_packed,
)
from zbpp.runtime.support.torch_internals import is_fake

__all__ = [
    "Plan",
    "PlanCache",
    "Product",
    "Site",
    "grad_dtype_of",
    "is_plain",
    "make_plan",
]

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
    edges: tuple[int, ...]
    """Numbers of the node's edges that lead to the weights."""
    leaves: tuple[Tensor, ...]
    """The weights."""
    operands: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    """Attributes of the node that W reads."""
    raw: tuple[str, ...] = ()
    """Attributes that show which of them a hook has packed."""
    slot: int | None = None
    """Number of a compiled node's result; None: an eager node."""
    adds_transposed: bool | None = None
    """W may add to the only weight's ``.grad`` by itself: the weight has no other use,
    and is multiplied as it is (False) or transposed (True). None: autograd adds."""


Site = tuple[Any, Product, Sequence[Edge]]
"""A node of one graph, its product, and the edges that the weights' gradients enter."""


class Plan(NamedTuple):
    """The work of B, and what it leaves for W."""

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


def make_plan(ends: Iterable[Edge], inputs: Iterable[Tensor]) -> Plan:
    """Plan B and W of the graph below some edges, with the leaves that are inputs."""
    input_ids = {id(x) for x in inputs}
    uses = _count_uses(ends)
    leaves = [
        node.variable
        for node in uses
        if node.__class__ is LeafNode
        and node.variable.requires_grad
        and id(node.variable) not in input_ids
    ]
    if any(type(node).__name__ == _REENTRANT for node in uses):
        return Plan([], leaves)
    paths = _Paths(input_ids)
    sites = [site for node in uses for site in paths.sites_of(node)]
    in_b = paths.leaves_in_b(uses)
    while True:  # a convolution's bias goes with its weight
        refused = [x for x in sites if not in_b.isdisjoint(x[1].leaves)]
        if not refused:
            break
        in_b.update(leaf for _, product, _ in refused for leaf in product.leaves)
        sites = [x for x in sites if in_b.isdisjoint(x[1].leaves)]
    sites.sort(key=_turn_of)
    n_uses = Counter(leaf for _, product, _ in sites for leaf in product.leaves)
    return Plan(
        [
            (node, product._replace(adds_transposed=_adds(edges, n_uses)), edges)
            for node, product, edges in sites
        ],
        [leaf for leaf in leaves if leaf not in n_uses],
    )


def _count_uses(ends: Iterable[Edge]) -> dict[Any, int]:
    """Count the edges that lead to each node of a graph."""
    uses: dict[Any, int] = {}
    nodes: list[Any] = []
    edges: Iterable[Any] = ends
    while True:
        for node, *_ in edges:
            if node is None:
                continue
            if node not in uses:
                uses[node] = 0
                nodes.append(node)
            uses[node] += 1
        if not nodes:
            return uses
        edges = nodes.pop().next_functions


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


class _Paths:
    """The paths from products to leaves that gradients would take in W."""

    def __init__(self, input_ids: set[int]) -> None:
        self._input_ids = input_ids
        self._products: dict[Any, set[Any]] = {}
        """Products that a node on a path enters as a weight, with the edge's number."""
        self._nodes: dict[Any, set[Any]] = {}
        """Nodes of the paths that lead to it."""

    def sites_of(self, node: Any) -> Iterator[Site]:
        """Yield the products of a node that could wait."""
        for rule in RULES.get(type(node).__name__, ()):
            site = self._site(node, Product(rule, rule.weights, ()))
            if site is not None:
                yield site
                return
        for piece in pieces_of(node):
            rule = Rule(piece.compute)
            site = self._site(node, Product(rule, (piece.edge,), (), slot=piece.slot))
            if site is not None:
                yield site

    def _site(self, node: Any, product: Product) -> Site | None:
        """Find a product's leaves and operands; return None if it cannot wait."""
        rule, kind, below = product.rule, type(node), node.next_functions
        first, *_ = product.edges
        edges = [i for i in product.edges if i == first or below[i][0] is not None]
        steps: list[tuple[Any, Any]] = []
        leaves = [self._follow(below[i][0], (node, i), steps) for i in edges]
        operands = tuple(f"_saved_{name}" for name in rule.operands)
        settings = tuple(f"_saved_{name}" for name in rule.settings)
        saved = (*operands, *settings)
        raw = tuple(f"_raw{name}" for name in saved if hasattr(kind, f"_raw{name}"))
        is_known = all(hasattr(kind, name) for name in saved)
        if any(x is None for x in leaves) or not (is_known and may_be_read(node, raw)):
            return None
        for step, user in steps:
            users = self._products if type(user) is tuple else self._nodes
            users.setdefault(step, set()).add(user)
        product = product._replace(
            edges=tuple(edges),
            leaves=tuple(leaves),
            operands=operands,
            settings=settings,
            raw=raw,
        )
        return node, product, [below[i] for i in edges]

    def _follow(self, node: Any, user: Any, steps: list[tuple[Any, Any]]) -> Any:
        """Follow a path to its leaf; return None if that cannot wait."""
        while node.__class__ is not LeafNode:
            name = type(node).__name__
            if name not in _ONE_OPERAND:
                return None
            if name in _LOOKUPS and not no_hook_packed(node, [_LOOKUPS[name]]):
                return None
            steps.append((node, user))
            user, node = node, node.next_functions[0][0]
        leaf = node.variable
        steps.append((node, user))
        is_known = is_plain(leaf) or type(leaf).__name__ == "DTensor"
        is_known = is_known and leaf.layout is torch.strided
        waits = is_known and leaf.requires_grad and id(leaf) not in self._input_ids
        return leaf if waits else None

    def leaves_in_b(self, uses: Mapping[Any, int]) -> set[Tensor]:
        """Return leaves that other nodes use, too."""
        in_b = set()
        for node in {**self._products, **self._nodes}:
            n_products = len(self._products.get(node, ()))
            n_nodes = len(self._nodes.get(node, ()))
            # in W autograd would add a gradient at the node before one over other nodes
            if n_products + n_nodes < uses[node] or (n_products and n_nodes):
                while node.__class__ is not LeafNode:
                    node = node.next_functions[0][0]
                in_b.add(node.variable)
        return in_b


class PlanCache:
    """The plans of one chunk's graphs, most of which are alike.

        graph        Addmm(bias, x, T(weight)) -> Tanh -> y
        signature    Tanh 1 | Addmm bias ~0 2 | T weight

    The signature lists the type of each node and the targets of its edges: nodes by
    number, inputs by place, parameters by their own nodes. It keeps these alive, so
    that later graphs have the same ones.
    """

    def __init__(self) -> None:
        self._plans: dict[Any, tuple[list[tuple[int, Product]], Plan]] = {}
        """By signature: a plan, its products, and the numbers of their nodes."""

    def plan(self, ends: Sequence[Edge], inputs: Sequence[Tensor]) -> Plan:
        """Return the plan of `make_plan`; every B calls it, so speed matters here."""
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
            plan = make_plan(ends, inputs)
            is_simple = all(map(is_built_in, nodes)) and all(
                map(_is_small, plan.leaves)
            )
            plan = plan._replace(may_capture=is_simple)
            if len(self._plans) == _MAX_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[key] = [(numbers[x[0]], x[1]) for x in plan.sites], plan
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
            return make_plan(ends, inputs)
        return Plan(sites, plan.leaves, plan.may_capture and not is_packed)


def _is_small(leaf: Tensor) -> bool:
    """True if a gradient of B may wait for the end of B, and is then only added."""
    casts = leaf.dtype != grad_dtype_of(leaf)
    return is_plain(leaf) and not casts and leaf.nbytes <= _SMALL_BYTES
