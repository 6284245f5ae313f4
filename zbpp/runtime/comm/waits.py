"""Wait for messages and sums, each no longer than a time-out.

With gloo the host waits. With NCCL the GPU waits, and the host only where it needs a
value: a time-out of NCCL's own would hold it up at every message.
"""

import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zbpp.runtime.support.errors import PeerError
from zbpp.runtime.support.streams import HostCopy, SideStream

__all__ = ["Lost", "Waits", "Words"]

Words = tuple[object, ...]
"""Of what is waited for; they are put together if it does not come."""

_POLL_S = 1e-4
_ROUNDED_S = 1e-3  # gloo counts a time-out in whole milliseconds


class Lost(Protocol):
    """Makes the error of a message or sum that does not come."""

    def __call__(
        self, what: str, peer: int | None, *, is_late: bool = False
    ) -> PeerError:
        """Return the error.

        Args:
            what: waits or could not begin.
            peer: the stage that was waited for; None: all.
            is_late: the time-out has passed; else the connection broke.
        """


class Waits:
    """The waits of one stage.

    Args:
        on_device: messages are moved by the device, as NCCL does; False: by the host.
        device: of this process.
        timeout_s: how long a wait may last; may be set later.
        lost: makes the error of a wait.
    """

    def __init__(
        self,
        *,
        on_device: bool,
        device: torch.device,
        timeout_s: float,
        lost: Lost,
    ) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._on_device = on_device
        self._lost = lost
        self._unconfirmed: deque[tuple[dist.Work, Words, int | None]] = deque()
        self._side = SideStream(device)

    @property
    def timeout_s(self) -> float:
        """The longest time of a wait."""
        return self._timeout.total_seconds()

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._timeout = timedelta(seconds=seconds)

    def wait(self, work: dist.Work, what: Words, peer: int | None) -> None:
        """Wait for a message.

        Raises:
            PeerError: it did not come.
        """
        start = time.monotonic()
        try:
            if self._on_device:
                work.wait()
            else:
                work.wait(self._timeout)
        except RuntimeError as error:
            is_late = time.monotonic() - start + _ROUNDED_S >= self.timeout_s
            raise self._lost(_text(what), peer, is_late=is_late) from error
        if self._on_device:
            while self._unconfirmed and self._has_come(*self._unconfirmed[0]):
                self._unconfirmed.popleft()
            self._unconfirmed.append((work, what, peer))

    def _has_come(self, work: dist.Work, what: Words, peer: int | None) -> bool:
        """Ask NCCL, whose work is also completed when it has failed.

        Raises:
            PeerError: it has failed, so that nothing has been written to its tensor.
        """
        if not work.is_completed():
            return False
        error = work.exception()
        if error is not None:
            raise self._lost(_text(what), peer) from error
        return True

    def confirm(self, last: dist.Work) -> None:
        """Wait on the host until the last message that was waited for has come.

        Raises:
            PeerError: a message did not come; the oldest late one is named.
        """
        deadline = time.monotonic() + self.timeout_s
        while self._on_device and not last.is_completed():
            if time.monotonic() > deadline:
                for work, what, peer in self._unconfirmed:
                    if not self._has_come(work, what, peer):
                        raise self._lost(_text(what), peer, is_late=True)
            time.sleep(_POLL_S)
        for waiting in self._unconfirmed:
            self._has_come(*waiting)

    def aside(self) -> AbstractContextManager[object]:
        """Within this, what is begun waits for no job: NCCL's on a stream of its own.

        For small messages that the host reads, and for the copies that bring them.
        """
        return self._side.running() if self._on_device else nullcontext()

    def hand_over(self, tensor: Tensor) -> None:
        """Let a tensor that was made aside be freed on the current stream.

        NCCL keeps a tensor only until its work is waited for, and lets go of it there.
        """
        if self._on_device:
            self._side.hand_over(tensor)

    def copy_after(self, work: dist.Work, buffer: Tensor) -> HostCopy:
        """Let a buffer go to the host once a message or collective has filled it.

        With gloo the two are one, and nothing is waited for here.
        """
        with self.aside():
            if self._on_device:
                work.wait()
            return HostCopy(buffer)

    def finish(self, work: dist.Work, copy: HostCopy, what: Words) -> None:
        """Wait on the host for a collective, and for the copy of what it has summed.

        Raises:
            PeerError: it did not end.
        """
        self.read(work, copy, what, None)

    def read(
        self, work: dist.Work, copy: HostCopy, what: Words, peer: int | None
    ) -> Tensor:
        """Wait on the host for a message, and for the copy of what it has brought.

        Raises:
            PeerError: it did not come.
        """
        with self.aside():
            self.wait(work, what, peer)
        self.confirm(work)
        return copy.read()


def _text(words: Words) -> str:
    return " ".join(map(str, ("waits at", *words)))
