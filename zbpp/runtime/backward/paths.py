"""The path from a product's operand to its leaf: views, casts, or one slice.

    Addmm ── T ── Select 0 ──┐
    Addmm ── T ── Select 1 ──┴── w      w.grad[0] += dw0,  w.grad[1] += dw1

Where the path is a transpose or a slice, or both, W adds to ``w.grad`` by itself. Any
other path is left to autograd, in W. Slices that share no index may be added one by
one: autograd adds them up over the whole leaf, where each only meets zeros of others.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from zbpp.runtime.backward.grads import GradTarget, LeafSlice, has_hooks
from zbpp.runtime.support.autograd_internals import has_saved, is_packed

__all__ = [
    "LEAF",
    "cut_of",
    "find_target",
    "follow",
    "is_cut",
    "is_dtensor",
    "needs_gradient",
    "refusal_of_slices",
]

LEAF = "AccumulateGrad"
"""The name of a leaf's node."""

_CASTS = {
    "TBackward0",
    "TransposeBackward0",
    "PermuteBackward0",
    "ViewBackward0",
    "UnsafeViewBackward0",
    "ReshapeAliasBackward0",
    "ToCopyBackward0",
    "UnsqueezeBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "AliasBackward0",
    "ExpandBackward0",
    "CloneBackward0",
}
"""Nodes of one operand, with nothing saved, that autograd can run in W."""

_LOOKUPS = {"IndexBackward0": "indices", "IndexSelectBackward0": "index"}
"""Nodes whose operand is looked up in a leaf, and the tensors that say where."""

_CUTS = {
    "SelectBackward0": ("dim", "index"),
    "SliceBackward0": ("dim", "start", "end", "step"),
    "SplitBackward0": ("dim", "split_size"),
    "UnsafeSplitBackward0": ("dim", "split_size"),
    "SplitWithSizesBackward0": ("dim", "split_sizes"),
    "UnsafeSplitWithSizesBackward0": ("dim", "split_sizes"),
    "UnbindBackward0": ("dim",),
}
"""Nodes that take a slice, and what of them tells which."""


def follow(node: Any) -> Any:
    """Return the node above one that autograd can run in W; None: it cannot."""
    name = type(node).__name__
    if name in _CASTS:
        return node.next_functions[0][0]
    if name in _CUTS:
        above = node.next_functions[0][0]
        return above if type(above).__name__ == LEAF else None
    saved = _LOOKUPS.get(name)
    if saved is None or is_packed(node, saved):
        return None
    return node.next_functions[0][0]


def needs_gradient(node: Any) -> bool:
    """False for an operand without a gradient, or a leaf frozen since the forward."""
    if node is None:
        return False
    return type(node).__name__ != LEAF or bool(node.variable.requires_grad)


def is_dtensor(tensor: Tensor) -> bool:
    """True if it is split over processes, by tensor parallelism; W sends nothing."""
    return type(tensor).__name__ == "DTensor"


def is_cut(node: Any) -> bool:
    """True if a node takes a slice of what is above it."""
    return type(node).__name__ in _CUTS


def cut_of(node: Any, output: int) -> tuple[Any, int] | None:
    """Return the node that takes a slice of a leaf, on the path from an operand.

    Returns:
        The node and the number of its output; None: there is none.
    """
    while type(node).__name__ != LEAF:
        if is_cut(node):
            return node, output
        node, output = node.next_functions[0]
    return None


def find_target(edges: Sequence[tuple[Any, int]]) -> GradTarget | None:
    """Return where the gradient of an only edge may be added.

    None where autograd may do more than to add: behind another path, or for a DTensor.
    """
    if len(edges) > 1:
        return None
    node, output = edges[0]
    is_transposed = type(node).__name__ == "TBackward0"
    if is_transposed:
        node, output = node.next_functions[0]
    part = None
    if is_cut(node):
        part = _slice_of(node, output)
        node, output = node.next_functions[0]
        if part is None:
            return None
    if type(node).__name__ != LEAF or is_dtensor(node.variable):
        return None
    return GradTarget(node.variable, is_transposed, part)


def _slice_of(node: Any, output: int) -> LeafSlice | None:
    """Return the slice of a leaf that a node takes; None: it is none we know."""
    name = type(node).__name__
    if not has_saved(node.__class__, _CUTS[name]):
        return None
    shape = node.next_functions[0][0].variable.shape
    dim = _signed(node._saved_dim) % len(shape)
    size = shape[dim]
    if name == "SelectBackward0":
        index = _signed(node._saved_index) % size
        return LeafSlice(dim, index, index + 1, is_select=True)
    if name == "UnbindBackward0":
        return LeafSlice(dim, output, output + 1, is_select=True)
    if name == "SliceBackward0":
        ends = (node._saved_start, node._saved_end)
        start, stop = (None if end is None else _signed(end) for end in ends)
        start, stop, step = slice(start, stop, _signed(node._saved_step)).indices(size)
        return LeafSlice(dim, start, stop, is_select=False) if step == 1 else None
    if name.endswith("SplitBackward0"):
        start = output * _signed(node._saved_split_size)
        stop = min(start + _signed(node._saved_split_size), size)
    else:
        start = sum(node._saved_split_sizes[:output])
        stop = start + node._saved_split_sizes[output]
    return LeafSlice(dim, start, stop, is_select=False)


def _signed(value: int) -> int:
    """A saved number; torch shows negative ones without their sign."""
    return value - 2**64 if value >= 2**63 else value


def refusal_of_slices(
    leaf: Any, cuts: Sequence[tuple[Any, int]], uses: Mapping[Any, int]
) -> str | None:
    """Return why the slices of a leaf cannot wait for W, or None if they can.

    Args:
        leaf: its node.
        cuts: nodes and outputs of the slices, one for each product that uses one.
        uses: number of edges that lead to each node of the graph.
    """
    counts = Counter(node for node, _ in cuts)
    if uses[leaf] != len(counts) or any(uses[x] != n for x, n in counts.items()):
        return "used in parts, and in other ways"
    if has_hooks(leaf.variable):
        return "used in parts, and a hook is to see them as one"
    slices = [_slice_of(*cut) for cut in cuts]
    ranges = sorted((x.start, x.stop) for x in slices if x is not None)
    if len(ranges) < len(slices) or len({x.dim for x in slices if x is not None}) > 1:
        return "used in parts of several kinds"
    if any(before[1] > after[0] for before, after in pairwise(ranges)):
        return "its parts overlap"
    return None
