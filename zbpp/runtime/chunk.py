"""A chunk: consecutive layers of the model, the part that one stage runs as a whole."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

__all__ = ["Chunk"]


@dataclass(frozen=True)
class Chunk:
    """Consecutive layers of the model; ``first`` is the global index of the first."""

    index: int
    first: int
    layers: tuple[nn.Module, ...]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Every parameter once."""
        return nn.ModuleList(self.layers).parameters()

    def numbered(self) -> Iterator[tuple[int, nn.Module]]:
        """Global index and layer."""
        return enumerate(self.layers, start=self.first)
