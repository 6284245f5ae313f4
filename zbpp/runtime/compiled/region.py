"""A compiled region at run time: its backward is B, and says what is left for W.

Autograd runs the region's node. Whoever runs B has told the node what takes the pieces
(`defer_pieces`); where nobody has, all pieces are made at once, so that
``loss.backward()`` does what it always did.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zbpp.runtime.compiled.cut import Piece
from zbpp.runtime.support.compile_internals import (
    compiled_backward,
    current_node,
    is_compiled,
    missing,
)

__all__ = [
    "DeferHook",
    "Region",
    "defer_pieces",
    "last_uses",
    "reason_for",
    "region_of",
    "run_with",
]

_STOCK = 'compiled without zbpp: use torch.compile(..., backend="zbpp")'

DeferHook = Callable[[list[Any]], Sequence[int]]
"""Given what all pieces need: keeps it for W, but for the pieces that it returns."""


class Region(NamedTuple):
    """The two halves that zbpp has made of a compiled region's backward.

    Args:
        pieces: that may wait for W.
        edges: of each piece, the numbers of the node's edges that its gradients go to.
        n_edges: of the node; another number is another calling convention.
        frees: of each piece, the operands that no later piece needs.
        dtensors: places of gradients that the node makes DTensors of, with the dtype
            and the number of dimensions of each.
        why: nothing may wait, in the words of a report; empty: something may.
    """

    pieces: Sequence[Piece]
    edges: Sequence[tuple[int, ...]]
    n_edges: int
    frees: Sequence[Sequence[int]]
    dtensors: Mapping[int, tuple[torch.dtype, int]]
    why: str = ""


def region_of(node: Any) -> Region | None:
    """Return what zbpp has made of a node; None: it is no region of ours."""
    if not is_compiled(node):
        return None
    region = getattr(compiled_backward(node), "zbpp_region", None)
    return region if isinstance(region, Region) else None


def reason_for(node: Any) -> str:
    """Say why all of a compiled node's gradients are computed in B."""
    region = region_of(node)
    if region is not None:
        if region.n_edges != len(node.next_functions):
            return "this torch calls compiled regions in another way"
        return region.why
    lacking = missing()
    return _STOCK if lacking is None else f"compiled by a torch without {lacking}"


def defer_pieces(node: Any, hook: DeferHook | None) -> None:
    """Set what takes the pieces of a region when its node runs; None: nothing does.

    It is kept on the node, so that passes that run at once do not meet.
    """
    node.zbpp_defer_hook = hook


def last_uses(pieces: Sequence[Piece]) -> list[list[int]]:
    """Return the operands that each piece is the last to need."""
    last: dict[int, int] = {}
    for number, piece in enumerate(pieces):
        last.update(dict.fromkeys(piece.operands, number))
    return [[i for i, at in last.items() if at == n] for n in range(len(pieces))]


def run_with(compiled: Callable[..., Any], n_results: int, region: Region) -> Any:
    """Return what autograd runs in place of a compiled backward.

    Args:
        compiled: what is left of it; puts the pieces' operands out after its results.
        n_results: of the backward as it was.
        region: whose pieces were cut off.
    """
    all_pieces = range(len(region.pieces))

    def backward(args: list[Any]) -> list[Any]:
        results: list[Any] = list(compiled(args))
        held = results[n_results:]
        del results[n_results:]
        hook: DeferHook | None = getattr(current_node(), "zbpp_defer_hook", None)
        if hook is not None:
            for slot, (dtype, n_dims) in region.dtensors.items():
                # the node makes a DTensor, of something; autograd drops it
                results[slot] = held[0].new_empty((1,) * n_dims, dtype=dtype)
        for number in all_pieces if hook is None else hook(held):
            slots, operands, recipe = region.pieces[number]
            values = [held[i] for i in operands]
            if hook is None:
                for i in region.frees[number]:
                    held[i] = None
            for slot, gradient in zip(slots, recipe.compute(*values), strict=True):
                results[slot] = gradient
            del values
        return results

    backward._boxed_call = True  # type: ignore[attr-defined]
    backward.zbpp_region = region  # type: ignore[attr-defined]
    return backward
