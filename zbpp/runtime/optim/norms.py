"""One stage's gradients: their norms by layer, and where one is first not finite."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from zbpp.runtime.stage import Stage

__all__ = ["NonFiniteFinder", "multiply_gradients", "parameter_names", "squared_norms"]


def squared_norms(stage: Stage) -> Iterable[tuple[int, Tensor]]:
    """Squared gradient norm per layer, float64; a shared parameter counts once."""
    seen: set[nn.Parameter] = set()
    for index, layer in stage.numbered():
        own = [p for p in layer.parameters() if p not in seen]
        seen.update(own)
        squares = [
            torch.linalg.vector_norm(p.grad, dtype=torch.float64).square()
            for p in own
            if p.grad is not None
        ]
        if squares:
            yield index, torch.stack(squares).sum()


def multiply_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply all gradients that there are, in place; nothing is done for 1."""
    for p in parameters if factor != 1.0 else ():
        if p.grad is not None:
            p.grad.mul_(factor)


def parameter_names(stage: Stage) -> dict[int, list[str]]:
    """Global names of the parameters of each layer, in the layer's order."""
    return {
        index: [name for name, _ in layer.named_parameters(prefix=f"layers.{index}")]
        for index, layer in stage.numbered()
    }


class NonFiniteFinder:
    """Looks at a chunk's gradients whenever a micro-batch has been added to them.

    What it finds of a layer is one number, so that it can travel with the sums:
    0 for nothing, else 1 + its parameter's place + the micro-batch times `STRIDE`.

    Args:
        stage: the one to watch in the step that begins now.
    """

    STRIDE = 2**20

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.found: dict[int, int] = {}
        stage.watch_gradients(self._look)

    def _look(self, chunk_index: int, microbatch: int) -> None:
        for index, layer in self._stage.chunks[chunk_index].numbered():
            if index in self.found:
                continue
            for place, p in enumerate(layer.parameters()):
                if p.grad is not None and not bool(torch.isfinite(p.grad).all()):
                    self.found[index] = 1 + place + microbatch * self.STRIDE
                    break

    @classmethod
    def first(cls, notes: Tensor) -> tuple[int, int, int] | None:
        """Layer, place of the parameter and micro-batch of what was wrong first.

        The backward comes from the last layer, so among those of one micro-batch the
        last layer was first.
        """
        found = [
            (int(note - 1) // cls.STRIDE, -layer, int(note - 1) % cls.STRIDE)
            for layer, note in enumerate(notes.tolist())
            if note > 0
        ]
        if not found:
            return None
        microbatch, layer, place = min(found)
        return -layer, place, microbatch
