"""A compiled region at run time: its backward is B, and says what is left for W.

Autograd runs the region's node. Whoever runs B has registered the node before, with
what takes the pieces; where nobody has, all pieces are made at once, so that
``loss.backward()`` does what it always did.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from zbpp.runtime.compiled.cut import Piece
from zbpp.runtime.compiled.recipe import Recipe
from zbpp.runtime.compiled.shards import Shards
from zbpp.runtime.support.compile_internals import (
    compiled_backward,
    current_node,
    is_compiled,
    missing,
)

__all__ = [
    "TAKERS",
    "PieceGradients",
    "Region",
    "Take",
    "frees_of",
    "reason_for",
    "region_of",
]

_STOCK = 'compiled without zbpp: use torch.compile(..., backend="zbpp")'

Take = Callable[[list[Any]], Sequence[int]]
"""Given what all pieces need: keeps it for W, but for the pieces that it returns."""

TAKERS: dict[Any, Take] = {}
"""The takers of a region's pieces while its B runs, by node.

For all threads: on a GPU autograd has one of its own."""


class Region(NamedTuple):
    """The two halves that zbpp has made of a compiled region's backward.

    Args:
        pieces: that may wait for W.
        edges: of each piece, the numbers of the node's edges that its gradients go to.
        n_edges: of the node; another number is another calling convention.
        frees: of each piece, the operands that no later piece needs.
        why: nothing may wait, in the words of a report; empty: something may.
        inputs: of each piece, the numbers of the region's inputs.
        dealt: places of gradients that the node hands on as DTensors.
    """

    pieces: Sequence[Piece]
    edges: Sequence[tuple[int, ...]]
    n_edges: int
    frees: Sequence[Sequence[int]] = ()
    why: str = ""
    inputs: Sequence[tuple[int, ...]] = ()
    dealt: Sequence[int] = ()


class PieceGradients:
    """The gradients of one piece, as a product of the graph has its own.

    Args:
        recipe: of the piece.
        operands: that B has left; W drops the list.
        shards: of each gradient, how it is dealt out; empty: none is.
    """

    __slots__ = ("operands", "recipe", "shards")

    def __init__(
        self,
        recipe: Recipe,
        operands: list[Tensor],
        shards: Sequence[Shards] = (),
    ) -> None:
        self.recipe = recipe
        self.operands = operands
        self.shards = shards

    def of(self, _: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients."""
        found = self.recipe.compute(*self.operands)
        if not self.shards:
            return found
        pairs = zip(found, self.shards, strict=True)
        return tuple([one.whole(x) for x, one in pairs])

    def add_to(self, total: Tensor, _: Tensor) -> bool:
        """Add the only gradient within the product's kernel, if there is one."""
        if self.recipe.add is None:
            return False
        self.recipe.add(total, *self.operands)
        return True


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


def frees_of(pieces: Sequence[Piece]) -> list[list[int]]:
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

    dealt, all_pieces = region.dealt, range(len(region.pieces))

    def backward(args: list[Any]) -> list[Any]:
        found: list[Any] = list(compiled(args))
        held = found[n_results:]
        del found[n_results:]
        take = TAKERS.get(current_node()) if TAKERS else None
        left: Sequence[int] = all_pieces
        if take is not None:
            for slot in dealt:  # the node makes a DTensor, of something
                found[slot] = held[0].new_empty(())
            left = take(held)
        for number in left:
            slots, operands, recipe = region.pieces[number]
            given = [held[i] for i in operands]
            if take is None:
                for i in region.frees[number]:
                    held[i] = None
            for slot, gradient in zip(slots, recipe.compute(*given), strict=True):
                found[slot] = gradient
            del given
        return found

    backward._boxed_call = True  # type: ignore[attr-defined]
    backward.zbpp_region = region  # type: ignore[attr-defined]
    return backward
