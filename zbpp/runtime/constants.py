"""Tensors that a chunk hands on as it got them; `comm.passthrough` tells why.

A chunk hands a tensor on if it puts out the very object that it was given, needs no
gradient for it and has not written to it. So a mask travels as far as the layers hand
it on, and no further.
"""

from collections.abc import Sequence

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
    origins_in,
)

__all__ = ["GivenConstants"]


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
