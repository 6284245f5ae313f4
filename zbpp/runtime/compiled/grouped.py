"""The product of transformers' experts, where they are compiled in 32 bits.

Its backward is one operator for both gradients. B calls the forward's operator, which
makes the same products with the weights transposed; W the loop over the groups.
"""

from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["is_grouped", "split_grouped", "weight_call"]

_NAME = "transformers::grouped_mm_fallback"


def is_grouped(node: fx.Node) -> bool:
    """True for the backward of the experts' product."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.name == f"{_NAME}_backward"


def weight_call(kernel: fx.Node) -> tuple[Any, tuple[Any, ...]] | None:
    """Return what computes the weights' gradient alone; None: sizes are not known."""
    x, weight, ends, dy = kernel.args
    like: Tensor = weight.meta["val"]  # type: ignore[union-attr]
    sizes, strides = list(like.shape), list(like.stride())
    if not all(type(n) is int for n in (*sizes, *strides)):
        return None
    return _of_weight, (x, dy, ends, sizes, strides)


def _of_weight(
    x: Tensor, dy: Tensor, ends: Tensor, sizes: list[int], strides: list[int]
) -> Tensor:
    total = torch.empty_strided(sizes, strides, dtype=x.dtype, device=x.device).zero_()
    start = 0
    for i, end in enumerate(ends.tolist()):
        if start < end:
            torch.mm(x[start:end].T, dy[start:end], out=total[i])
            start = end
    return total


def split_grouped(graph: fx.Graph, kernel: fx.Node) -> None:
    """Let B compute the gradient of what the experts read, and no other."""
    _, weight, ends, dy = kernel.args
    forward = torch.ops.transformers.grouped_mm_fallback.default
    for part in list(kernel.users):
        if part.args[1] != 0:
            continue
        with graph.inserting_before(part):
            turned = graph.call_function(
                torch.ops.aten.permute.default, (weight, [0, 2, 1])
            )
            turned.meta["val"] = weight.meta["val"].permute(0, 2, 1)  # type: ignore[union-attr]
            dx = graph.call_function(forward, (dy, turned, ends))
        dx.meta.update(part.meta)
        part.replace_all_uses_with(dx)
