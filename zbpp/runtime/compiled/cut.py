"""Cut the products that make weight gradients off a compiled backward's graph.

    dy ──┬── mm ── dx                          stays: B
         ├── sum ── db                         stays
         └── permute ── mm ── permute ── dw    goes to W; B puts dy and x out instead
    x  ─────────────────┘

The compiler has decided what the forward keeps and what the backward computes again;
here only the last product on the way to a weight's gradient is taken away, with the
views and casts around it. Its operands are the least that can be held.
"""

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from zbpp.runtime.compiled.grouped import is_grouped, split_grouped, weight_call
from zbpp.runtime.compiled.recipe import (
    Recipe,
    is_cast,
    is_permutation,
    is_view,
    write_recipe,
)

__all__ = ["Piece", "cut_weights"]

_ATEN = torch.ops.aten
_PRODUCTS = (_ATEN.mm.default, _ATEN.bmm.default, _ATEN._grouped_mm.default)
_CONVOLUTION = _ATEN.convolution_backward.default
_ALONE = (_ATEN.slice.Tensor, _ATEN.mul.Tensor, _ATEN.mul.Scalar)
"""Steps that may follow a product: a part of one that was padded, a factor."""
_CAT = _ATEN.cat.default
_MASK = 10
"""Argument of a convolution's backward: which of its gradients are wanted."""


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
        found = _piece(results, slot, wanted, output)
        if found is None:
            continue
        slots, way, instead = found
        body = sorted(way.body, key=order.__getitem__)
        outputs = [results[i] for i in slots]
        recipe = write_recipe(way.held, body, outputs, instead)
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
    for kernel in filter(is_grouped, list(graph.nodes)):
        if not any(user.args[1] == 1 and user.users for user in kernel.users):
            split_grouped(graph, kernel)
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
    if is_grouped(way.kernel):
        return _of_groups(way.kernel, way, slot)
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
        is_known = kernel.target is _CONVOLUTION or is_grouped(kernel)
        return bool(is_known and node.args[1] != 0 and not way.has_parts)
    if node.target is _CAT:
        way.has_parts = True
        parts: Any = node.args[0]
        return all(_go_back(part, node, way) for part in dict.fromkeys(parts))
    if not (is_view(node) or is_cast(node) or node.target in _ALONE):
        return False
    above = node.all_input_nodes  # with symbols for sizes there are more
    return len(above) == 1 and _go_back(above[0], node, way)


def _go_to_held(node: fx.Node, way: _Way) -> None:
    """Go from an operand over transposes, and casts to wider numbers, to what is held.

    No further: what the compiler makes in one piece depends on what has several users,
    and so would the order of sums in B.
    """
    above = node.args[0] if node.args else None
    if isinstance(above, fx.Node) and (is_permutation(node) or _widens(node, above)):
        way.repeat(node)
        _go_to_held(above, way)
    else:
        way.hold(node)


def _widens(node: fx.Node, above: fx.Node) -> bool:
    if not is_cast(node):
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


def _of_groups(kernel: fx.Node, way: _Way, slot: int) -> _Found | None:
    """The gradient of experts' weights by a call of its own."""
    call = weight_call(kernel)
    (part,) = (user for user in kernel.users if user in way.body)
    if call is None:
        return None
    for operand in call[1]:
        if isinstance(operand, fx.Node):
            way.hold(operand)
    return (slot,), way, {part: call}


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
            if user in results or any(one is not output for one in user.users)
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
