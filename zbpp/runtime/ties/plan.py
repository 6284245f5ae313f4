"""Parameters that layers share, and the stages that hold them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from zbpp.core import Placement, RequestError
from zbpp.runtime.chunk import OwnName, layer_name

__all__ = ["NO_TIES", "Tie", "TiePlan", "check_ties", "find_ties", "refuse_sharing"]

Tie = tuple[tuple[int, str], ...]
"""One parameter in several layers: (global index of the layer, name in the layer)."""


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
            first = home.setdefault(parameter, (chunk, index, name))
            if first[0] != chunk:
                raise RequestError(
                    f"layers {first[1]} and {index} share a parameter ({first[2]} is "
                    f"{name}) but lie in chunks {first[0]} and {chunk}; name the "
                    "parameter in zbpp.layers_from(..., ties=...), put them into one "
                    "chunk by split=..., or untie them"
                )


def check_ties(ties: Iterable[Tie], n_layers: int) -> tuple[Tie, ...]:
    """Return ties in layer order.

    Raises:
        RequestError: a layer stands twice in a tie, or does not exist; a parameter
            stands in two ties.
    """
    in_order = sorted({tuple(sorted(tie)) for tie in ties})
    seen: set[tuple[int, str]] = set()
    for tie in in_order:
        layers = [layer for layer, _ in tie]
        if len(set(layers)) < max(2, len(layers)) or seen & set(tie):
            raise RequestError(
                f"the tie {tie} must name the parameter once in each layer that "
                "holds it, two layers or more, and in no other tie"
            )
        if not all(0 <= layer < n_layers for layer in layers):
            raise RequestError(
                f"the tie {tie} names a layer that is not one of the "
                f"{n_layers} layers, 0 to {n_layers - 1}"
            )
        seen |= set(tie)
    return tuple(in_order)


@dataclass(frozen=True)
class TiePlan:
    """Ties of a model that is cut into chunks; the same in all processes.

    Args:
        ties: in layer order, see `check_ties`.
        ranges: layers of each chunk.
        placement: of the chunks.
        own_name: gives parameters the names that users see.
    """

    ties: tuple[Tie, ...]
    ranges: tuple[range, ...]
    placement: Placement
    own_name: OwnName = layer_name

    @cached_property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """Of each tie the chunks that hold it, in order, each once."""
        return tuple(
            tuple(dict.fromkeys(self.chunk_of(layer) for layer, _ in tie))
            for tie in self.ties
        )

    def chunk_of(self, layer: int) -> int:
        """Return the chunk that a layer lies in."""
        return next(c for c, layers in enumerate(self.ranges) if layer in layers)

    def stages(self, tie: int) -> tuple[int, ...]:
        """List the stages that hold a tie; that of the first layer is the first."""
        stage_of = self.placement.stage_of
        return tuple(dict.fromkeys(stage_of[c] for c in self.chunks[tie]))

    def name(self, tie: int) -> str:
        """Name a tie for a message to the user."""
        return " = ".join(self.own_name(*place) for place in self.ties[tie])


NO_TIES = TiePlan((), (), Placement((0,)))
"""The plan of a model whose layers share no parameter."""
