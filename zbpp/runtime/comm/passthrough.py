"""Tensors that chunks hand on as they got them: a stage gets each of them once.

    V, 2 stages    chunk 0 --mask--> chunk 1 -> chunk 2 --------> chunk 3
                   stage 0           stage 1    stage 1           stage 0

Masks, position ids and other parts of the batch need no gradient and go through many
chunks unchanged. The stage of chunk 3 has had the mask when it ran chunk 0: the message
omits it, and the receiver puts its own copy in. Both ends know so without a word: what
chunk c has put out and chunk d hands on went through the chunks between them.
"""

from collections.abc import Collection, Sequence
from functools import lru_cache

from torch import Tensor

from zbpp.core import Value
from zbpp.runtime.values import Origin, Tensors, origins_in

__all__ = ["PassthroughCache", "omitted"]


@lru_cache(1024)
def omitted(
    entries: str | None, chunk: int, stage_of: tuple[int, ...]
) -> frozenset[int]:
    """Places of the tensors that the receiver of a chunk's outputs has had.

    Args:
        entries: of the outputs' structure; None: they are plain tensors.
        chunk: that puts them out.
        stage_of: stage of every chunk.
    """
    if entries is None:
        return frozenset()
    receiver = stage_of[chunk + 1]
    return frozenset(
        place
        for place, origin in enumerate(origins_in(entries))
        if origin is not None and receiver in stage_of[origin[0] + 1 : chunk + 1]
    )


class PassthroughCache:
    """Tensors that one stage has handed on to others, while messages may omit them.

    Args:
        stage: of this process.
        stage_of: stage of every chunk.
    """

    def __init__(self, stage: int, stage_of: Sequence[int]) -> None:
        received = [
            chunk
            for chunk in range(1, len(stage_of))
            if stage_of[chunk] == stage != stage_of[chunk - 1]
        ]
        self._last = max(received, default=0)
        """The last chunk of the stage that reads another stage's message."""
        self.kept: dict[int, dict[Origin, Tensor]] = {}
        """By micro-batch."""

    def keep(self, value: Value, entries: str, tensors: Tensors) -> None:
        """Keep what a message hands on, if messages will come that may omit it."""
        if value.chunk >= self._last:
            return
        for tensor, origin in zip(tensors, origins_in(entries), strict=True):
            if origin is not None:
                self.kept.setdefault(value.microbatch, {})[origin] = tensor

    def fill(
        self,
        value: Value,
        entries: str,
        places: Collection[int],
        tensors: Sequence[Tensor],
    ) -> list[Tensor]:
        """Put what a message has omitted between the tensors that it brought.

        Args:
            value: that has come.
            entries: of its structure.
            places: of the tensors that were omitted.
            tensors: the others.
        """
        kept, rest = self.kept[value.microbatch], iter(tensors)
        return [
            kept[origin] if place in places and origin is not None else next(rest)
            for place, origin in enumerate(origins_in(entries))
        ]

    def release(self, value: Value) -> None:
        """Forget a micro-batch when its last message has come."""
        if value.chunk + 1 == self._last:
            self.kept.pop(value.microbatch, None)
