"""Weight gradients of a compiled region as calls of their own, run by plain kernels.

    B's graph   ... permute ── mm ── permute ── gradient       what is cut off
    recipe      gradient = (dy.t() @ x)                        of what B holds: dy, x
                total += dy.t() @ x                            in place: one addmm

A recipe makes the same products in the same layouts as the compiler would, so its bits
are the same. Compiling it once more gains nothing: a product is one kernel already.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

__all__ = ["Recipe", "is_cast", "is_permutation", "is_view", "write_recipe"]

_ATEN = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default
_PERMUTE = (_ATEN.permute.default, _ATEN.t.default, _ATEN.transpose.int)
_SHAPES = (_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default)
_SAME = (
    *(_ATEN.unsqueeze.default, _ATEN.squeeze.dim, _ATEN.squeeze.dims),
    *(_ATEN.squeeze.default, _ATEN.alias.default),
)
_METHODS = {_ATEN.mm.default: "mm", _ATEN.bmm.default: "bmm"}
_PLAIN = ("placeholder", "call_method", "output")
_IN_PLACE = {"mm": "addmm_", "bmm": "baddbmm_"}


def is_permutation(node: fx.Node) -> bool:
    """True for a transpose, of any dimensions."""
    return node.target in _PERMUTE


def is_view(node: fx.Node) -> bool:
    """True for a view of all of a tensor."""
    return node.target in (*_PERMUTE, *_SHAPES, *_SAME)


def is_cast(node: fx.Node) -> bool:
    """True for a cast to another dtype, and no more."""
    return node.target is _CONVERT


class Recipe(NamedTuple):
    """The way to some gradients from what B holds for them.

    Args:
        compute: takes what is held; returns the gradients.
        add: takes the sum of the only gradient, and what is held; adds within the
            product's kernel. None: there is no such kernel.
        dtype: of the first gradient.
    """

    compute: Callable[..., tuple[Tensor, ...]]
    add: Callable[..., None] | None
    dtype: torch.dtype


def write_recipe(
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
    return Recipe(_function(graph), add, outputs[0].meta["val"].dtype)


def _repeat(graph: fx.Graph, node: fx.Node, args: tuple[Any, ...]) -> fx.Node:
    """Repeat one node, by the method of a tensor where there is one: that is faster."""
    if node.target in _PERMUTE:
        return _permuted(graph, args[0], _dims(node))
    if node.target in _SHAPES:
        return graph.call_method("reshape", args)
    if is_cast(node):
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


def _in_place(own: fx.Graph, result: fx.Node) -> Callable[..., None] | None:
    """Write how a product, or its transpose, is added within its own kernel."""
    turned = result.op == "call_method" and result.target == "t"
    product: Any = result.args[0] if turned else result
    if product.op != "call_method" or product.target not in _IN_PLACE:
        return None
    graph = fx.Graph()
    total = graph.placeholder("total")
    made: dict[fx.Node, fx.Node] = {}
    for node in own.nodes:
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
"""Those that call no more than methods, by their code."""


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
