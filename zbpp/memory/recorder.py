"""Marks between the layers of a chunk: what each layer takes in F, B and W.

    F   |x0| layer 0 |x1| layer 1 | loss     a span begins where a layer reads its input
    B   |dx0 layer 0 |dx1 layer 1 |          and ends where its gradient is there
    W   layer 1's products | layer 0's

The tensors that lie on a mark are not counted there: x1 belongs to layer 1, which reads
it, whether layer 0 keeps it too or not. So the layers of a chunk add up.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.memory.tracker import Span, StorageTracker
from zbpp.runtime.backward.split import current_queue
from zbpp.runtime.support.pytree import map_tensors, tensors_in

__all__ = ["Recorder", "WatchedLayer"]


class Recorder:
    """Spans of the pass that runs, by layer.

    Args:
        tracker: counts the bytes.
        n_layers: of the chunk.
    """

    def __init__(self, tracker: StorageTracker, n_layers: int) -> None:
        self.tracker = tracker
        self.n_layers = n_layers
        self._kind = ""
        self._base = 0
        self.place = 0
        """Of the layer that runs now."""
        self._spans: dict[int, Span] = {}
        self.specs: dict[int, Any] = {}
        """Of each layer, a copy of its input's structure with `Spec` for tensors."""

    def begin(self, kind: str, on_the_way: int = 0) -> None:
        """A pass begins.

        Args:
            kind: F, B, W or BW.
            on_the_way: bytes of the value that it reads, which are held already.
        """
        self._kind = kind
        self._base = self.tracker.restart() - on_the_way
        self.place = 0 if kind == "F" else self.n_layers - 1
        self.tracker.owner = self.place
        self._spans = {}
        self._has_tail = False

    def end(self, most: int) -> list[Span]:
        """The pass is over, and what it gives away is let go; return its spans.

        Args:
            most: the tracker's, from before it was let go.
        """
        autocast_cache = sum(self.autocast_cache())
        self._close(self.tracker.held + autocast_cache, most)
        self._kind, self.tracker.owner = "", None
        return [self._spans.get(i, Span(0, 0)) for i in range(self.n_layers)]

    def mark(self, place: int, on_the_way: int) -> None:
        """Another layer begins; bytes that lie between the two are the next one's."""
        held = self.tracker.held - on_the_way
        self._close(held, self.tracker.most)
        self.tracker.restart()
        self._base, self.place = held, place
        self.tracker.owner = place

    def tail(self) -> None:
        """F has run its layers, and its loss."""
        if self._kind == "F":
            self._has_tail = True
            self.tracker.freed.clear()

    def autocast_cache(self) -> list[int]:
        """By layer, what F has made there and frees in its end.

        Autocast keeps its casts of weights so long. The last layer's are not told
        apart from its other temporaries.
        """
        if not self._has_tail:
            return [0] * self.n_layers
        freed = self.tracker.freed
        return [*(freed[i] for i in range(self.n_layers - 1)), 0]

    def _close(self, held: int, most: int) -> None:
        self._spans[self.place] = Span(held - self._base, most - self._base)

    def enter(self, place: int, value: Any) -> Any:
        """F enters a layer: mark it, and let B mark it as well."""
        tensors = tensors_in(value)
        if self._kind == "F":
            if place > 0:
                self.mark(place, self.tracker.counted(tensors))
            self.specs.setdefault(place, map_tensors(value, Spec))  # type: ignore[arg-type]
        asked = [x for x in tensors if x.requires_grad]
        if not asked:
            return value
        arrived = _Arrived(len(asked))

        def leave(gradient: Tensor | None) -> None:
            self._leave(place, arrived, gradient)

        mark: Any = _Mark.apply  # typed from torch 2.14 on
        return map_tensors(value, lambda x: mark(leave, x) if x.requires_grad else x)

    def _leave(self, place: int, arrived: "_Arrived", dx: Tensor | None) -> None:
        """B leaves a layer with its last gradient: mark it, and let W mark it too."""
        if self._kind not in ("B", "BW") or place == 0:
            return
        arrived.n_left -= 1
        arrived.n_bytes += 0 if dx is None else self.tracker.counted([dx])
        if arrived.n_left:
            return
        self.mark(place - 1, arrived.n_bytes)
        queue = current_queue()
        if queue is not None:
            queue.defer((), lambda: self._leave_w(place))

    def _leave_w(self, place: int) -> tuple[Tensor | None, ...]:
        if self._kind == "W":
            self.mark(place - 1, 0)
        return ()


class WatchedLayer(nn.Module):
    """A layer that tells a recorder when it begins."""

    def __init__(
        self,
        layer: nn.Module,
        place: int,
        recorder: Recorder,
        run: Callable[[nn.Module, Any], Any] | None = None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.place = place
        self._is_last = place == recorder.n_layers - 1
        self._recorder = recorder
        self._run = run

    def forward(self, value: Any) -> Any:
        """Mark, then run the layer."""
        value = self._recorder.enter(self.place, value)
        run = self._run
        value = self.layer(value) if run is None else run(self.layer, value)
        if self._is_last:
            self._recorder.tail()
        return value


@dataclass
class _Arrived:
    """Gradients of a layer's inputs: those still to come, and bytes of the others."""

    n_left: int
    n_bytes: int = 0


class _Mark(torch.autograd.Function):
    """The same data; B calls ``note(gradient)``."""

    @staticmethod
    def forward(ctx: Any, note: Any, x: Tensor) -> Any:
        ctx.note = note
        ctx.set_materialize_grads(False)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, dx: Tensor | None) -> Any:
        ctx.note(dx)
        return None, dx


class Spec:
    """Shape, dtype and need of a gradient of a fake tensor between two layers."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.needs_grad = tensor.requires_grad
        self.n_bytes = tensor.numel() * tensor.element_size()
