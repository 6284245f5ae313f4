"""Cut the products that make weight gradients off a compiled backward's graph.

    dy ──┬── mm ── dx                          stays: B
         ├── sum ── db                         stays
         └── permute ── mm ── permute ── dw    goes to W; B puts dy and x out instead
    x  ─────────────────┘

    recipe   gradient = (dy.t() @ x)           of what B holds: dy, x
             total += dy.t() @ x               in place: one addmm

The compiler has decided what the forward keeps and what the backward computes again;
here only the last product on the way to a weight's gradient is taken away, with the
views and casts around it. Its operands are the least that can be held. Its recipe makes
the same products in the same layouts by plain kernels, so its bits are the same.
Compiling it once more gains nothing: a product is one kernel already.
"""

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

__all__ = ["Piece", "Recipe", "cut_weights"]

_ATEN = torch.ops.aten
_PRODUCTS = (_ATEN.mm.default, _ATEN.bmm.default, _ATEN._grouped_mm.default)
_CONVOLUTION = _ATEN.convolution_backward.default
_ALONE = (_ATEN.slice.Tensor, _ATEN.mul.Tensor, _ATEN.mul.Scalar)
"""Steps that may follow a product: a part of one that was padded, a factor."""
_CAT = _ATEN.cat.default
_MASK = 10
"""Argument of a convolution's backward: which of its gradients are wanted."""
_CONVERT = torch.ops.prims.convert_element_type.default
_PERMUTE = (_ATEN.permute.default, _ATEN.t.default, _ATEN.transpose.int)
_SHAPES = (_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default)
_SAME = (
    _ATEN.unsqueeze.default,
    _ATEN.squeeze.dim,
    _ATEN.squeeze.dims,
    _ATEN.squeeze.default,
    _ATEN.alias.default,
)
_METHODS = {_ATEN.mm.default: "mm", _ATEN.bmm.default: "bmm"}
_PLAIN = ("placeholder", "call_method", "output")
_IN_PLACE = {"mm": "addmm_", "bmm": "baddbmm_"}


class Recipe(NamedTuple):
    """The way to some gradients from what B holds for them.

    Args:
        compute: takes what is held; returns the gradients.
        add: takes the sum of the only gradient, and what is held; adds within the
            product's kernel. None: there is no such kernel.
        dtype: of the first gradient.
        n_dims: of each gradient.
    """

    compute: Callable[..., tuple[Tensor, ...]]
    add: Callable[..., None] | None
    dtype: torch.dtype
    n_dims: tuple[int, ...]


class Piece(NamedTuple):
    """Gradients that are made together, in W.

    Args:
        slots: their places among the backward's results.
        operands: numbers of what B holds for them, in the order of the recipe.
        recipe: makes them.
    """

    slots: tuple[int, ...]
    operands: tuple[int, ...]
    recipe: Recipe


@dataclass
class _Way:
    """The way back from a gradient: what is repeated, and what is held for it."""

    body: list[fx.Node] = field(default_factory=list)
    held: list[fx.Node] = field(default_factory=list)
    kernel: fx.Node | None = None
    """The one that makes several gradients."""
    has_parts: bool = False

    def hold(self, node: fx.Node) -> None:
        if node not in self.held:
            self.held.append(node)

    def repeat(self, node: fx.Node) -> None:
        if node not in self.body:
            self.body.append(node)


def cut_weights(graph: fx.Graph, wanted: Collection[int]) -> list[Piece]:
    """Take the weights' products out of a backward's graph, in place.

    The graph puts None out in their place, and after all else what is held.

    Args:
        graph: of the backward; its first results are the gradients of its inputs.
        wanted: places of gradients that may wait.
    """
    output = next(iter(reversed(graph.nodes)))
    results: list[Any] = list(output.args[0])
    order = {node: i for i, node in enumerate(graph.nodes)}
    held: list[fx.Node] = []
    pieces = []
    for slot in sorted(wanted):
        piece = _piece(results, slot, wanted, output)
        if piece is None:
            continue
        slots, way, instead = piece
        body = sorted(way.body, key=order.__getitem__)
        outputs = [results[i] for i in slots]
        recipe = _write_recipe(way.held, body, outputs, instead)
        held += [node for node in way.held if node not in held]
        pieces.append(Piece(slots, tuple(map(held.index, way.held)), recipe))
        for i in slots:
            results[i] = None
    if not pieces:
        return []
    _shrink_convolutions(graph, {n for n in results if n is not None}, output)
    output.args = ((*results, *held),)
    visible = output.meta.get("user_visible_output_idxs")
    if visible is not None:
        output.meta["user_visible_output_idxs"] = [
            i for i in visible if results[i] is not None
        ]
    graph.eliminate_dead_code()
    return pieces


_Found = tuple[tuple[int, ...], _Way, dict[fx.Node, tuple[Any, tuple[Any, ...]]]]


def _piece(
    results: Sequence[Any], slot: int, wanted: Collection[int], output: fx.Node
) -> _Found | None:
    """Find what makes one gradient, and others that the same kernel makes."""
    node = results[slot]
    way = _Way()
    if not isinstance(node, fx.Node) or results.count(node) != 1:
        return None
    if not _go_back(node, output, way):
        return None
    if way.kernel is None:
        return (slot,), way, {}
    return _with_bias(way.kernel, way, results, slot, wanted, output)


def _go_back(node: fx.Node, user: fx.Node, way: _Way) -> bool:
    """Go from a result to the product above it; False if there is none.

    Args:
        node: that nothing but ``user`` may use.
        user: of its result.
        way: gets what is on it.
    """
    if list(node.users) != [user] or node.op != "call_function":
        return False
    way.repeat(node)
    if node.target in _PRODUCTS:
        for operand in node.all_input_nodes:
            if not isinstance(operand.meta.get("val"), Tensor):
                return False
            _go_to_held(operand, way)
        return True
    if node.target is operator.getitem:
        way.kernel = kernel = node.all_input_nodes[0]
        is_known = kernel.target is _CONVOLUTION
        return bool(is_known and node.args[1] != 0 and not way.has_parts)
    if node.target is _CAT:
        way.has_parts = True
        parts: Any = node.args[0]
        return all(_go_back(part, node, way) for part in dict.fromkeys(parts))
    if not (_is_view(node) or _is_cast(node) or node.target in _ALONE):
        return False
    above = node.all_input_nodes  # with symbols for sizes there are more
    return len(above) == 1 and _go_back(above[0], node, way)


def _go_to_held(node: fx.Node, way: _Way) -> None:
    """Go from an operand over transposes, and casts to wider numbers, to what is held.

    No further: what the compiler makes in one piece depends on what has several users,
    and so would the order of sums in B.
    """
    above = node.args[0] if node.args else None
    if isinstance(above, fx.Node) and (_is_permutation(node) or _widens(node, above)):
        way.repeat(node)
        _go_to_held(above, way)
    else:
        way.hold(node)


def _widens(node: fx.Node, above: fx.Node) -> bool:
    if not _is_cast(node):
        return False
    return bool(above.meta["val"].itemsize < node.meta["val"].itemsize)


def _with_bias(
    kernel: fx.Node,
    way: _Way,
    results: Sequence[Any],
    slot: int,
    wanted: Collection[int],
    output: fx.Node,
) -> _Found | None:
    """One kernel makes the gradients of a weight and of a bias, so they go together.

    Args:
        kernel: a convolution's.
        way: to it, from the weight's gradient.
        results: of the backward.
        slot: of the weight's gradient.
        wanted: places of gradients that may wait.
        output: of the graph.
    """
    parts = {user.args[1]: user for user in kernel.users}
    if parts.get(1) not in way.body:
        return None
    slots = [slot]
    if 2 in parts:
        end = parts[2]
        while list(end.users) != [output] and len(end.users) == 1:
            (end,) = end.users
        if results.count(end) != 1 or results.index(end) not in wanted:
            return None
        if not _go_back(end, output, way):
            return None
        slots.append(results.index(end))
    for operand in kernel.all_input_nodes:
        way.hold(operand)
    way.repeat(kernel)
    args = _with_mask(kernel, [False, True, 2 in parts])
    return tuple(slots), way, {kernel: (kernel.target, args)}


def _with_mask(kernel: fx.Node, mask: list[bool]) -> tuple[Any, ...]:
    args = list(kernel.args)
    args[_MASK] = mask
    return tuple(args)


def _shrink_convolutions(
    graph: fx.Graph, results: set[fx.Node], output: fx.Node
) -> None:
    """Let convolutions of B compute no gradient that nobody is left to use."""
    for kernel in graph.find_nodes(op="call_function", target=_CONVOLUTION):
        alive = {
            user.args[1]: user
            for user in kernel.users
            if user in results or any(reader is not output for reader in user.users)
        }
        mask: list[bool] = list(kernel.args[_MASK])
        smaller = [wanted and i in alive for i, wanted in enumerate(mask)]
        if smaller == mask or not any(smaller):
            continue
        kernel.args = _with_mask(kernel, smaller)
        values: Iterable[Any] = kernel.meta["val"]
        kernel.meta["val"] = tuple(
            value if kept else None for value, kept in zip(values, smaller, strict=True)
        )


def _is_permutation(node: fx.Node) -> bool:
    """True for a transpose, of any dimensions."""
    return node.target in _PERMUTE


def _is_view(node: fx.Node) -> bool:
    """True for a view of all of a tensor."""
    return node.target in (*_PERMUTE, *_SHAPES, *_SAME)


def _is_cast(node: fx.Node) -> bool:
    """True for a cast to another dtype, and no more."""
    return node.target is _CONVERT


def _write_recipe(
    held: Sequence[fx.Node],
    body: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    instead: Mapping[fx.Node, tuple[Any, tuple[Any, ...]]],
) -> Recipe:
    """Write the recipe for some nodes of B's graph, as a graph of its own.

    Args:
        held: nodes whose results are given.
        body: nodes to repeat, in order.
        outputs: those that are the gradients.
        instead: for nodes that another call stands for, its function and arguments.
    """
    graph = fx.Graph()
    made = {node: graph.placeholder(f"held_{i}") for i, node in enumerate(held)}
    for node in body:
        target, args = instead.get(node, (None, node.args))
        args = fx.map_arg(args, lambda x: made.get(x, x))
        if target is not None:
            made[node] = graph.call_function(target, args)
            continue
        made[node] = _repeat(graph, node, args)
    results = [made[node] for node in outputs]
    add = _in_place(graph, results[0]) if len(results) == 1 else None
    graph.output(tuple(results))
    graph.eliminate_dead_code()
    values = [node.meta["val"] for node in outputs]
    n_dims = tuple(value.dim() for value in values)
    return Recipe(_function(graph), add, values[0].dtype, n_dims)


def _repeat(graph: fx.Graph, node: fx.Node, args: tuple[Any, ...]) -> fx.Node:
    """Repeat one node, by the method of a tensor where there is one: that is faster."""
    if node.target in _PERMUTE:
        return _permuted(graph, args[0], _dims(node))
    if node.target in _SHAPES:
        return graph.call_method("reshape", args)
    if _is_cast(node):
        return graph.call_method("to", args)
    if node.target in _METHODS:
        return graph.call_method(_METHODS[node.target], args)
    return graph.call_function(node.target, args, dict(node.kwargs))  # type: ignore[arg-type]


def _permuted(graph: fx.Graph, operand: fx.Node, dims: list[int]) -> fx.Node:
    """A permutation; two transposes after each other are none."""
    if dims != [1, 0]:
        return graph.call_method("permute", (operand, dims))
    if operand.op == "call_method" and operand.target == "t":
        return operand.args[0]  # type: ignore[return-value]
    return graph.call_method("t", (operand,))


def _in_place(source: fx.Graph, result: fx.Node) -> Callable[..., None] | None:
    """Write how a product, or its transpose, is added within its own kernel."""
    turned = result.op == "call_method" and result.target == "t"
    product: Any = result.args[0] if turned else result
    if product.op != "call_method" or product.target not in _IN_PLACE:
        return None
    graph = fx.Graph()
    total = graph.placeholder("total")
    made: dict[fx.Node, fx.Node] = {}
    for node in source.nodes:
        if node is product:
            break
        made[node] = graph.node_copy(node, made.__getitem__)
    if turned:
        total = graph.call_method("t", (total,))
    pair = [made[x] for x in product.args]
    graph.call_method(_IN_PLACE[product.target], (total, *pair))
    graph.output(None)
    return _function(graph)


_functions: dict[str, Callable[..., Any]] = {}
"""Functions that call no more than methods, by their code."""


def _function(graph: fx.Graph) -> Callable[..., Any]:
    """Return what runs a graph; equal ones share it, as code runs faster when warm."""
    module = fx.GraphModule({}, graph)
    if all(node.op in _PLAIN for node in graph.nodes):
        return _functions.setdefault(module.code, module.forward)
    return module.forward


def _dims(node: fx.Node) -> list[int]:
    """The order of dimensions that a permutation makes."""
    n = node.meta["val"].dim()
    if node.target is _ATEN.permute.default:
        return [dim % n for dim in node.args[1]]  # type: ignore[union-attr]
    order = list(range(n))
    first, second = (0, 1) if node.target is _ATEN.t.default else node.args[1:3]
    order[first], order[second] = order[second], order[first]  # type: ignore[index]
    return order
