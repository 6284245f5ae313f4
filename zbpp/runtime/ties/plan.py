"""The stages that hold each tied parameter, and what they compare."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from zbpp.core import Placement, RequestError
from zbpp.runtime.chunk import OwnName, layer_name

__all__ = ["NO_TIES", "Tie", "TiePlan", "check_ties", "first_names"]

Tie = tuple[tuple[int, str], ...]
"""One parameter in several layers: (global index of the layer, name in the layer)."""


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


def first_names(ties: Sequence[Tie]) -> dict[str, str]:
    """Give for each later name of a tied parameter its first one.

    A checkpoint saves the first, and loads all from it.

    >>> first_names([((0, "weight"), (5, "head.weight"))])
    {'layers.5.head.weight': 'layers.0.weight'}
    """
    return {
        f"layers.{layer}.{name}": f"layers.{tie[0][0]}.{tie[0][1]}"
        for tie in ties
        for layer, name in tie[1:]
    }


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

    @cached_property
    def slots(self) -> dict[tuple[int, int], int]:
        """Place of a number that a stage tells of its copy, by (tie, stage).

        Ties of one stage alone have none.
        """
        pairs = [
            (tie, stage)
            for tie in range(len(self.ties))
            for stage in self.stages(tie)
            if len(self.stages(tie)) > 1
        ]
        return {pair: place for place, pair in enumerate(pairs)}

    def name(self, tie: int) -> str:
        """Name a tie for a message to the user."""
        return " = ".join(self.own_name(*place) for place in self.ties[tie])

    def compare(self, numbers: Sequence[float]) -> str | None:
        """Say which copies differ by what their stages have told, None if none do."""
        told: dict[int, dict[int, float]] = {}
        for (tie, stage), place in self.slots.items():
            told.setdefault(tie, {})[stage] = numbers[place]
        for tie, by_stage in told.items():
            if len(set(by_stage.values())) > 1:
                return (
                    f"the copies of the tied parameter {self.name(tie)} on the stages "
                    f"{sorted(by_stage)} were no longer equal when the step began: "
                    "load, change and step all of them alike (same learning rate, same "
                    "options), or none"
                )
        return None


NO_TIES = TiePlan((), (), Placement((0,)))
"""The plan of a model whose layers share no parameter."""
