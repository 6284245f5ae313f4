"""Tensors that chunks hand on as they got them: a stage gets each of them once.

    V, 2 stages    chunk 0 --mask--> chunk 1 -> chunk 2 --------> chunk 3
                   stage 0           stage 1    stage 1           stage 0

Masks, position ids and other parts of the batch need no gradient and go through many
chunks unchanged. The stage of chunk 3 has had the mask when it ran chunk 0: the message
omits it, and the receiver puts its own copy in. Both ends know so without a word: what
chunk c has put out and chunk d hands on went through the chunks between them.

A chunk hands a constant on if it puts out the very object that it was given, and has
not written to it. So it travels as far as the layers hand it on, and no further.
"""

from collections.abc import Collection, Sequence

from torch import Tensor

from zbpp.core import RequestError
from zbpp.runtime.chunk import Chunk
from zbpp.runtime.support.marks import Mark, mark
from zbpp.runtime.values import (
    Nested,
    Origin,
    Tensors,
    UnfitValueError,
    as_tensors,
    filled,
    omitted,
    origins_in,
)

__all__ = ["Constants", "GivenConstants", "without_constants"]


class GivenConstants:
    """The inputs of one forward that need no gradient, as they were before it.

    Args:
        chunk: whose forward it is.
        inputs: the objects that its first layer is given.
    """

    def __init__(self, chunk: Chunk, inputs: Tensors) -> None:
        origins: Sequence[Origin | None] = (None,) * len(inputs)
        if isinstance(inputs, Nested):
            origins = origins_in(inputs.structure)
        self._chunk = chunk
        self._given: list[tuple[Tensor, Mark, Origin]] = [
            (x, mark(x), origin or (chunk.index - 1, place))
            for place, (x, origin) in enumerate(zip(inputs, origins, strict=True))
            if not x.requires_grad
        ]

    def flatten(self, value: object) -> Tensors:
        """Return an output as it travels, with the origins of what it hands on.

        Raises:
            RequestError: it cannot travel.
        """
        unchanged = {
            id(x): origin
            for x, before, origin in self._given
            if before is not None and mark(x) == before
        }
        try:
            return as_tensors(value, unchanged)
        except UnfitValueError as error:
            first, n = self._chunk.first, len(self._chunk.layers)
            raise RequestError(
                f"chunk {self._chunk.index} (layers {first} to {first + n - 1}) puts "
                f"out {error}"
            ) from None


class Constants:
    """The constants that one stage has handed on, while it can be asked for them.

    Args:
        chunks: of the stage.
    """

    def __init__(self, chunks: Collection[int]) -> None:
        self._last = max(chunks, default=0)
        self.kept: dict[int, dict[Origin, Tensor]] = {}
        """By micro-batch."""

    def begin(self) -> None:
        """Forget all: no forward has run."""
        self.kept.clear()

    def ran(self, chunk: int, microbatch: int, outputs: Tensors) -> None:
        """Keep what a chunk has handed on for the stage's later ones."""
        if chunk == self._last:
            self.kept.pop(microbatch, None)
        elif isinstance(outputs, Nested):
            for tensor, origin in zip(
                outputs, origins_in(outputs.structure), strict=True
            ):
                if origin is not None:
                    self.kept.setdefault(microbatch, {})[origin] = tensor

    def fill(self, tensors: Nested, microbatch: int) -> Nested:
        """Put what a message has omitted into a value."""
        return filled(tensors, self.kept.get(microbatch, {}))


def without_constants(
    tensors: Nested, chunk: int, peer: int, stage_of: Sequence[int]
) -> Nested:
    """Return what a chunk puts out without what the receiving stage has had.

    Args:
        tensors: the value.
        chunk: whose output it is.
        peer: the stage that receives it.
        stage_of: stage of every chunk.
    """
    return omitted(tensors, lambda origin: peer in stage_of[origin[0] + 1 : chunk + 1])
