"""Outputs of modules inside blocks that join the model's loss, as a router's logits.

A model of transformers gathers them by hooks on all modules of a class. A block's layer
has hooks of its own that note them; in the last layer stand-ins of the same class put
them out once more, so that the model's own hooks, and its own loss, find them.
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

__all__ = ["Collected", "Collector", "Notes"]

Collected = tuple[tuple[Tensor, ...], ...]
"""By block, then by module in the order of calls."""


@dataclass(eq=False)
class Notes:
    """Outputs noted in one forward; a hook that can be copied and pickled."""

    index: int
    outputs: list[Tensor] = field(default_factory=list)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note one output."""
        self.outputs.append(output[self.index] if isinstance(output, tuple) else output)

    def take(self) -> tuple[Tensor, ...]:
        """Notes so far, which are then forgotten."""
        outputs, self.outputs = tuple(self.outputs), []
        return outputs


@dataclass(frozen=True)
class Collector:
    """Notes outputs in blocks, and puts them out again.

    Args:
        kind: class of the modules.
        index: of what is gathered, in their output if that is a tuple.
    """

    kind: type[nn.Module]
    index: int

    def listen(self, block: nn.Module) -> "Notes":
        """Note outputs in each forward of a block from now on."""
        notes = Notes(self.index)
        for module in block.modules():
            if isinstance(module, self.kind):
                module.register_forward_hook(notes)
        return notes

    def add_to(self, slot: nn.Module, n: int) -> None:
        """Give a block's stand-in modules of the class, before hooks are set."""
        for number in range(n):
            replayed: nn.Module = object.__new__(_replaying(self.kind))
            nn.Module.__init__(replayed)
            slot.add_module(f"recorded{number}", replayed)

    def replay(self, slot: nn.Module, outputs: tuple[Tensor, ...]) -> None:
        """Put out what the block's modules did."""
        modules = [m for m in slot._modules.values() if isinstance(m, self.kind)]
        for module, output in zip(modules, outputs, strict=True):
            module((*[None] * self.index, output))


def _replaying(kind: type[nn.Module]) -> type[nn.Module]:
    """A class of the same kind that puts out what it is given."""
    return type(f"Replayed{kind.__name__}", (kind,), {"forward": _given})


def _given(self: nn.Module, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return outputs
