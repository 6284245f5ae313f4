"""Move single tensors between stages, and sums over all, by gloo or NCCL.

    HostWaits     gloo: the host waits for each message; GPUs' tensors go through it
    StreamWaits   NCCL: streams wait, and the host only where it reads a sum

Bytes that the host reads (the kinds of a step's micro-batches, headers) go over gloo in
any case: they wait for no job of a device. What else torch.distributed has is
treated as NCCL if torch takes it for the device.
"""

import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zbpp.core import Job, Message
from zbpp.runtime.comm.failures import Failures
from zbpp.runtime.comm.groups import Channel, Group, Groups
from zbpp.runtime.comm.transport import Reduction
from zbpp.runtime.support.streams import HostCopy

_BYTES = 2
"""Added to the tag of a message that is no tensor of a value."""

_POLL_S = 1e-4
_ROUNDED_S = 1e-3  # gloo counts a time-out in whole milliseconds

WaitContext = tuple[object, ...]
"""The words of what is waited for, in parts: joined only if it does not come."""


class HostWaits:
    """Waits of the host, each no longer than the time-out."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures

    def wait(self, work: dist.Work, context: WaitContext, peer: int | None) -> None:
        """Wait for a message, or a sum."""
        start = time.monotonic()
        try:
            work.wait(self._failures.timeout)
        except RuntimeError as error:
            waited_s = time.monotonic() - start
            is_late = waited_s + _ROUNDED_S >= self._failures.timeout_s
            what = _text(context)
            raise self._failures.peer_error(what, peer, is_late=is_late) from error

    confirm = wait

    def copy_after(self, work: dist.Work, buffer: Tensor) -> HostCopy:
        """Copy a sum to the host once it has come: it is there already."""
        return HostCopy(buffer)


class StreamWaits:
    """Waits of the device's streams; the host only looks for what failed or is late.

    A time-out by NCCL would stop the host at every message.
    """

    def __init__(self, failures: Failures, device: torch.device) -> None:
        self._failures = failures
        self._side = torch.Stream(device)
        """For the copies of sums that the host reads: jobs need not wait for them."""
        self._unconfirmed: deque[tuple[dist.Work, WaitContext, int | None]] = deque()

    def wait(self, work: dist.Work, context: WaitContext, peer: int | None) -> None:
        """Let the current stream wait for a message; see if those before it failed."""
        try:
            work.wait()
        except RuntimeError as error:
            raise self._failures.peer_error(_text(context), peer) from error
        while self._unconfirmed and self._has_come(*self._unconfirmed[0]):
            self._unconfirmed.popleft()
        self._unconfirmed.append((work, context, peer))

    def _has_come(
        self, work: dist.Work, context: WaitContext, peer: int | None
    ) -> bool:
        """Ask NCCL; a work that has failed is completed too, its tensor unwritten."""
        if not work.is_completed():
            return False
        error = work.exception()
        if error is not None:
            raise self._failures.peer_error(_text(context), peer) from error
        return True

    def confirm(self, work: dist.Work, context: WaitContext, peer: int | None) -> None:
        """Wait on the host for a message or sum; the oldest late one is named."""
        self._unconfirmed.append((work, context, peer))
        deadline = time.monotonic() + self._failures.timeout_s
        while not work.is_completed():
            if time.monotonic() > deadline:
                for waiting in self._unconfirmed:
                    if not self._has_come(*waiting):
                        _, context, peer = waiting
                        what = _text(context)
                        raise self._failures.peer_error(what, peer, is_late=True)
            time.sleep(_POLL_S)
        for waiting in self._unconfirmed:
            self._has_come(*waiting)

    def copy_after(self, work: dist.Work, buffer: Tensor) -> HostCopy:
        """Copy a sum to the host once it has come."""
        with self._side:
            work.wait()
            return HostCopy(buffer)


Waits = HostWaits | StreamWaits


def _text(context: WaitContext) -> str:
    return " ".join(map(str, ("waits at", *context)))


class PendingSum(Reduction):
    """A sum that is under way; ``after`` is called once when it has come."""

    def __init__(
        self, work: dist.Work, vector: Tensor, waits: Waits, after: Callable[[], None]
    ) -> None:
        self._work, self._waits, self._after = work, waits, after
        self._copy = waits.copy_after(work, vector)
        self._total: Tensor | None = None

    def done(self) -> bool:
        """True if it has come."""
        if self._total is not None:
            return True
        return self._work.is_completed() and self._copy.done()

    def result(self, job: Job | None = None) -> Tensor:
        """Wait for it."""
        if self._total is None:
            context = (job or "a result", "for the sum over")
            self._waits.confirm(self._work, context, None)
            self._after()
            self._total = self._copy.read()
        return self._total


def _as_bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _moved(tensor: Tensor) -> Tensor:
    """The tensor as bytes: NCCL has no complex numbers and few kinds of integers."""
    if tensor.is_floating_point():
        return tensor
    return tensor.reshape(-1).view(torch.uint8)


class _Sent(NamedTuple):
    work: dist.Work
    tensor: Tensor
    value: Message
    peer: int


class Link:
    """The tensors that one stage sends and receives, and its sums over all.

    A channel keeps the order of its sends. Where another process has failed or is late,
    all methods raise `PeerError`.
    """

    def __init__(self, groups: Groups, failures: Failures) -> None:
        self.device = groups.device
        """Where tensors must be to be moved."""
        self._groups = groups
        self._failures = failures
        self._hosts = HostWaits(failures)
        self._waits: Waits = self._hosts
        if groups.on_device:
            self._waits = StreamWaits(failures, groups.device)
        self._tag = 0
        self._sends: deque[_Sent] = deque()
        self._n_sent = 0
        self._n_older = 0
        """Tensors sent in the steps before this one."""
        self._bytes: list[_Sent] = []

    def begin(self, *, training: bool) -> None:
        """Start a step, or an evaluation; the bytes of the one before have left.

        Their tags differ: a step would take an evaluation's tensors for those that it
        waits for, if one rank alone evaluates.
        """
        self._tag = int(not training)
        self._n_older = self._n_sent
        self._finish_bytes()

    def send(self, value: Message, tensor: Tensor, peer: int) -> None:
        """Start to send a tensor of a value; it is kept until it has left."""
        channel = self._groups.sends[peer]
        self._sends.append(self._send(channel, self._tag, value, tensor, peer))
        self._n_sent += 1
        # gloo calls none completed before one waits for it
        while self._sends and self._sends[0].work.is_completed():
            self._finish(self._sends.popleft())

    def send_bytes(self, value: Message, data: bytes, peer: int) -> None:
        """Start to send bytes of the host, and their number before them."""
        channel, tag = self._groups.numbers[peer], self._tag + _BYTES
        for tensor in (torch.tensor([len(data)]), _as_bytes(data)):
            self._bytes.append(self._send(channel, tag, value, tensor, peer))

    def _send(
        self, channel: Channel, tag: int, value: Message, tensor: Tensor, peer: int
    ) -> _Sent:
        try:
            work = channel.group.send([_moved(tensor)], channel.rank, tag)
        except RuntimeError as error:
            what = f"could not send {value} to"
            raise self._failures.peer_error(what, peer) from error
        return _Sent(work, tensor, value, peer)

    def _finish_bytes(self) -> None:
        for sent in self._bytes:
            self._hosts.wait(
                sent.work, ("the end to send", sent.value, "to"), sent.peer
            )
        self._bytes.clear()

    def receive(self, value: Message, buffer: Tensor, peer: int) -> dist.Work:
        """Start to receive a tensor of a value."""
        channel = self._groups.receives[peer]
        return self._receive(channel, self._tag, value, buffer, peer)

    def read_bytes(self, context: WaitContext, peer: int) -> bytes:
        """Wait for bytes of another stage's host."""
        length = self._read(torch.zeros(1, dtype=torch.int64), context, peer)
        data = torch.empty(int(length), dtype=torch.uint8)
        return self._read(data, context, peer).numpy().tobytes()

    def _read(self, buffer: Tensor, context: WaitContext, peer: int) -> Tensor:
        channel, tag = self._groups.numbers[peer], self._tag + _BYTES
        work = self._receive(channel, tag, "bytes", buffer, peer)
        self._hosts.wait(work, context, peer)
        return buffer

    def _receive(
        self, channel: Channel, tag: int, what: object, buffer: Tensor, peer: int
    ) -> dist.Work:
        try:
            work: dist.Work = channel.group.recv([_moved(buffer)], channel.rank, tag)
        except RuntimeError as error:
            text = f"could not receive {what} from"
            raise self._failures.peer_error(text, peer) from error
        return work

    def wait(self, work: dist.Work, context: WaitContext, peer: int) -> None:
        """Wait for a tensor of a value."""
        self._waits.wait(work, context, peer)

    def sum(self, vector: Tensor) -> PendingSum:
        """Start to sum a vector over all processes.

        What a stage has sent before is freed when the sum has come: all begin it behind
        their passes, so what these read has been received.
        """
        everyone, n_received = self._groups.everyone, self._n_sent
        return self._begin_sum(everyone, vector, self._waits, n_received)

    def sum_numbers(self, numbers: Tensor) -> PendingSum:
        """Start to sum numbers of the host over all processes."""
        return self._begin_sum(self._groups.hosts, numbers, self._hosts, 0)

    def _begin_sum(
        self, group: Group, vector: Tensor, waits: Waits, n_received: int
    ) -> PendingSum:
        with _reaching_all(self._failures, "could not begin a sum with"):
            work = group.allreduce([vector])
            return PendingSum(work, vector, waits, partial(self._free, n_received))

    def gather(self, thing: Any) -> list[Any]:
        """Give every process the picklable things of all, by rank."""
        hosts, data = self._groups.hosts, _as_bytes(pickle.dumps(thing))
        with _reaching_all(self._failures, "waits at a gather for"):
            # this waits no longer than a step, unlike a gather
            hosts.monitored_barrier(self._failures.timeout)
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(hosts.size())]
            hosts.allgather([lengths], [torch.tensor([len(data)])]).wait()
            padded = torch.zeros(max(map(int, lengths)), dtype=torch.uint8)
            padded[: len(data)] = data
            rows = [torch.empty_like(padded) for _ in lengths]
            hosts.allgather([rows], [padded]).wait()
        return [pickle.loads(row.numpy().tobytes()) for row in rows]

    def end(self) -> None:
        """End a step: free what was sent in the steps before it."""
        self._free(self._n_older)

    def flush(self) -> None:
        """Wait on the host until all sends have left."""
        self._finish_bytes()
        for work, _, value, peer in self._sends:
            self._waits.confirm(work, ("the end to send", value, "to"), peer)
        self._sends.clear()

    def _free(self, n: int) -> None:
        """Free those of the first ``n`` sends that are not freed yet."""
        while self._sends and self._n_sent - len(self._sends) < n:
            self._finish(self._sends.popleft())

    def _finish(self, sent: _Sent) -> None:
        context = ("the end of the step to send", sent.value, "to")
        self._waits.wait(sent.work, context, sent.peer)

    def close(self) -> None:
        """End the groups."""
        self._groups.close()


@contextmanager
def _reaching_all(failures: Failures, what: str) -> Iterator[None]:
    """Within this, an error means that another process has failed."""
    try:
        yield
    except RuntimeError as error:
        raise failures.peer_error(what, None) from error
