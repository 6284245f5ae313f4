"""A GPU's streams and events, and asynchronous copies between host and GPU.

    host      copy x, go on ............ is it there? ... read
    stream    ... kernels | copy | event | kernels ...

By itself torch waits at both ends of such a copy: ``x.cpu()`` for all that the stream
has to do, ``x.to(device)`` for memory that is not pinned. On CPUs there is nothing to
copy.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from zbpp.runtime.support.devices import runs_ahead


def recorded_event(device: torch.device) -> torch.Event:
    """Record an event whose time can be read in the current stream."""
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


class HostCopy:
    """The values of a tensor on the host, copied when the current stream reaches it.

    On CPUs the tensor itself. It must not be written to afterwards.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._source: Tensor | None = tensor
        self._values = tensor
        self._event: torch.Event | None = None
        if runs_ahead(tensor.device):
            self._values = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._event = torch.Event(tensor.device)
            self._event.record()

    def done(self) -> bool:
        """True if `read` returns at once; asking waits for nothing."""
        return self._event is None or self._event.query()

    def read(self) -> Tensor:
        """Wait for the values without a time-out: they must be sure to come."""
        if self._event is not None:
            self._event.synchronize()
            self._event = self._source = None
        return self._values


def sent_ahead(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a host's tensor on a device; the current stream copies it.

    The host does not wait, and may change the tensor at once: it is copied to pinned
    memory first, which goes back to its pool when the GPU has read it.
    """
    if tensor.device == device:
        return tensor
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
    if not (runs_ahead(device) and tensor.is_cpu and is_plain):
        return tensor.to(device)
    staged = torch.empty_like(tensor, pin_memory=True, requires_grad=False)
    return staged.copy_(tensor).to(device, non_blocking=True)


class NetworkStream:
    """The stream of a stage's communications, apart from that on which it computes.

        computes   | F0 .. |          B1 ..          | F0 resumes
        network            | F0's all-to-all |

    Args:
        device: it must run ahead of the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.Stream(device)

    def begin(self, tensors: Iterable[Tensor]) -> None:
        """Wait for the current stream, and use its tensors."""
        self.stream.wait_stream(torch.accelerator.current_stream(self._device))
        _record(tensors, self.stream)

    def end(self, event: torch.Event, tensors: Iterable[Tensor]) -> None:
        """Let the current stream wait for an event of this one, and use tensors."""
        event.wait()
        _record(tensors, torch.accelerator.current_stream(self._device))


def _record(tensors: Iterable[Tensor], stream: torch.Stream) -> None:
    """Tell the allocator that a stream uses tensors, those of the host left out."""
    for tensor in tensors:
        if runs_ahead(tensor.device):
            tensor.record_stream(stream)
