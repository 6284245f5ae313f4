"""The part of a model that a training on text needs to know."""

from typing import Any, Protocol

from torch import Tensor

__all__ = ["TextModel"]


class TextModel(Protocol):
    """A model whose tokens are bytes; its weights are not made before they are needed.

    The first layer is the embedding, the last one the head; between them are blocks.
    """

    @property
    def n_layers(self) -> int:
        """Layers, with embedding and head."""

    @property
    def n_blocks(self) -> int:
        """Layers between embedding and head, alike in work."""

    def given(self) -> dict[str, Any]:
        """Arguments of `zbpp.Pipeline` that say the model: layers, loss, dropout."""

    def batch(self, tokens: Tensor, following: Tensor) -> tuple[Any, Any]:
        """Inputs and targets of a step.

        Args:
            tokens: of shape (samples, seq).
            following: the token after each of them, of the same shape.
        """

    def about(self) -> dict[str, Any]:
        """The values that must be the same where a checkpoint of it is loaded."""
