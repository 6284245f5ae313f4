"""Rows of the cost table: bytes that passes of a layer and a chunk leave and need.

The columns of `zbpp.Costs` follow from the layers of a chunk, one after the
other: what a pass leaves is their sum, and a layer's peak stands on what those before
it in the pass have left.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from zbpp.core import PassKind
from zbpp.memory.tracker import Span

__all__ = ["ChunkPasses", "LayerPasses", "Messages"]


@dataclass(frozen=True)
class LayerPasses:
    """Spans of a layer in its place among others.

    The first micro-batch makes gradients, and whatever a layer keeps from its first
    call on; the others find both there. ``autocast_cache`` is the part of what F leaves
    that ends with its chunk's F: casts of weights. Without exact sums there is no
    ``bw``: BW is B, then W.
    """

    first_f: Span
    first_b: Span
    first_w: Span
    f: Span
    b: Span
    w: Span
    autocast_cache: int = 0
    first_bw: Span | None = None
    bw: Span | None = None

    @property
    def m_b(self) -> int:
        """Bytes that the layer's F leaves for its B."""
        return max(0, self.f.left - self.autocast_cache)


@dataclass(frozen=True)
class Messages:
    """Bytes of the values that a chunk reads and gives, each of one micro-batch.

    Args:
        x: that F reads from the chunk before; 0 on the first chunk.
        y: that F gives to the next chunk; 0 on the last one.
        y_unshared: the part of y that the chunk's own graph does not hold.
        dy: that B reads.
        dx: that B gives.
        dx_unshared: the part of dx that is not kept for W.
        dy_unshared: the part of dy that is not kept for W.
    """

    x: int = 0
    y: int = 0
    y_unshared: int = 0
    dy: int = 0
    dx: int = 0
    dx_unshared: int = 0
    dy_unshared: int = 0


@dataclass(frozen=True)
class ChunkPasses:
    """Passes of a chunk, layer by layer; peaks stand on what is held before a pass.

    A value that a pass reads counts as made inside it, so that ``m_b`` and the peaks
    mean what they mean in `zbpp.Costs`.
    """

    layers: tuple[LayerPasses, ...]
    messages: Messages

    def repeated(self, places: Sequence[int]) -> "ChunkPasses":
        """A chunk whose layers pass as those in these places do."""
        return replace(self, layers=tuple(self.layers[place] for place in places))

    @property
    def m_b(self) -> int:
        """Bytes that F leaves."""
        return sum(layer.f.left - layer.autocast_cache for layer in self.layers)

    @property
    def m_w(self) -> int:
        """Bytes that B leaves in its place."""
        return max(0, self.m_b + sum(layer.b.left for layer in self.layers))

    @property
    def made_in_f(self) -> int:
        """Bytes that the first F leaves for good: a layer keeps them from then on."""
        return sum(layer.first_f.left - layer.f.left for layer in self.layers)

    @property
    def gradients_in_b(self) -> int:
        """Gradients of parameters that the first B makes."""
        return sum(layer.first_b.left - layer.b.left for layer in self.layers)

    @property
    def gradients_in_w(self) -> int:
        """Gradients of parameters that the first W makes."""
        return sum(layer.first_w.left - layer.w.left for layer in self.layers)

    @property
    def gradients(self) -> int:
        """Gradients of parameters that a step makes."""
        return self.gradients_in_b + self.gradients_in_w

    def peak(self, kind: PassKind, *, first: bool = False) -> int:
        """Most that is held inside a pass.

        Args:
            kind: of the pass.
            first: it makes the gradients of its chunk.
        """
        layers = self.layers if kind is PassKind.F else reversed(self.layers)
        name = kind.value.lower()
        spans = [getattr(layer, f"first_{name}" if first else name) for layer in layers]
        if None not in spans:
            return _most(spans)
        # BW is B, then W while what B reads and gives is still there
        after_b = self.m_w - self.m_b + (self.gradients_in_b if first else 0)
        around = self.messages.dx_unshared + self.messages.dy_unshared
        of_b, of_w = (self.peak(k, first=first) for k in (PassKind.B, PassKind.W))
        return max(of_b, after_b + around + of_w)


def _most(spans: Iterable[Span]) -> int:
    held = most = 0
    for span in spans:
        most = max(most, held + span.peak)
        held += span.left
    return max(most, held)
