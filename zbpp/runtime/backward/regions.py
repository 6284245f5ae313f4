"""The share of W of a compiled region: the pieces that its B leaves.

    B    region ── operands of all its pieces    one work
    W    piece, piece, ...                       each added, its operands freed

So it is where the leaf of every piece is known, and autograd would only add to it. Else
each piece is work of its own, as the products of a graph are.
"""

from collections.abc import Callable, Collection, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zbpp.runtime.backward.grads import (
    GradTarget,
    Root,
    WeightGradients,
    add_gradient,
    adds_only,
)
from zbpp.runtime.backward.paths import find_target
from zbpp.runtime.backward.products import (
    Edges,
    ProductWork,
    check_versions,
    versions_of,
)
from zbpp.runtime.backward.queue import DeferredWork, WeightQueue
from zbpp.runtime.compiled.region import Region, reason_for, region_of
from zbpp.runtime.support.compile_internals import DTensorLayout, dtensor_gradient

__all__ = ["RegionSite", "plan_region"]

_OTHER_PLACEMENTS = "its gradient is not sharded as it is"


class _KnownPiece(NamedTuple):
    """A piece with a leaf that W adds to by itself, ready for every W.

    Args:
        leaf: the parameter.
        take: takes the piece's operands from among the region's.
        frees: places of the operands that no later piece needs.
        compute, add, dtype: of its `Recipe`.
    """

    leaf: Tensor
    take: Callable[[list[Any]], Sequence[Tensor]]
    frees: Sequence[int]
    compute: Callable[..., tuple[Tensor, ...]]
    add: Callable[..., None] | None
    dtype: torch.dtype


class RegionSite(NamedTuple):
    """The share of W of a region in a graph.

    It does not hold the region's node, which leads to the chunk's input.

    Args:
        region: what its node runs.
        edges: of each piece, where its gradients go on; empty: made in B.
        leaves: the nodes of the leaves that wait.
        layouts: of each piece, the DTensors that its gradients are parts of; empty:
            they are none.
        targets: of each piece, where W adds its gradient, if that is known.
        known: all pieces, if W adds the gradients of all as they are.
    """

    region: Region
    edges: Sequence[Edges]
    leaves: Sequence[Any]
    layouts: Sequence[Sequence[DTensorLayout]]
    targets: Sequence[GradTarget | None]
    known_pieces: Sequence[_KnownPiece]

    def leads_to(self, leaves: Collection[Any]) -> bool:
        """True if all pieces lead to these nodes at once, with nothing in between."""
        return all(node in leaves for edges in self.edges for node, _ in edges)

    def in_graph_of(self, node: Any) -> "RegionSite":
        """Return the site at a like node of another graph with the same leaves."""
        below = node.next_functions
        edges = [
            [below[i] for i in numbers] if waiting else ()
            for waiting, numbers in zip(self.edges, self.region.edges, strict=True)
        ]
        return self._replace(edges=edges)

    def defer(self, queue: WeightQueue, held: list[Any]) -> Sequence[int]:
        """Keep the operands of the region that runs now for W.

        Returns:
            The numbers of the pieces that B makes.
        """
        if queue.lent:
            held[:] = map(queue.own, held)
        work = _RegionWork(self, held)
        if self.known_pieces:
            queue.put(work)
            return ()
        for piece in work.pieces():
            queue.put(piece)
        return [number for number, edges in enumerate(self.edges) if not edges]


def plan_region(
    node: Any, waiting_leaf: Callable[[Any], Any | None], reasons: dict[int, str]
) -> RegionSite | None:
    """Return what a compiled node leaves to W, or None.

    Args:
        node: of a compiled region, ours or another.
        waiting_leaf: the node of the leaf that a node leads to, if that can wait.
        reasons: gets why others cannot.
    """
    below = node.next_functions
    region = region_of(node)
    why = reason_for(node)
    if region is None or why:
        for child, _ in below:
            variable = getattr(child, "variable", None)
            if variable is not None:
                reasons.setdefault(id(variable), why)
        return None
    edges: list[Edges] = []
    leaves: list[Any] = []
    layouts: list[Sequence[DTensorLayout]] = []
    for piece, numbers in zip(region.pieces, region.edges, strict=True):
        piece_leaves = [waiting_leaf(below[i][0]) for i in numbers]
        waits = None not in piece_leaves
        layouts.append(())
        if waits and piece.slots[0] in region.dtensors:
            parameters = [leaf.variable for leaf in piece_leaves if leaf is not None]
            made = [
                dtensor_gradient(node, slot, parameter)
                for slot, parameter in zip(piece.slots, parameters, strict=True)
            ]
            layouts[-1] = [layout for layout in made if layout is not None]
            if None in made:
                reasons.update((id(p), _OTHER_PLACEMENTS) for p in parameters)
                waits = False
        edges.append([below[i] for i in numbers] if waits else ())
        leaves += piece_leaves if waits else []
    if not leaves:
        return None
    targets = [find_target(piece) if piece else None for piece in edges]
    known_pieces = _known_pieces(region, targets)
    return RegionSite(region, edges, leaves, layouts, targets, known_pieces)


def _known_pieces(
    region: Region, targets: Sequence[GradTarget | None]
) -> list[_KnownPiece]:
    """Return all pieces, or none if one has no target, or a transposed one."""
    pieces = []
    for piece, target, frees in zip(region.pieces, targets, region.frees, strict=True):
        if target is None or target.is_transposed or target.part is not None:
            return []
        take, recipe = _taker(piece.operands), piece.recipe
        how = recipe.compute, recipe.add, recipe.dtype
        pieces.append(_KnownPiece(target.leaf, take, frees, *how))
    return pieces


def _taker(places: Sequence[int]) -> Callable[[list[Any]], Sequence[Tensor]]:
    """Return what takes the things at some places out of a list."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda held: [held[i] for i in places]


class _PieceGradients(WeightGradients):
    """The gradients of one piece; of its product's gradient B has left what it needs.

    Args:
        piece: of a region.
        operands: that B has left; W drops the list.
        layouts: of the DTensors that the gradients are parts of; empty: they are none.
    """

    __slots__ = ("_layouts", "_operands", "_piece")

    def __init__(
        self, piece: Any, operands: list[Tensor], layouts: Sequence[DTensorLayout]
    ) -> None:
        self._piece, self._operands, self._layouts = piece, operands, layouts

    def of(self, dy: Tensor) -> tuple[Tensor, ...]:
        gradients: tuple[Tensor, ...] = self._piece.recipe.compute(*self._operands)
        if not self._layouts:
            return gradients
        pairs = zip(self._layouts, gradients, strict=True)
        return tuple([layout.whole(part) for layout, part in pairs])

    def add_to(self, total: Tensor, dy: Tensor) -> bool:
        add = self._piece.recipe.add
        if add is None:
            return False
        add(total, *self._operands)
        return True


class _RegionWork(DeferredWork):
    """All pieces of one region.

    Args:
        site: of the region.
        held: operands of the pieces, which the region numbers.
    """

    __slots__ = ("_site", "_versions")

    def __init__(self, site: RegionSite, held: list[Any]) -> None:
        self._site = site
        self.kept: list[Any] = held
        self._versions = versions_of(held)

    @property
    def roots(self) -> list[Root]:  # type: ignore[override]  # rarely asked for
        """Where the gradients go."""
        return [edge for edges in self._site.edges for edge in edges]

    def run(self, *, in_place: bool) -> Sequence[tuple[Root, Tensor | None]]:
        """Add each piece's gradient, or return those that autograd has to accumulate.

        Raises:
            RuntimeError: an operand was changed in place after B.
        """
        held = self.kept
        check_versions(held, self._versions)
        left: list[tuple[Root, Tensor | None]] = []
        for number, piece_plan in enumerate(self._site.known_pieces):
            leaf, take, frees, compute, add, dtype = piece_plan
            adds = leaf.requires_grad and adds_only(leaf, dtype)
            piece = None if adds else self._piece(number)
            operands = take(held)
            for i in frees:
                held[i] = None
            if piece is not None:
                del operands
                left += piece.run(in_place=in_place)
                continue
            if in_place and add is not None and leaf.grad is not None:
                add(leaf.grad, *operands)
            else:
                add_gradient(leaf, compute(*operands)[0], is_fresh=True)
        return left

    def pieces(self) -> Sequence[DeferredWork]:
        """Return the pieces that wait as works of their own.

        Raises:
            RuntimeError: an operand was changed in place after B.
        """
        check_versions(self.kept, self._versions)
        edges = self._site.edges
        return [self._piece(number) for number in range(len(edges)) if edges[number]]

    def _piece(self, number: int) -> ProductWork:
        """Return the work of one piece alone."""
        site = self._site
        piece = site.region.pieces[number]
        operands = [self.kept[i] for i in piece.operands]
        return ProductWork(
            site.edges[number],
            _PieceGradients(piece, operands, site.layouts[number]),
            operands,
            site.targets[number],
            piece.recipe.dtype,
        )
