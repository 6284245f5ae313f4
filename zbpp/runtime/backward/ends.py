"""The ends of a graph: where gradients of outputs enter it, and where it begins."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from zbpp.core import RequestError
from zbpp.runtime.support.autograd_internals import edge_at, is_built_in
from zbpp.runtime.support.torch_internals import is_fake

__all__ = [
    "PLAIN",
    "End",
    "Ends",
    "alias_of",
    "end_of",
    "fitting",
]

End = Any
"""A `GradientEdge`, or the tensor itself; see `end_of`."""

Ends = tuple[list[End], list[Tensor | None]]
"""Ends of outputs, and their gradients."""

PLAIN = (Tensor, nn.Parameter)  # other subclasses may compute something else


class _Alias(torch.autograd.Function):
    """Return an alias of a tensor that is no leaf."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return dx


def alias_of(leaf: Tensor) -> Tensor:
    """Return a leaf's data as a tensor that may be changed in place.

    One that needs no gradient may be changed itself.
    """
    if not leaf.requires_grad:
        return leaf
    apply: Any = _Alias.apply  # typed from torch 2.14 on
    return cast(Tensor, apply(leaf))


def end_of(tensor: Tensor) -> End:
    """Return where a tensor's gradient enters the graph; it holds no data.

    Subclasses and nested tensors, which torch does not describe by their edge alone,
    stand for themselves.
    """
    node = tensor.grad_fn
    is_dense = not tensor.is_nested
    # a node in Python needs a token to live on
    if node is not None and type(tensor) is Tensor and is_dense and is_built_in(node):
        return edge_at(node, tensor.output_nr)
    is_plain = (type(tensor) in PLAIN or is_fake(tensor)) and is_dense
    return get_gradient_edge(tensor) if is_plain else tensor


def fitting(
    ends: list[End],
    shapes: Sequence[torch.Size | None],
    gradients: Tensor | Sequence[Tensor | None] | None,
) -> Ends:
    """Return the ends that have influence, and their gradients.

    Args:
        ends: of all outputs that require a gradient.
        shapes: of these outputs, None for nested tensors.
        gradients: as `SplitGraph.backward_input` takes them.

    Raises:
        RequestError: the gradients do not fit the outputs.
    """
    if gradients is None:
        if any(shape is None or shape.numel() != 1 for shape in shapes):
            raise RequestError(
                "B needs gradients, one for each output: not all are scalars"
            )
        return ends, [None] * len(ends)
    if isinstance(gradients, Tensor):
        gradients = (gradients,)
    if len(gradients) != len(ends):
        raise RequestError(
            f"B was given {len(gradients)} gradients, and {len(ends)} "
            "outputs require one; give one for each, None where it has no influence"
        )
    used_ends: list[End] = []
    used: list[Tensor | None] = []
    for i, dy in enumerate(gradients):  # without a zip: a part of every B
        if dy is None:
            continue
        shape = shapes[i]
        if shape is not None and dy.shape != shape:
            raise RequestError(
                f"gradient {i} has the shape {list(dy.shape)}, and its output "
                f"{list(shape)}"
            )
        used_ends.append(ends[i])
        used.append(dy)
    return used_ends, used
