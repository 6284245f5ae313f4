"""Bytes that the passes of a layer and of a chunk take, leave and give back."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from zbpp.memory.tracker import Span

__all__ = ["ChunkPasses", "LayerPasses", "Messages", "Turns"]


@dataclass(frozen=True)
class LayerPasses:
    """Spans of a layer in its place among others.

    The first micro-batch makes gradients, and whatever a layer keeps from its first
    call on; the others find both there. ``lent`` is the part of what F leaves that its
    chunk's end frees: casts of weights, which autocast keeps until then. There is no
    ``bw`` where BW is B, then W: with sums that are not exact.
    """

    first_f: Span
    first_b: Span
    first_w: Span
    f: Span
    b: Span
    w: Span
    lent: int = 0
    first_bw: Span | None = None
    bw: Span | None = None

    @property
    def m_b(self) -> int:
        """Bytes that the layer's F leaves for its B."""
        return max(0, self.f.left - self.lent)


@dataclass
class Turns:
    """Passes of a chunk that count in the order of their micro-batches."""

    turn: int = 0
    early: set[int] = field(default_factory=set)

    def run(self, microbatch: int, *, in_order: bool) -> list[int]:
        """The micro-batches that count now."""
        if not in_order:
            return [microbatch]
        self.early.add(microbatch)
        due = []
        while self.turn in self.early:
            self.early.remove(self.turn)
            due.append(self.turn)
            self.turn += 1
        return due


@dataclass(frozen=True)
class Messages:
    """Bytes of the values that a chunk reads and gives, each of one micro-batch.

    Args:
        x: that F reads from the chunk before; 0 on the first chunk.
        y: that F gives to the next chunk; 0 on the last one.
        y_alone: the part of y that the chunk's own graph does not hold.
        dy: that B reads.
        dx: that B gives.
        dx_alone: the part of dx that is not kept for W.
        dy_alone: the part of dy that is not kept for W.
    """

    x: int = 0
    y: int = 0
    y_alone: int = 0
    dy: int = 0
    dx: int = 0
    dx_alone: int = 0
    dy_alone: int = 0


@dataclass(frozen=True)
class ChunkPasses:
    """Passes of a chunk, layer by layer; peaks stand on what is held before a pass.

    A value that a pass reads counts as made inside it, so that ``m_b`` and the peaks
    mean what they mean in `zbpp.core.MemoryModel`.
    """

    layers: tuple[LayerPasses, ...]
    messages: Messages

    def repeated(self, places: Sequence[int]) -> "ChunkPasses":
        """A chunk whose layers pass as those in these places do."""
        return replace(self, layers=tuple(self.layers[place] for place in places))

    def summed_in_turn(self, parts: Sequence[int]) -> "ChunkPasses":
        """The same where every micro-batch's gradients are summed layer by layer.

        W leaves none of a layer, and finds those that B has made; what leaves nothing
        to W is summed behind B. The parts of the first sums stay; others are added when
        that of the next layer but one begins, so W leaves two.

        Args:
            parts: bytes of this process's part of the gradients of each layer.
        """
        found: list[LayerPasses] = []
        done_in_b = 0
        n = len(parts)
        for i in reversed(range(n)):
            layer, part = self.layers[i], parts[i]
            added = parts[i + 2] if i + 2 < n else 0
            in_b = layer.first_b.left - layer.b.left
            in_w = layer.first_w.left - layer.w.left
            kept = in_b if in_w else 0
            b = Span(layer.b.left + kept, layer.first_b.peak + done_in_b)
            done_in_b += in_b - kept
            one = replace(
                layer,
                first_b=b,
                b=b,
                first_w=_summed(layer.first_w, in_w + kept, part, 0),
                w=_summed(layer.first_w, in_w + kept, part, added),
            )
            if layer.first_bw is not None and layer.bw is not None:
                made = layer.first_bw.left - layer.bw.left
                first_bw = _summed(layer.first_bw, made, part, 0)
                bw = _summed(layer.first_bw, made, part, added)
                one = replace(one, first_bw=first_bw, bw=bw)
            found.append(one)
        return replace(self, layers=tuple(reversed(found)))

    @property
    def m_b(self) -> int:
        """Bytes that F leaves."""
        return sum(layer.f.left - layer.lent for layer in self.layers)

    @property
    def m_w(self) -> int:
        """Bytes that B leaves in its place."""
        return max(0, self.m_b + sum(layer.b.left for layer in self.layers))

    @property
    def made_in_f(self) -> int:
        """Bytes that the first F leaves for good: a layer keeps them from then on."""
        return sum(layer.first_f.left - layer.f.left for layer in self.layers)

    @property
    def made_in_b(self) -> int:
        """Gradients of parameters that the first B makes."""
        return sum(layer.first_b.left - layer.b.left for layer in self.layers)

    @property
    def made_in_w(self) -> int:
        """Gradients of parameters that the first W makes."""
        return sum(layer.first_w.left - layer.w.left for layer in self.layers)

    @property
    def peak_f(self) -> int:
        """Most inside F."""
        return _most(layer.f for layer in self.layers)

    @property
    def peak_b(self) -> int:
        """Most inside B."""
        return _most(layer.b for layer in reversed(self.layers))

    @property
    def peak_w(self) -> int:
        """Most inside W."""
        return _most(layer.w for layer in reversed(self.layers))

    @property
    def peak_bw(self) -> int:
        """Most inside BW."""
        spans = [layer.bw for layer in reversed(self.layers) if layer.bw is not None]
        return _most(spans) or self._in_turn(self.peak_b, self.m_w, self.peak_w)

    @property
    def first_peak_b(self) -> int:
        """`peak_b` where there are no gradients yet."""
        return _most(layer.first_b for layer in reversed(self.layers))

    @property
    def first_peak_w(self) -> int:
        """`peak_w` where B alone has made gradients yet."""
        return _most(layer.first_w for layer in reversed(self.layers))

    @property
    def first_peak_bw(self) -> int:
        """`peak_bw` where there are no gradients yet."""
        own = (layer.first_bw for layer in reversed(self.layers))
        after_b = self.m_w + self.made_in_b
        return _most([span for span in own if span is not None]) or self._in_turn(
            self.first_peak_b, after_b, self.first_peak_w
        )

    def _in_turn(self, peak_b: int, after_b: int, peak_w: int) -> int:
        """BW where it is B, and then W while what B reads and gives is still there."""
        around = self.messages.dx_alone + self.messages.dy_alone
        return max(peak_b, after_b - self.m_b + around + peak_w)


def _summed(first: Span, gone: int, part: int, added: int) -> Span:
    """A pass whose gradients are summed; the part of an earlier sum is added."""
    left = first.left + part - added
    return Span(left - gone, max(first.peak, left))


def _most(spans: Iterable[Span]) -> int:
    held = most = 0
    for span in spans:
        most = max(most, held + span.peak)
        held += span.left
    return max(most, held)
