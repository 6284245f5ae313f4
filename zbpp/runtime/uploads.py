"""Micro-batches on their way from the host to a GPU, some forwards ahead.

    host     F0 F1 F2 ...           goes on at once
    copies   0 1 | 2 | 3 | 4 ...    on a stream of their own, from pinned memory
    stage    F0    F1  F2  F3       each waits for the event behind its own copy

A forward that runs once more gets a new copy: a layer may have changed the first one in
place. On CPUs, and for tensors that are on the GPU already, nothing is copied.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from zbpp.runtime.support.devices import runs_ahead
from zbpp.runtime.support.pytree import map_tensors
from zbpp.runtime.support.streams import Event, SideStream
from zbpp.runtime.values import mapped

__all__ = ["AHEAD", "CopyStream", "Uploads", "uploads_to"]

AHEAD = 2
"""Micro-batches that are copied before their forward; they take memory until it."""

Move = Callable[[Any, Callable[[Tensor], Tensor]], Any]
"""From a micro-batch and a function of its tensors to the same with other tensors."""


class CopyStream(Protocol):
    """A stream for copies, as `zbpp.runtime.support.streams.SideStream` is one."""

    def copy(self, tensor: Tensor) -> Tensor:
        """Begin to copy a host's tensor."""

    def event(self) -> Event:
        """Record an event behind all copies so far."""

    def hand_over(self, tensor: Tensor) -> None:
        """Tell the allocator that the current stream uses a copy."""


class Uploads:
    """The inputs, or the targets, of a step's micro-batches.

    Args:
        device: where they are needed.
        move: see `Move`.
        stream: copies them; None: they are moved when they are taken.
    """

    def __init__(
        self, device: torch.device, move: Move, stream: CopyStream | None = None
    ) -> None:
        self._device = device
        self._move = move
        self._stream = stream
        self.begin(None)

    def begin(self, parts: Sequence[Any] | None) -> None:
        """Start a step; the first copies begin.

        Args:
            parts: of each micro-batch; None: nothing is read here.
        """
        self._parts = parts or ()
        self._sent: dict[int, tuple[Any, list[Tensor], Event | None]] = {}
        self._send(range(AHEAD))

    def take(self, microbatch: int) -> Any:
        """Return what a forward reads, on the device; the current stream waits for it.

        A forward of the same micro-batch may come again.
        """
        if self._stream is None:
            return self._move(self._parts[microbatch], self._moved)
        self._send([microbatch])
        part, copies, event = self._sent.pop(microbatch)
        if event is not None:
            event.wait()
        for copy in copies:
            self._stream.hand_over(copy)
        self._send(range(microbatch + 1, microbatch + 1 + AHEAD))
        return part

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device)

    def _send(self, microbatches: Sequence[int]) -> None:
        if self._stream is None:
            return
        for i in microbatches:
            if i < len(self._parts) and i not in self._sent:
                self._sent[i] = self._copied(self._parts[i], self._stream)

    def _copied(
        self, part: Any, stream: CopyStream
    ) -> tuple[Any, list[Tensor], Event | None]:
        copies: list[Tensor] = []

        def copy(tensor: Tensor) -> Tensor:
            if not tensor.is_cpu:
                return tensor.to(self._device)
            copies.append(stream.copy(tensor))
            return copies[-1]

        moved = self._move(part, copy)
        return moved, copies, stream.event() if copies else None


def uploads_to(device: torch.device) -> tuple[Uploads, Uploads]:
    """Make those of a stage's inputs and of its targets; they share a stream."""
    stream = SideStream(device) if runs_ahead(device) else None
    return Uploads(device, mapped, stream), Uploads(device, map_tensors, stream)
