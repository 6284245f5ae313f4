"""Costs of layers whose stages have replicas: times of collectives, and memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add

from zbpp.core import (
    CollectiveOperation,
    LayerCosts,
    Link,
    RequestError,
    collective_time,
)
from zbpp.core.costs.layers import PerLayer
from zbpp.planning.data_parallel import Shard, gathers_in_passes

__all__ = [
    "Network",
    "check_parameters",
    "divided",
    "network_of",
    "on_replicas",
    "whole_for_a_while",
    "with_replicas",
]


@dataclass(frozen=True)
class Network:
    """Links among the replicas of a stage, in bytes and the unit of time of the layers.

    Args:
        link: between two devices.
        node: devices that share a faster link.
        node_link: that one; None: all links are alike.
    """

    link: Link
    node: int = 1
    node_link: Link | None = None

    def time(self, operation: CollectiveOperation, n_bytes: float, n: int) -> float:
        """Time of a collective of n replicas; those of a node come in whole nodes."""
        node = self.node if n % self.node == 0 or n < self.node else 1
        return collective_time(
            *(operation, n_bytes, n, self.link),
            node=node,
            node_link=None if node == 1 else self.node_link,
        )


def network_of(layers: LayerCosts) -> Network | None:
    """Take links among replicas from the layers, or those of their messages.

    None if neither has a bandwidth.
    """
    if layers.replica_bandwidth is not None:
        return Network(Link(layers.replica_delay, layers.replica_bandwidth))
    band, delay = layers.bandwidth, layers.delay
    if band is None:
        return None
    slowest = min(band) if isinstance(band, tuple) else band
    longest = max(delay, default=0.0) if isinstance(delay, tuple) else delay
    return Network(Link(longest, slowest))


def with_replicas(layers: LayerCosts, n: int, shard: Shard) -> LayerCosts:
    """`on_replicas` with what the layers themselves tell; times that are given stay.

    Layers that tell no parameters, or no bandwidth, stay as they are.
    """
    if n == 1:
        return layers
    if any(layers.of("all_gather")) or any(layers.of("reduce_scatter")):
        return _gathering(layers) if gathers_in_passes(n, shard) else layers
    network = network_of(layers)
    if network is None or not any(layers.of("parameters")):
        return layers
    return on_replicas(layers, n, network, shard)


def on_replicas(
    layers: LayerCosts, n: int, network: Network, shard: Shard
) -> LayerCosts:
    """Costs of layers on n replicas: times of collectives, and what each replica holds.

    Of ``m_fixed`` there are parameters and as much of gradients; the rest, optimizer
    state as a rule, has parts as they have. What a step holds whole for most of its
    time counts whole; `whole_for_a_while` is the rest.
    """
    if n == 1:
        return layers
    sizes, fixed = layers.of("parameters"), layers.of("m_fixed")
    in_parts = shard != "none"
    reduce = CollectiveOperation.ALL_REDUCE
    if in_parts:
        reduce = CollectiveOperation.REDUCE_SCATTER
    gather = CollectiveOperation.ALL_GATHER
    whole = {"optimizer": 2, "gradients": 1}.get(shard, 0)  # gradients, parameters
    costs = replace(
        layers, reduce_scatter=tuple(network.time(reduce, one, n) for one in sizes)
    )
    if not in_parts:
        return costs
    costs = replace(
        costs,
        m_fixed=tuple(
            (both - (whole == 2) * size) / n + whole * size
            for size, both in zip(sizes, fixed, strict=True)
        ),
        optimizer=divided(layers.optimizer, n),
    )
    costs = replace(
        costs, all_gather=tuple(network.time(gather, one, n) for one in sizes)
    )
    return _gathering(costs) if gathers_in_passes(n, shard) else costs


def _gathering(layers: LayerCosts) -> LayerCosts:
    """Layers whose F and B gather, and take longer for it: no UNSHARD does."""
    f, b = (
        tuple(map(add, layers.of(name), layers.of("all_gather"))) for name in ("f", "b")
    )
    return replace(layers, f=f, b=b, all_gather=0.0)


def whole_for_a_while(
    layers: LayerCosts, split: Sequence[int], n: int, shard: Shard
) -> float:
    """Memory of what is whole from a W to its sum's end, or inside a pass.

    The gradients of the largest chunk, where they are summed after every W, and the
    largest layer's parameters, where passes gather them.
    """
    if n == 1 or shard not in ("gradients", "parameters"):
        return 0.0
    sizes = layers.of("parameters")
    each = iter(sizes)
    chunk = max(sum(next(each) for _ in range(count)) for count in split)
    layer = max(sizes) if shard == "parameters" else 0.0
    return chunk * (1 - 1 / n) + layer


def divided(value: PerLayer, n: int) -> PerLayer:
    """Return the share of each of n devices."""
    return tuple(v / n for v in value) if isinstance(value, tuple) else value / n


def check_parameters(layers: LayerCosts) -> None:
    """Refuse layers that do not tell their parameters.

    Raises:
        RequestError: it says where they come from.
    """
    if not any(layers.of("parameters")):
        raise RequestError(
            "the costs of the layers do not say how large their parameters are, which "
            "replicas exchange; give --parameters, the memory of all of them, or add "
            "'parameters' (a number for every layer, or a list) to the layers file, as "
            "`zbpp estimate --layers_out` writes it"
        )
