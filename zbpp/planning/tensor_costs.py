"""Costs of layers that several devices share: tensor parallelism.

    F   gather | attention / t | scatter  gather | feed-forward / t | scatter
    B   the same backwards
    W   nothing to exchange

A transformer block exchanges its activations twice in F and twice in B, an all-reduce
each time (Shoeybi et al., arXiv 1909.08053, section 3), or a gather and a scatter that
move as much and let the norms between them be shared too (sequence parallelism,
Korthikanti et al., arXiv 2205.05198, section 4.2). With the latter all that a layer
computes, keeps and hands on is divided by t.
"""

from dataclasses import replace
from typing import Any

from zbpp.core import CollectiveOperation, LayerCosts, RequestError
from zbpp.planning.replica_costs import Network, divided

__all__ = ["on_shared_layers", "replicas_network"]

_EXCHANGES = 2
"""All-reduces of a layer in F, and as many in B."""

_DIVIDED = (
    *("f", "b", "w", "optimizer", "loss", "validation"),
    *("m_b", "m_w", "m_fixed", "m_r", "message", "parameters"),
    *("peak_f", "peak_b", "peak_w", "peak_o", "peak_r"),
)


def on_shared_layers(layers: LayerCosts, n: int, network: Network) -> LayerCosts:
    """Costs of layers that are shared by n devices each.

    Args:
        layers: times and memories of whole ones. ``message`` tells how large the
            activations of a layer are, which its devices exchange.
        n: devices.
        network: among them; they are neighbours.

    Raises:
        RequestError: the layers do not tell their messages.
    """
    if n == 1:
        return layers
    sizes = _activations(layers)
    reduce = CollectiveOperation.ALL_REDUCE
    exchanged = [_EXCHANGES * network.time(reduce, size, n) for size in sizes]
    given = {name: getattr(layers, name) for name in _DIVIDED}
    parts: dict[str, Any] = {
        name: divided(value, n) for name, value in given.items() if value is not None
    }
    shared = replace(layers, **parts)
    f, b = (
        tuple(own + more for own, more in zip(shared.of(k), exchanged, strict=True))
        for k in ("f", "b")
    )
    return replace(shared, f=f, b=b)


def replicas_network(network: Network, n: int) -> Network:
    """Links among replicas whose layers are shared by n neighbours each.

    Of a node, so many times fewer devices belong to one group of replicas.
    """
    if network.node % n:
        return Network(network.link)
    return replace(network, node=network.node // n)


def _activations(layers: LayerCosts) -> tuple[float, ...]:
    """Bytes of the outputs of each layer; the last one's are as its inputs."""
    sizes = layers.message
    if not isinstance(sizes, tuple):
        sizes = (sizes,) * layers.n_layers
    else:
        sizes = (*sizes, *sizes[-1:])
    if not any(sizes):
        raise RequestError(
            "the costs of the layers do not say how large their activations are, which "
            "--tensor_parallel exchanges; add 'message' (bytes, a number for all "
            "layers, or a list) to the layers file, as `zbpp estimate --layers_out` "
            "writes it"
        )
    return sizes
