"""The share of W of a compiled region in a graph: pieces whose leaves can wait."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from zbpp.runtime.compiled.region import Region, reason_for, region_of
from zbpp.runtime.compiled.shards import Shards, shards_of

__all__ = ["Edges", "RegionSite", "plan_region"]

Edges = Sequence[tuple[Any, int]]

_OTHER_SHARDS = "its gradient is not sharded as it is"


class RegionSite(NamedTuple):
    """A region's node in a graph, and its share of W.

    Args:
        node: of the region.
        region: what it runs.
        edges: of each piece, where its gradients go on; empty: made in B.
        leaves: the nodes of the leaves that wait.
        shards: of each piece, how its gradients are dealt out; empty: they are not.
        targets: of each piece, the leaf to add to by itself, if one is known.
        is_known: there is one for each piece, and no piece leads to its transpose.
    """

    node: Any
    region: Region
    edges: Sequence[Edges]
    leaves: Sequence[Any]
    shards: Sequence[Sequence[Shards]]
    targets: Sequence[Any] = ()
    is_known: bool = False

    def leads_to(self, leaves: Collection[Any]) -> bool:
        """True if all pieces lead to these nodes at once, with nothing in between."""
        return all(node in leaves for edges in self.edges for node, _ in edges)

    def like(self, node: Any) -> "RegionSite":
        """The same for a node of another graph of this kind, with the same leaves."""
        below = node.next_functions
        edges = [
            [below[i] for i in numbers] if own else ()
            for own, numbers in zip(self.edges, self.region.edges, strict=True)
        ]
        return self._replace(node=node, edges=edges)


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
    return RegionSite(node, region, found, leaves, shards) if leaves else None
