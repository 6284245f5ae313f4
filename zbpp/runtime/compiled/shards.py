"""Gradients of DTensors: a compiled backward makes the part of this process.

    parameter   DTensor, Shard(0) ── its part ── graph ── part of the gradient
    W           the sum's part += that; a first one goes to autograd as a DTensor

So it is where the gradient is dealt out as its parameter is. A partial sum, which the
processes still have to add up, stays in B.
"""

from typing import Any, NamedTuple

from torch import Tensor

from zbpp.runtime.support.compile_internals import DealtGradient, dealt_gradient
from zbpp.runtime.support.sharded import is_sharded, own_shard

__all__ = ["Shards", "shards_of"]


class Shards(NamedTuple):
    """The way from the part of a gradient to the DTensor, and back.

    Args:
        made: what the compiler says of the gradient.
        mesh: of the parameter.
    """

    made: DealtGradient
    mesh: Any

    def whole(self, part: Tensor) -> Tensor:
        """Return the gradient as autograd would hand it on."""
        return self.made.whole(part, self.mesh)

    def own(self, total: Tensor | None) -> Tensor | None:
        """Return the part of a sum; None: there is none, or it is dealt differently."""
        if total is None or not is_sharded(total):
            return None
        held: Any = total
        if held.placements != self.made.placements or held.device_mesh != self.mesh:
            return None
        part: Tensor = own_shard(held)
        return part


def shards_of(node: Any, number: int, leaf: Any) -> Shards | None:
    """Return how a region's gradient of a DTensor is dealt out.

    Args:
        node: of the region.
        number: of the region's input.
        leaf: the parameter.

    Returns:
        None where it is not as its parameter is.
    """
    if not is_sharded(leaf):
        return None
    made = dealt_gradient(node, number)
    if made is None or made.placements != leaf.placements:
        return None
    return Shards(made, leaf.device_mesh)
