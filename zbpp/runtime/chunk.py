"""A chunk: consecutive layers of the model, the part that one stage runs as a whole."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from zbpp.runtime.error_notes import note_layer

OwnName = Callable[[int, str], str]
"""From a layer's index and a name in it to the model's name."""


def layer_name(layer: int, name: str) -> str:
    """Name of a parameter or buffer where the model has no name for it."""
    return f"layers.{layer}.{name}"


@dataclass(frozen=True)
class Chunk:
    """Consecutive layers of the model; ``first`` is the global index of the first."""

    index: int
    first: int
    layers: tuple[nn.Module, ...]
    calls: Mapping[int, Callable[[object], object]] = field(default_factory=dict)
    """By layer, what runs its forward where that is not the module itself."""
    shards: Mapping[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    """By leaf that is gathered for forwards, the part of this process, for steps."""
    widen: Callable[[], None] | None = None
    """Adds gradients of fewer bits to their sums; None: all have those of sums."""
    own_name: OwnName = layer_name

    def leaves_once(self) -> Iterator[nn.Parameter]:
        """Every leaf of the forwards' graphs, once."""
        return iter(dict.fromkeys(p for *_, p in self.all_leaves()))

    def all_stepped(self) -> Iterator[tuple[int, str, nn.Parameter]]:
        """Layer, the model's name and parameter, as the optimizer has it."""
        for index, name, leaf in self.all_leaves():
            yield index, name, self.shards.get(leaf, leaf)

    def all_leaves(self) -> Iterator[tuple[int, str, nn.Parameter]]:
        """Layer, the model's name and parameter, as the forwards use it."""
        gathered = {shard: leaf for leaf, shard in self.shards.items()}
        for index, layer in self.numbered():
            for name, p in layer.named_parameters():
                yield index, self.own_name(index, name), gathered.get(p, p)

    def name_of(self, index: int) -> str:
        """The model's name of a layer."""
        name = self.own_name(index, ".").rstrip(".")
        is_unnamed = not name or name.isdigit()
        return f"layers.{index}" if is_unnamed else name

    def title(self, index: int) -> str:
        """A layer's name and index, for errors."""
        return f"{self.name_of(index)} (layer {index})"

    @property
    def indices(self) -> range:
        """Global indices of the layers."""
        return range(self.first, self.first + len(self.layers))

    def numbered(self) -> Iterator[tuple[int, nn.Module]]:
        """Global index and layer."""
        return enumerate(self.layers, start=self.first)

    @cached_property
    def puts_out(self) -> str:
        """First words of an error about the chunk's output."""
        layers = self.indices
        return f"chunk {self.index} (layers {layers[0]} to {layers[-1]}) puts out"

    def call(self, index: int) -> Callable[[object], object]:
        """Return the function that runs a layer's forward."""
        return self.calls.get(index, self.layers[index - self.first])

    def run(
        self,
        value: object,
        instead: Mapping[int, Callable[[object], object]],
        before: Callable[[int], None] | None,
    ) -> object:
        """Run the layers; ``before`` is called with the index of each, before it runs.

        ``instead`` has what runs a layer's forward in this step, by layer.
        """
        for index, layer in enumerate(self.layers, start=self.first):
            if before is not None:
                before(index)
            try:
                value = (instead.get(index) or self.calls.get(index, layer))(value)
            except Exception as error:
                note_layer(error, self.title(index), value)
                raise
            # else casts of weights that no graph needs stay until the chunk ends
            torch.clear_autocast_cache()
        return value
