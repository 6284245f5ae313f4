"""Costs of layers with experts, which exchange tokens."""

from typing import Any

from zbpp.core import Costs, Lane, Parts

C, N = Lane.COMPUTE, Lane.NETWORK


def moe_costs(share: float, layers: int = 4, **more: Any) -> Costs:
    """A stage of layers with F = B = W = 1, of which F and B exchange more.

    Args:
        share: of exchanges in F and B.
        layers: of the stage.
        more: other costs.
    """
    half, exchange = 0.5 / layers, 0.5 * share / (1 - share) / layers
    f = ((C, half), (N, exchange), (C, half), (N, exchange))
    b = ((N, exchange), (C, half), (N, exchange), (C, half))
    return Costs(parts=Parts(f, b, ((C, half), (C, half)), layers), **more)
