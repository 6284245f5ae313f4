"""A GPU's streams and events, and copies between host and GPU that nobody waits for.

    host      copy x, go on ............ is it there? ... read
    stream    ... kernels | copy | event | kernels ...

By itself torch waits at both ends of such a copy: ``x.cpu()`` for all that the stream
has been given, ``x.to("cuda")`` for memory that is not pinned. On CPUs there is nothing
to copy. The functions that make events are given, so that tests can play a GPU.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = [
    "Event",
    "HostCopy",
    "MakeEvent",
    "SideStream",
    "StageStream",
    "sent_ahead",
    "timed_event",
]


class Event(Protocol):
    """The part of `torch.cuda.Event` that is used."""

    def record(self) -> None:
        """Enter the current stream."""

    def query(self) -> bool:
        """True if the stream has passed it."""

    def synchronize(self) -> None:
        """Wait on the host until the stream has passed it."""

    def wait(self) -> None:
        """Let the current stream wait for it."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds to a later event; both must have been passed."""


MakeEvent = Callable[[], Event]


def timed_event() -> Event:
    """Make an event whose time can be read."""
    event: Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event


def plain_event() -> Event:
    """Make an event that only orders."""
    event: Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    return event


class HostCopy:
    """The values of a tensor on the host, copied when the current stream comes to it.

    On CPUs the tensor itself. It is kept until the values are there.

    Args:
        tensor: that nobody writes to any more.
        make_event: gives an event; None: a CUDA event on GPUs, none on CPUs.
    """

    def __init__(self, tensor: Tensor, *, make_event: MakeEvent | None = None) -> None:
        self._source: Tensor | None = tensor
        self._values = tensor
        self._event: Event | None = None
        if make_event is None and tensor.is_cuda:
            make_event = plain_event
        if make_event is not None:
            self._values = torch.empty_like(
                tensor, device="cpu", pin_memory=tensor.is_cuda
            ).copy_(tensor, non_blocking=True)
            self._event = make_event()
            self._event.record()

    def done(self) -> bool:
        """True if `read` returns at once; asking waits for nothing."""
        return self._event is None or self._event.query()

    def read(self) -> Tensor:
        """Wait for the values; not to be called before whoever fills the tensor is sure
        to come, as the wait has no time-out."""
        if self._event is not None:
            self._event.synchronize()
            self._event = self._source = None
        return self._values


def sent_ahead(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a host's tensor on a device; the current stream copies it.

    The host does not wait, and may change the tensor at once: it is copied to pinned
    memory first, which goes back to its pool when the GPU has read it.
    """
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
    if device.type != "cuda" or tensor.is_cuda or not is_plain:
        return tensor.to(device)
    staged = torch.empty_like(tensor, pin_memory=True, requires_grad=False)
    return staged.copy_(tensor).to(device, non_blocking=True)


class SideStream:
    """A stream of a GPU for what waits for no job, made when it is first used.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: torch.cuda.Stream | None = None

    def running(self) -> AbstractContextManager[object]:
        """Within this, it is the current stream."""
        if self._made is None:
            self._made = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        current: AbstractContextManager[object] = torch.cuda.stream(self._made)
        return current

    def copy(self, tensor: Tensor) -> Tensor:
        """Begin to copy a host's tensor to the GPU."""
        with self.running():
            return sent_ahead(tensor, self._device)

    def event(self) -> Event:
        """Record an event behind all copies so far."""
        with self.running():
            event = plain_event()
            event.record()
        return event

    def hand_over(self, tensor: Tensor) -> None:
        """Tell the allocator that the current stream uses a copy."""
        tensor.record_stream(torch.cuda.current_stream(self._device))


class StageStream:
    """The stream of one of several stages that share a process and a GPU.

        caller    ... fork |                          | join ...
        stage 0            | F0 F1 ...                |
        stage 1            | F0 (waits for a mark) .. |

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def running(self) -> AbstractContextManager[object]:
        """Within this, it is the current stream."""
        current: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return current

    def fork(self) -> None:
        """Wait for what the caller's stream has been given."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def join(self) -> None:
        """Let the caller's stream wait for what this one has been given."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def mark(self) -> Event:
        """Record an event behind what it has been given; while it is current."""
        event = plain_event()
        event.record()
        return event

    def take_over(self, tensors: Iterable[Tensor], event: Event) -> None:
        """Use another stage's tensors from here on, once its event is passed."""
        event.wait()
        for tensor in tensors:
            tensor.record_stream(self._stream)
