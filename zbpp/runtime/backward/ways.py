"""The way from a product's operand to the leaf that it is a view, a cast or a part of.

    Addmm ── T ── Select 0 ──┐
    Addmm ── T ── Select 1 ──┴── w      w.grad[0] += dw0,  w.grad[1] += dw1

A way of plain views alone can be gone again from ``w.grad``: to the part that an
operand's gradient is added to. Parts that overlap nowhere may be added one by one:
autograd adds them up over the whole leaf, and each only meets zeros of the others.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any

import torch
from torch import Tensor

from zbpp.runtime.support.autograd_internals import has_saved, is_packed

__all__ = [
    "CUTS",
    "LEAF",
    "OVERLAP",
    "Way",
    "follow",
    "is_part",
    "is_view",
    "needs_gradient",
    "overlap",
    "part_of",
    "refusal",
    "way_of",
    "whole_of",
]

LEAF = "AccumulateGrad"
"""The name of a leaf's node."""

OVERLAP = "its parts overlap"
"""The reason to keep a leaf in B that another graph of the same nodes may not have."""

Way = Sequence[tuple[Any, int]]
"""Nodes from an operand to its leaf, and the output of each that is used."""

Box = list[tuple[int, int]]
"""First and last index of a part, for each dimension of its leaf."""


def _number(value: int) -> int:
    """A saved number; torch shows negative ones without their sign."""
    return value - 2**64 if value >= 2**63 else value


def _select(x: Tensor, node: Any, _: int) -> Tensor:
    return x.select(_number(node._saved_dim), _number(node._saved_index))


def _slice(x: Tensor, node: Any, _: int) -> Tensor:
    start, end = node._saved_start, node._saved_end
    result: Tensor = torch.ops.aten.slice.Tensor(
        x,
        _number(node._saved_dim),
        None if start is None else _number(start),
        None if end is None else _number(end),
        _number(node._saved_step),
    )
    return result


def _split(x: Tensor, node: Any, n: int) -> Tensor:
    dim, size = _number(node._saved_dim), _number(node._saved_split_size)
    return x.narrow(dim, n * size, min(size, x.shape[dim] - n * size))


def _split_with_sizes(x: Tensor, node: Any, n: int) -> Tensor:
    sizes = [_number(size) for size in node._saved_split_sizes]
    return x.narrow(_number(node._saved_dim), sum(sizes[:n]), sizes[n])


def _unbind(x: Tensor, node: Any, n: int) -> Tensor:
    return x.select(_number(node._saved_dim), n)


def _t(x: Tensor, node: Any, _: int) -> Tensor:
    return x.t()


def _transpose(x: Tensor, node: Any, _: int) -> Tensor:
    return x.transpose(_number(node._saved_dim0), _number(node._saved_dim1))


_View = Callable[[Tensor, Any, int], Tensor]

CUTS: Mapping[str, tuple[_View, tuple[str, ...]]] = {
    "SelectBackward0": (_select, ("dim", "index")),
    "SliceBackward0": (_slice, ("dim", "start", "end", "step")),
    "SplitBackward0": (_split, ("dim", "split_size")),
    "UnsafeSplitBackward0": (_split, ("dim", "split_size")),
    "SplitWithSizesBackward0": (_split_with_sizes, ("dim", "split_sizes")),
    "UnsafeSplitWithSizesBackward0": (_split_with_sizes, ("dim", "split_sizes")),
    "UnbindBackward0": (_unbind, ("dim",)),
}
"""Parts of a tensor: how to take one, and what of a node tells which."""

_TURNS: Mapping[str, tuple[_View, tuple[str, ...]]] = {
    "TBackward0": (_t, ()),
    "TransposeBackward0": (_transpose, ("dim0", "dim1")),
}
"""Views that are their own inverse."""

_VIEWS = {**CUTS, **_TURNS}

_CASTS = {
    *("PermuteBackward0", "ViewBackward0", "UnsafeViewBackward0"),
    *("ReshapeAliasBackward0", "ToCopyBackward0", "UnsqueezeBackward0"),
    *("SqueezeBackward0", "SqueezeBackward1", "AliasBackward0"),
    *("ExpandBackward0", "CloneBackward0", *_TURNS),
}
"""Nodes of one operand that W leaves to autograd, with nothing saved."""

_LOOKUPS = {"IndexBackward0": "indices", "IndexSelectBackward0": "index"}
"""Nodes whose operand is looked up in a leaf, and the tensors that say where."""


def follow(node: Any) -> Any:
    """Return the node above one that leaves its gradient to W; None: it does not."""
    name = type(node).__name__
    if name not in _CASTS and name not in CUTS:
        saved = _LOOKUPS.get(name)
        if saved is None or is_packed(node, saved):
            return None
    return node.next_functions[0][0]


def needs_gradient(node: Any) -> bool:
    """False for an operand without a gradient, or a leaf frozen since the forward."""
    if node is None:
        return False
    return type(node).__name__ != LEAF or bool(node.variable.requires_grad)


def is_part(node: Any) -> bool:
    """True if a part of a leaf is taken on the way to it."""
    while (name := type(node).__name__) != LEAF:
        if name in CUTS:
            return True
        node = node.next_functions[0][0]
    return False


def way_of(node: Any, output: int) -> tuple[Way, Any]:
    """Return the way from an operand to its leaf, and the leaf's node."""
    way = []
    while type(node).__name__ != LEAF:
        way.append((node, output))
        node, output = node.next_functions[0]
    return way, node


def is_view(node: Any) -> bool:
    """True if a node is a view that `part_of` can repeat on another tensor."""
    found = _VIEWS.get(type(node).__name__)
    return found is not None and has_saved(node.__class__, found[1])


def part_of(whole: Tensor, way: Way) -> Tensor:
    """Go a way of plain views, from a tensor with the leaf's shape to an operand's."""
    for node, output in reversed(way):
        whole = _VIEWS[type(node).__name__][0](whole, node, output)
    return whole


def whole_of(part: Tensor, way: Way) -> Tensor:
    """Go a way without cuts to the leaf."""
    for node, output in way:
        part = _TURNS[type(node).__name__][0](part, node, output)
    return part


def refusal(
    leaf: Any, operands: Sequence[tuple[Any, int]], uses: Mapping[Any, int]
) -> str | None:
    """Return why the parts of a leaf cannot wait for W, or None if they can.

    Args:
        leaf: its node.
        operands: nodes and outputs of its parts, which products would leave to W.
        uses: number of edges that lead to each node of the graph.
    """
    counts: Counter[Any] = Counter()
    for node, _ in operands:
        counts[node] += 1
        while node is not leaf and counts[node] == 1:
            node = node.next_functions[0][0]
            counts[node] += 1
    if any(uses[node] != count for node, count in counts.items()):
        return "used in parts, and in other ways"
    return OVERLAP if overlap(leaf, operands) else None


def overlap(leaf: Any, operands: Sequence[tuple[Any, int]]) -> bool:
    """True unless no two parts of a leaf have a number in common."""
    if _are_selected(leaf, operands):
        return False
    like = torch.empty(leaf.variable.shape, device="meta")
    boxes = [box for one in operands if (box := _box(like, way_of(*one)[0]))]
    for dim in range(like.dim()):
        edges = sorted(box[dim] for box in boxes)
        if all(before[1] < after[0] for before, after in pairwise(edges)):
            return False
    return any(
        all(a[0] <= b[1] and b[0] <= a[1] for a, b in zip(*two, strict=True))
        for two in combinations(boxes, 2)
    )


def _are_selected(leaf: Any, operands: Sequence[tuple[Any, int]]) -> bool:
    """True if all are of different entries along one dimension: the common case."""
    shape = leaf.variable.shape
    chosen = set()
    for node, _ in operands:
        above = node
        while above is not leaf:
            node, above = above, above.next_functions[0][0]
        if type(node).__name__ != "SelectBackward0":
            return False
        dim = _number(node._saved_dim) % len(shape)
        chosen.add((dim, _number(node._saved_index) % shape[dim]))
    return len(chosen) == len(operands) and len({dim for dim, _ in chosen}) == 1


def _box(like: Tensor, way: Way) -> Box:
    """The box in a dense tensor around what a way leads to; empty for no numbers.

    What follows something else than views, a cast say, takes no part of its own.
    """
    part = like
    for node, output in reversed(way):
        if not is_view(node):
            break
        part = part_of(part, [(node, output)])
    if part.numel() == 0:
        return []
    first = part.storage_offset()
    last = first + sum(
        (n - 1) * stride for n, stride in zip(part.shape, part.stride(), strict=True)
    )
    return [
        (first // stride % n, last // stride % n)
        for n, stride in zip(like.shape, like.stride(), strict=True)
    ]
