"""Replicas of stages, and devices that share layers: collectives, times, memory.

========== ================================= =============== =====================
shard      whole for a while                 UNSHARD         REDUCE_GRAD
========== ================================= =============== =====================
none       everything, always                never           once (an all-reduce)
optimizer  parameters from a chunk's first F once a step     once a step
           to its last B, gradients to its
           last W
gradients  parameters as above; gradients    once a step     after every W
           from a W to the end of its sum
parameters a layer's parameters in a pass;   never: F and B  after every W
           gradients as above                gather
========== ================================= =============== =====================

Whatever is in parts otherwise: parameters, gradients and optimizer state (ZeRO 1 to 3).

Layers that t devices share exchange their activations (tensor parallelism):

    F   gather | attention / t | scatter  gather | feed-forward / t | scatter
    B   the same backwards
    W   nothing to exchange

A transformer block does so twice in F and twice in B, an all-reduce each time (Shoeybi
et al., arXiv 1909.08053, section 3), or a gather and a scatter that move as much and
let the norms between them be shared too (sequence parallelism, Korthikanti et al.,
arXiv 2205.05198, section 4.2). With the latter a layer's work, memory and messages are
divided by t.
"""

from dataclasses import dataclass, replace
from operator import add
from typing import Any, TypeVar

import numpy as np

from zbpp.core import (
    CollectiveOperation,
    Costs,
    LayerCosts,
    Link,
    RequestError,
    Schedule,
    collective_time,
)
from zbpp.core.columns import PerRow
from zbpp.core.reductions import Reduction, TopK, TwoLevel
from zbpp.core.replicas import SHARDS, Shard, reduces_every
from zbpp.schedules import add_collectives

_C = TypeVar("_C", Costs, LayerCosts)
_EXCHANGES = 2
"""All-reduces of a layer in F, and as many in B."""

_TIMES = ("f", "b", "w", "optimizer", "loss", "validation")
_MEMORIES = ("m_b", "m_w", "m_fixed", "m_r", "message", "parameters")
_PEAKS = ("peak_f", "peak_b", "peak_w", "peak_o")


def check_replicas(data_parallel: int, shard: str) -> None:
    """Refuse an invalid number of replicas, or state that they cannot shard."""
    if data_parallel < 1:
        raise RequestError(f"--data_parallel is {data_parallel}; it must be at least 1")
    if shard not in SHARDS:
        raise RequestError(f"--shard is {shard!r}; write one of {', '.join(SHARDS)}")
    if shard != "none" and data_parallel == 1:
        raise RequestError(
            f"--shard {shard} needs replicas to shard among; give --data_parallel, 2 "
            "or more"
        )


def replicated(schedule: Schedule, *, data_parallel: int, shard: str) -> Schedule:
    """Add the collectives of replicas; one alone leaves a schedule as it is."""
    check_replicas(data_parallel, shard)
    if data_parallel == 1:
        return schedule
    return add_collectives(
        schedule,
        shards=shard in ("optimizer", "gradients"),  # gathered once a step, by a job
        reduces="every" if reduces_every(shard) else "last",
    )


def gathers_in_passes(data_parallel: int, shard: str) -> bool:
    """True if F and B gather parameters themselves, instead of an UNSHARD."""
    return data_parallel > 1 and shard == "parameters"


@dataclass(frozen=True)
class Network:
    """Links among the replicas of a stage, in bytes and the unit of time of the layers.

    Args:
        link: between two devices.
        node: devices that share a faster link.
        node_link: the link inside a node; None: all links are equal.
    """

    link: Link
    node: int = 1
    node_link: Link | None = None

    def time(self, operation: CollectiveOperation, n_bytes: float, n: int) -> float:
        """Time of a collective of n replicas; those of a node come in whole nodes."""
        node = self.node if n % self.node == 0 or n < self.node else 1
        return collective_time(
            operation,
            n_bytes,
            n,
            self.link,
            node=node,
            node_link=None if node == 1 else self.node_link,
        )

    def sum_time(self, reduction: Reduction, n_bytes: float, n: int) -> float:
        """Time to sum gradients of n replicas; one level knows nothing of nodes."""
        if isinstance(reduction, TopK):  # places take 4 bytes
            n_bytes *= n * reduction.share * (reduction.number_bytes + 4) / 4
            return self.time(CollectiveOperation.ALL_GATHER, n_bytes, n)
        n_bytes *= reduction.number_bytes / 4
        at_once = isinstance(reduction, TwoLevel) or n <= self.node
        network = self if at_once else Network(self.link)
        return network.time(CollectiveOperation.ALL_REDUCE, n_bytes, n)

    def among(self, n: int) -> "Network":
        """Links among replicas whose layers are shared by n neighbours each.

        Of a node, so many times fewer devices belong to one group of replicas.
        """
        if self.node % n:
            return Network(self.link)
        return replace(self, node=self.node // n)


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
    """`on_replicas` with the links of the layers; times in the costs stay.

    Layers that tell no parameters, or no bandwidth, stay as they are.
    """
    if n == 1:
        return layers
    if np.any(layers.all_gather) or np.any(layers.reduce_scatter):
        return gathering(layers) if gathers_in_passes(n, shard) else layers
    network = network_of(layers)
    if network is None or not any(layers.of("parameters")):
        return layers
    return on_replicas(layers, n, network, shard)


def on_replicas(
    layers: LayerCosts, n: int, network: Network, shard: Shard
) -> LayerCosts:
    """Costs of layers on n replicas: times of collectives, and memory of each replica.

    Of ``m_fixed`` there are parameters and as much of gradients; the rest, optimizer
    state as a rule, has parts as they have. What is gathered for most of a step
    counts whole; ``whole_gradients`` and ``whole_parameters`` are the rest.
    """
    if n == 1:
        return layers
    sizes, fixed = layers.of("parameters"), layers.of("m_fixed")

    def times(operation: CollectiveOperation) -> tuple[float, ...]:
        return tuple(network.time(operation, size, n) for size in sizes)

    if shard == "none":
        return replace(layers, reduce_scatter=times(CollectiveOperation.ALL_REDUCE))
    whole = {"optimizer": 2, "gradients": 1}.get(shard, 0)  # gradients, parameters
    costs = replace(
        layers,
        reduce_scatter=times(CollectiveOperation.REDUCE_SCATTER),
        all_gather=times(CollectiveOperation.ALL_GATHER),
        m_fixed=tuple(
            (both - (whole == 2) * size) / n + whole * size
            for size, both in zip(sizes, fixed, strict=True)
        ),
        whole_gradients=tuple(
            reduces_every(shard) * size * (1 - 1 / n) for size in sizes
        ),
        whole_parameters=sizes if gathers_in_passes(n, shard) else 0.0,
        optimizer=_divided_by(layers.optimizer, n),
    )
    return gathering(costs) if gathers_in_passes(n, shard) else costs


def gathering(costs: _C) -> _C:
    """Costs whose F and B gather, and take longer for it: no UNSHARD does."""
    if not np.any(costs.all_gather):
        return costs
    _check_whole(costs, "--shard parameters gathers inside of passes")
    f, b, gather = (
        costs.of(name) if isinstance(costs, LayerCosts) else getattr(costs, name)
        for name in ("f", "b", "all_gather")
    )
    if not np.shape(f) == np.shape(b) == np.shape(gather):
        raise RequestError(
            "--shard parameters adds all_gather to f and b; give each of the three as "
            "one number, or each as a list"
        )
    f, b = np.add((f, b), gather).tolist()
    return replace(costs, f=f, b=b, all_gather=0.0)


def _check_whole(costs: Costs | LayerCosts, why: str) -> None:
    """Refuse costs with parts."""
    if costs.parts is not None:
        raise RequestError(
            f"the costs have parts, and {why}, at places that no part tells; leave the "
            "key 'parts' out of the file"
        )


def _divided_by(value: PerRow, n: int) -> PerRow:
    """Return the share of each of n devices."""
    return tuple(v / n for v in value) if isinstance(value, tuple) else value / n


def check_parameters(layers: LayerCosts) -> None:
    """Refuse layers that do not tell their parameters."""
    if not any(layers.of("parameters")):
        raise RequestError(
            "the costs of the layers lack the memory of their parameters, which "
            "replicas exchange; give --parameters, the memory of all of them, or add "
            "'parameters' (a number for every layer, or a list) to the layers file, as "
            "`zbpp estimate --layers_out` writes it"
        )


def on_shared_layers(layers: LayerCosts, n: int, network: Network) -> LayerCosts:
    """Costs of layers that are shared by n devices each."""
    if n == 1:
        return layers
    _check_whole(layers, "devices that share one exchange in its passes")
    sizes = _activations(layers)
    reduce = CollectiveOperation.ALL_REDUCE
    exchanged = [_EXCHANGES * network.time(reduce, size, n) for size in sizes]
    parts: dict[str, Any] = {
        name: _divided_by(value, n)
        for name in _TIMES + _MEMORIES + _PEAKS
        if (value := getattr(layers, name)) is not None
    }
    shared = replace(layers, **parts)
    f, b = (tuple(map(add, shared.of(k), exchanged)) for k in ("f", "b"))
    return replace(shared, f=f, b=b)


def _activations(layers: LayerCosts) -> tuple[float, ...]:
    """Bytes of the outputs of each layer; the last one's are as its inputs."""
    sizes = layers.message
    if not isinstance(sizes, tuple):
        sizes = (sizes,) * layers.n_layers
    else:
        sizes = (*sizes, *sizes[-1:])
    if not any(sizes):
        raise RequestError(
            "the costs of the layers lack the size of their activations, which "
            "--tensor_parallel exchanges; add 'message' (bytes, a number for all "
            "layers, or a list) to the layers file, as `zbpp estimate --layers_out` "
            "writes it"
        )
    return sizes
