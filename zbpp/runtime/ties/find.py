"""Find parameters that layers share; of a builder, those that one process holds."""

from collections.abc import Iterable, Sequence

from torch import nn

from zbpp.core import RequestError
from zbpp.runtime.ties.plan import Tie

__all__ = ["find_ties", "refuse_sharing"]


def find_ties(layers: Sequence[nn.Module]) -> tuple[Tie, ...]:
    """Find parameters that are one object in several layers.

    >>> layers = [nn.Embedding(5, 3), nn.Linear(3, 5)]
    >>> layers[1].weight = layers[0].weight
    >>> find_ties(layers)
    (((0, 'weight'), (1, 'weight')),)
    """
    homes: dict[nn.Parameter, list[tuple[int, str]]] = {}
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            homes.setdefault(parameter, []).append((index, name))
    return tuple(tuple(home) for home in homes.values() if len(home) > 1)


def refuse_sharing(layers: Iterable[tuple[int, int, nn.Module]]) -> None:
    """Refuse a parameter in two chunks: it would be trained twice, and drift apart.

    Args:
        layers: chunk, global index and layer.

    Raises:
        RequestError: names both layers and parameters.
    """
    home: dict[nn.Parameter, tuple[int, int, str]] = {}
    for chunk, index, layer in layers:
        for name, parameter in layer.named_parameters():
            other, at, its = home.setdefault(parameter, (chunk, index, name))
            if other != chunk:
                raise RequestError(
                    f"layers {at} and {index} share a parameter ({its} is {name}) but "
                    f"lie in chunks {other} and {chunk}; name the parameter in "
                    "zbpp.layers_from(..., ties=...), "
                    "put them into one chunk by split=..., or untie them"
                )
