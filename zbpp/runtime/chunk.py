"""A chunk: consecutive layers of the model, the part that one stage runs as a whole."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from zbpp.runtime.backward.split import memory_of
from zbpp.runtime.error_notes import note_layer

__all__ = ["Chunk", "OwnName", "layer_name"]

OwnName = Callable[[int, str], str]
"""From a layer's index and a name in it to the model's own name."""


def layer_name(layer: int, name: str) -> str:
    """Name of a parameter or buffer where the model has no name of its own for it."""
    return f"layers.{layer}.{name}"


@dataclass(frozen=True)
class Chunk:
    """Consecutive layers of the model; ``first`` is the global index of the first.

    Args:
        index: of the chunk.
        first: global index of its first layer.
        layers: the modules.
        calls: by layer, what runs its forward where that is not the module itself.
        shards: of leaves that are gathered for the forwards, the parameter with this
            process's part, which is stepped.
        widen: adds gradients of fewer bits to their sums; None: all have those of sums.
        own_name: gives parameters the names that users see.
    """

    index: int
    first: int
    layers: tuple[nn.Module, ...]
    calls: Mapping[int, Callable[[object], object]] = field(default_factory=dict)
    shards: Mapping[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    widen: Callable[[], None] | None = None
    own_name: OwnName = layer_name

    def gathered(self) -> frozenset[int]:
        """The memory that parameters are gathered into, as `memory_of` tells it."""
        return frozenset(map(memory_of, self.shards))

    def leaves_once(self) -> Iterator[nn.Parameter]:
        """Every leaf of the forwards' graphs, once."""
        return iter(dict.fromkeys(p for *_, p in self.all_leaves()))

    def parameters(self) -> Iterator[nn.Parameter]:
        """Every parameter that is stepped, once."""
        return iter(dict.fromkeys(p for *_, p in self.all_stepped()))

    def all_stepped(self) -> Iterator[tuple[int, str, nn.Parameter]]:
        """Layer, the model's own name and parameter, as the optimizer has it."""
        for index, name, leaf in self.all_leaves():
            yield index, name, self.shards.get(leaf, leaf)

    def all_leaves(self) -> Iterator[tuple[int, str, nn.Parameter]]:
        """Layer, the model's own name and parameter, as the forwards use it."""
        for index, _ in self.numbered():
            yield from ((index, *pair) for pair in self.named_leaves(index))

    def named_leaves(self, index: int) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's own names and parameters of a layer, as its forwards use them."""
        layer = self.layers[index - self.first]
        for name, p in layer.named_parameters():
            yield self.own_name(index, name), self._gathered.get(p, p)

    def name_of(self, index: int) -> str:
        """The model's own name of a layer."""
        name = self.own_name(index, ".").rstrip(".")
        is_unnamed = not name or name.isdigit()
        return f"layers.{index}" if is_unnamed else name

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
        return (
            f"chunk {self.index} (layers {self.indices[0]} to {self.indices[-1]}) puts "
            "out"
        )

    @cached_property
    def _gathered(self) -> Mapping[nn.Parameter, nn.Parameter]:
        return {shard: leaf for leaf, shard in self.shards.items()}

    def call(self, index: int) -> Callable[[object], object]:
        """Return what runs a layer's forward."""
        return self.calls.get(index, self.layers[index - self.first])

    def run(
        self,
        value: object,
        instead: Mapping[int, Callable[[object], object]],
        before: Callable[[int], None] | None,
    ) -> object:
        """Run the layers.

        Args:
            value: what the first one reads.
            instead: what runs a layer's forward in this step, by layer.
            before: called with each layer, before it runs.
        """
        for index, layer in enumerate(self.layers, start=self.first):
            if before is not None:
                before(index)
            try:
                value = (instead.get(index) or self.calls.get(index, layer))(value)
            except Exception as error:
                note_layer(error, f"{self.name_of(index)} (layer {index})", value)
                raise
        return value
