"""Parameters that layers share, and the stages that use them."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from zbpp.core import Placement, RequestError
from zbpp.runtime.chunk import OwnName, layer_name
from zbpp.runtime.support.sharded import own_shard

Tie = tuple[tuple[int, str], ...]
"""One parameter in several layers: (global index of the layer, name in the layer)."""


def numbers_of(parameter: nn.Parameter) -> Hashable:
    """Equal for parameters that are the same numbers in one memory.

    Another pipeline that trains the model has left such parameters in the layers.
    """
    part = own_shard(parameter)
    if nn.parameter.is_lazy(part) or part.layout is not torch.strided:
        return id(parameter)
    memory = part.untyped_storage()._cdata, part.storage_offset()
    return *memory, part.dtype, part.shape, part.stride()


def find_ties(layers: Sequence[nn.Module]) -> tuple[Tie, ...]:
    """Find parameters that several layers share.

    >>> layers = [nn.Embedding(5, 3), nn.Linear(3, 5)]
    >>> layers[1].weight = layers[0].weight
    >>> find_ties(layers)
    (((0, 'weight'), (1, 'weight')),)
    """
    places: dict[Hashable, dict[int, str]] = {}
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            places.setdefault(numbers_of(parameter), {}).setdefault(index, name)
    return tuple(tuple(tie.items()) for tie in places.values() if len(tie) > 1)


def check_ties(ties: Iterable[Tie], n_layers: int) -> tuple[Tie, ...]:
    """Return ties in layer order; refuse a layer or a parameter that is there twice."""
    in_order = sorted({tuple(sorted(tie)) for tie in ties})
    seen: set[tuple[int, str]] = set()
    for tie in in_order:
        layers = [layer for layer, _ in tie]
        if len(set(layers)) < max(2, len(layers)) or seen & set(tie):
            raise RequestError(
                f"the tie {tie} must name the parameter once in each layer that "
                "uses it, two layers or more, and in no other tie"
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
    """Ties of a model that is cut into chunks of ``ranges`` of layers."""

    ties: tuple[Tie, ...]
    ranges: tuple[range, ...]
    placement: Placement
    own_name: OwnName = field(default=layer_name, repr=False)

    @cached_property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """The chunks of each tie, in order, each once."""
        return tuple(
            tuple(dict.fromkeys(self.chunk_of(layer) for layer, _ in tie))
            for tie in self.ties
        )

    def chunk_of(self, layer: int) -> int:
        """Return the chunk that a layer lies in."""
        return next(c for c, layers in enumerate(self.ranges) if layer in layers)

    def stage_of(self, layer: int) -> int:
        """Return the stage that a layer lies on."""
        return self.placement.stage_of[self.chunk_of(layer)]

    def stages(self, tie: int) -> tuple[int, ...]:
        """List the stages of a tie; that of the first layer is the first."""
        return tuple(dict.fromkeys(self.stage_of(layer) for layer, _ in self.ties[tie]))

    def name(self, tie: int) -> str:
        """Name a tie for a message to the user."""
        return " = ".join(self.own_name(*place) for place in self.ties[tie])


NO_TIES = TiePlan((), (), Placement((0,)))
"""The plan of a model whose layers share no parameter."""
