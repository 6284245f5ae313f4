"""Costs of layers whose stages have replicas: times of collectives, and memory."""

from dataclasses import dataclass, replace

from zbpp.core import (
    CollectiveOperation,
    LayerCosts,
    Link,
    RequestError,
    collective_time,
)
from zbpp.core.costs.layers import PerLayer
from zbpp.planning.data_parallel import Shard

__all__ = ["Network", "check_parameters", "on_replicas"]


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


def on_replicas(
    layers: LayerCosts, n: int, network: Network, shard: Shard
) -> LayerCosts:
    """Costs of layers on n replicas: times of collectives, and what each replica holds.

    Of ``m_fixed`` there are parameters and as much of gradients; the rest, optimizer
    state as a rule, is divided with the optimizer. Parameters and gradients that are
    divided count as whole where a step has them so most of its time.
    """
    if n == 1:
        return layers
    sizes, fixed = layers.of("parameters"), layers.of("m_fixed")
    divides = shard != "none"
    reduce = CollectiveOperation.REDUCE_SCATTER if divides else (
        CollectiveOperation.ALL_REDUCE
    )  # fmt: skip
    gather = CollectiveOperation.ALL_GATHER
    held = []
    for size, whole in zip(sizes, fixed, strict=True):
        rest = max(0.0, whole - 2 * size)
        parts = {
            "none": whole,
            "optimizer": 2 * size + rest / n,
            "gradients": size + (size + rest) / n,
            "parameters": 2 * size + (2 * size + rest) / n,
        }
        held.append(min(parts[shard], whole) if shard != "parameters" else parts[shard])
    return replace(
        layers,
        m_fixed=tuple(held),
        optimizer=_divided(layers.optimizer, n) if divides else layers.optimizer,
        all_gather=tuple(
            network.time(gather, one, n) if divides else 0 for one in sizes
        ),
        reduce_scatter=tuple(network.time(reduce, one, n) for one in sizes),
    )


def _divided(value: PerLayer, n: int) -> PerLayer:
    return tuple(v / n for v in value) if isinstance(value, tuple) else value / n


def check_parameters(layers: LayerCosts) -> None:
    """Refuse layers that do not tell their parameters.

    Raises:
        RequestError: it says where they come from.
    """
    if not any(layers.of("parameters")):
        raise RequestError(
            "the costs of the layers do not say how large their parameters are, which "
            "replicas exchange; add 'parameters' (a number for every layer, or a list) "
            "to the layers file, as `zbpp estimate --layers_out` writes it"
        )
