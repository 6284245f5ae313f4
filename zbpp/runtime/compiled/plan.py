"""The share of W of a compiled region in a graph: pieces whose leaves can wait."""

from collections.abc import Callable, Collection, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zbpp.runtime.compiled.region import Region, reason_for, region_of
from zbpp.runtime.compiled.shards import Shards, shards_of

__all__ = ["Edges", "KnownPiece", "RegionSite", "leads_to_one", "plan_region"]

Edges = Sequence[tuple[Any, int]]

_OTHER_SHARDS = "its gradient is not sharded as it is"


KnownPiece = tuple[
    Tensor,
    Shards | None,
    Callable[[list[Any]], Sequence[Tensor]],
    Sequence[int],
    Callable[..., tuple[Tensor, ...]],
    Callable[..., None] | None,
    torch.dtype,
]
"""A piece with a leaf that W adds to by itself, ready for every W: the parameter; how
its gradient is dealt out; what takes its operands from among the region's; those that
no later piece needs; and the parts of its `Recipe`. A plain tuple is read fastest."""


class RegionSite(NamedTuple):
    """The share of W of a region in a graph.

    It does not hold the region's node, which leads to the chunk's input.

    Args:
        region: what its node runs.
        edges: of each piece, where its gradients go on; empty: made in B.
        leaves: the nodes of the leaves that wait.
        shards: of each piece, how its gradients are dealt out; empty: they are not.
        targets: of each piece, the leaf to add to by itself, if one is known.
        known: all pieces, if there is one for each, and none is its transpose.
    """

    region: Region
    edges: Sequence[Edges]
    leaves: Sequence[Any]
    shards: Sequence[Sequence[Shards]]
    targets: Sequence[Any] = ()
    known: Sequence[KnownPiece] = ()

    def aimed_at(self, targets: Sequence[Any]) -> "RegionSite":
        """The same with targets, each with a leaf and its place; or None among them."""
        if any(x is None or x.is_turned for x in targets):
            return self._replace(targets=targets)
        region = self.region
        known = [
            (
                target.leaf,
                shards[0] if shards else None,
                _taker(operands),
                frees,
                *recipe,
            )
            for (_, operands, recipe), target, shards, frees in zip(
                region.pieces, targets, self.shards, region.frees, strict=True
            )
        ]
        return self._replace(targets=targets, known=known)

    def leads_to(self, leaves: Collection[Any]) -> bool:
        """True if all pieces lead to these nodes at once, with nothing in between."""
        return all(node in leaves for edges in self.edges for node, _ in edges)

    def is_alone(self) -> bool:
        """True if W adds to the leaves that wait by itself, whatever B gives them."""
        known = zip(self.targets, self.edges, strict=True)
        are_known = all(target is not None or not edges for target, edges in known)
        return are_known and not self.region.dealt  # else given no gradient at all

    def like(self, node: Any) -> "RegionSite":
        """The same for a node of another graph of this kind, with the same leaves."""
        below = node.next_functions
        edges = [
            [below[i] for i in numbers] if own else ()
            for own, numbers in zip(self.edges, self.region.edges, strict=True)
        ]
        return self._replace(edges=edges)


def _taker(places: Sequence[int]) -> Callable[[list[Any]], Sequence[Tensor]]:
    """Return what takes the things at some places out of a list."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda held: [held[i] for i in places]


def leads_to_one(node: Any, leaves: Collection[int]) -> bool:
    """True if a node leads to one of these leaves, by their ids, with nothing between.

    Then autograd runs it where it is asked for them.
    """
    below = node.next_functions
    return any(id(getattr(child, "variable", None)) in leaves for child, _ in below)


def plan_region(
    node: Any,
    leaf_above: Callable[[Any], Any | None],
    reasons: dict[int, str],
) -> RegionSite | None:
    """Return what a compiled node leaves to W, or None.

    Args:
        node: of a compiled region, ours or another.
        leaf_above: the node of the leaf that a node leads to, if that can wait.
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
    found: list[Edges] = []
    leaves: list[Any] = []
    shards: list[Sequence[Shards]] = []
    for (slots, *_), numbers, inputs in zip(
        region.pieces, region.edges, region.inputs, strict=True
    ):
        above = (leaf_above(below[i][0]) for i in numbers)
        own = [leaf for leaf in above if leaf is not None]
        waits = len(own) == len(numbers)
        dealt: list[Shards] = []
        if waits and slots[0] in region.dealt:
            parameters = [leaf.variable for leaf in own]
            pairs = zip(inputs, parameters, strict=True)
            made = [shards_of(node, i, p) for i, p in pairs]
            dealt = [one for one in made if one is not None]
            if len(dealt) < len(made):
                reasons.update(dict.fromkeys(map(id, parameters), _OTHER_SHARDS))
                waits = False
        shards.append(dealt)
        found.append([below[i] for i in numbers] if waits else ())
        leaves += own if waits else []
    return RegionSite(region, found, leaves, shards) if leaves else None
