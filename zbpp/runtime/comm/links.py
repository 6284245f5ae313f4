"""Move single tensors between stages, and sums over all, by gloo or NCCL.

    HostWaits     gloo: the host waits for each message; GPUs' tensors go through it
    StreamWaits   NCCL: streams wait, and the host only where it reads a number

What else torch.distributed has is treated as NCCL if torch takes it for the device.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zbpp.core import Job, Message, TiedGradient, What
from zbpp.runtime.comm.failures import Failures
from zbpp.runtime.comm.groups import Group, Groups, gather_objects
from zbpp.runtime.comm.shapes import MAX_TENSORS
from zbpp.runtime.support.streams import HostCopy, SideStream, sent_ahead

__all__ = [
    "HEADER",
    "KINDS",
    "PING",
    "HostMessage",
    "HostWaits",
    "P2PLink",
    "PendingSum",
    "StreamWaits",
    "WaitContext",
    "tag",
]

_CHUNKS = 1024
_SLOTS = 256
HEADER, PING, KINDS = 0, _SLOTS - 2, _SLOTS - 1
"""Slots of what is no tensor of a value; these have 1, 2, ..."""
assert MAX_TENSORS < PING

_KIND_OF = {What.ACTIVATION: 0, What.GRADIENT: 1}
"""Part of a tag; a table, as a look at a member of an enum takes .3 us."""

_POLL_S = 1e-4
_ROUNDED_S = 1e-3  # gloo counts a time-out in whole milliseconds

WaitContext = tuple[object, ...]
"""The words of what is waited for, in parts: joined only if it does not come."""


class HostWaits:
    """Waits of the host, each no longer than the time-out."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures

    def beside_jobs(self) -> AbstractContextManager[object]:
        """Within this, what is begun waits for no job."""
        return nullcontext()

    def hand_over(self, tensor: Tensor) -> None:
        """Let a tensor that was made beside the jobs be freed behind them."""

    def wait(self, work: dist.Work, context: WaitContext, peer: int | None) -> None:
        """Wait for a message.

        Raises:
            PeerError: it did not come.
        """
        start = time.monotonic()
        try:
            work.wait(self._failures.timeout)
        except RuntimeError as error:
            waited_s = time.monotonic() - start
            is_late = waited_s + _ROUNDED_S >= self._failures.timeout_s
            what = _text(context)
            raise self._failures.peer_error(what, peer, is_late=is_late) from error

    def copy_after(self, work: dist.Work, buffer: Tensor) -> HostCopy:
        """Let a buffer go to the host once it is filled: it is there already."""
        return HostCopy(buffer)

    def confirm(self, work: dist.Work) -> None:
        """A message that was waited for has come."""

    def let_go(self, work: dist.Work, context: WaitContext, peer: int) -> None:
        """End a send that is known to have been received."""


class StreamWaits:
    """Waits of the device's streams; the host only looks for what failed or is late.

    A time-out of NCCL's own would hold up the host at every message.

    Args:
        failures: of the stage.
        side: stream for small messages that the host reads, and the copies that bring
            them.
    """

    def __init__(self, failures: Failures, side: SideStream) -> None:
        self._failures = failures
        self._side = side
        self._unconfirmed: deque[tuple[dist.Work, WaitContext, int | None]] = deque()
        self.beside_jobs = side.running
        self.hand_over = side.hand_over

    def wait(self, work: dist.Work, context: WaitContext, peer: int | None) -> None:
        """Let the current stream wait for a message.

        Raises:
            PeerError: it, or one before it, has failed.
        """
        try:
            work.wait()
        except RuntimeError as error:
            raise self._failures.peer_error(_text(context), peer) from error
        while self._unconfirmed and self._has_come(*self._unconfirmed[0]):
            self._unconfirmed.popleft()
        self._unconfirmed.append((work, context, peer))

    let_go = wait

    def _has_come(
        self, work: dist.Work, context: WaitContext, peer: int | None
    ) -> bool:
        """Ask NCCL, whose work is also completed when it has failed.

        Raises:
            PeerError: it has failed, so that nothing has been written to its tensor.
        """
        if not work.is_completed():
            return False
        error = work.exception()
        if error is not None:
            raise self._failures.peer_error(_text(context), peer) from error
        return True

    def copy_after(self, work: dist.Work, buffer: Tensor) -> HostCopy:
        """Let a buffer go to the host once a message or collective has filled it."""
        with self._side.running():
            work.wait()
            return HostCopy(buffer)

    def confirm(self, work: dist.Work) -> None:
        """Wait on the host until a message, the last that was waited for, has come.

        Raises:
            PeerError: a message did not come; the oldest late one is named.
        """
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


def _text(context: WaitContext) -> str:
    return " ".join(map(str, ("waits at", *context)))


class HostMessage(NamedTuple):
    """Numbers that the host reads, on their way from a stage (None: a sum over all)."""

    work: dist.Work
    copy: HostCopy
    peer: int | None


class PendingSum:
    """A sum that is under way; it needs no more of a stage than to have begun it.

    Args:
        message: brings what is summed.
        read: waits for it.
    """

    def __init__(
        self, message: HostMessage, read: Callable[[HostMessage, WaitContext], Tensor]
    ) -> None:
        self._message = message
        self._read = read
        self._total: Tensor | None = None

    def ready(self) -> bool:
        """Return True: a sum waits for other processes."""
        return True

    def done(self) -> bool:
        """True if it has come."""
        if self._total is not None:
            return True
        return self._message.work.is_completed() and self._message.copy.done()

    def result(self, job: Job | None = None) -> Tensor:
        """Wait for it."""
        if self._total is None:
            context = (job or "a result", "for the sum over")
            self._total = self._read(self._message, context)
        return self._total


class _Sent(NamedTuple):
    work: dist.Work
    tensor: Tensor
    value: Message
    peer: int


class P2PLink:
    """The tensors that one stage sends and receives, and its sums over all.

    A channel keeps the order of its sends. Where another process is gone or late, all
    methods raise `PeerError`.

    Args:
        groups: of this process.
        failures: of this stage.
        waits: of the backend's kind.
    """

    def __init__(
        self, groups: Groups, failures: Failures, waits: HostWaits | StreamWaits
    ) -> None:
        self.on_device = groups.on_device
        self.device = groups.device
        """Where tensors must be to be moved."""
        self.wait, self.confirm = waits.wait, waits.confirm
        self.groups = groups
        self.failures = failures
        self._waits = waits
        self._training = True
        self._sends: deque[_Sent] = deque()
        self._n_sent = 0
        self._n_older = 0
        """Tensors sent in the steps before this one."""

    def begin(self, *, training: bool) -> None:
        """Start a step, or an evaluation."""
        self._training = training
        self._n_older = self._n_sent

    def send(self, value: Message, slot: int, tensor: Tensor, peer: int) -> None:
        """Start to send a tensor of a value; it is kept until it has left."""
        channel = self.groups.channels[self.failures.stage, peer]
        number = tag(value, slot, training=self._training)
        try:
            work = channel.group.send([tensor], channel.target, number)
        except RuntimeError as error:
            what = f"could not send {value} to"
            raise self.failures.peer_error(what, peer) from error
        self._sends.append(_Sent(work, tensor, value, peer))
        self._n_sent += 1
        # gloo calls none completed before one waits for it
        while self._sends and self._sends[0].work.is_completed():
            self._finish(self._sends.popleft(), "to hand on")

    def receive(
        self, value: Message, slot: int, buffer: Tensor, peer: int
    ) -> dist.Work:
        """Start to receive a tensor of a value."""
        channel = self.groups.channels[peer, self.failures.stage]
        number = tag(value, slot, training=self._training)
        try:
            work: dist.Work = channel.group.recv([buffer], channel.source, number)
        except RuntimeError as error:
            what = f"could not receive {value} from"
            raise self.failures.peer_error(what, peer) from error
        return work

    def send_numbers(
        self, value: Message, slot: int, numbers: Tensor, peer: int
    ) -> None:
        """Start to send numbers of the host to a host."""
        with self._waits.beside_jobs():
            tensor = sent_ahead(numbers, self.device)
            self.send(value, slot, tensor, peer)
        # A backend may keep it until its work is waited for, and let go of it there.
        self._waits.hand_over(tensor)

    def receive_numbers(
        self, value: Message, slot: int, like: Tensor, peer: int
    ) -> HostMessage:
        """Start to receive numbers that the host will read."""
        with self._waits.beside_jobs():
            buffer = torch.empty_like(like, device=self.device)
            work = self.receive(value, slot, buffer, peer)
        return HostMessage(work, self._waits.copy_after(work, buffer), peer)

    def read(self, message: HostMessage, context: WaitContext) -> Tensor:
        """Wait on the host for numbers, and for all that was waited for before."""
        with self._waits.beside_jobs():
            self._waits.wait(message.work, context, message.peer)
        self._waits.confirm(message.work)
        return message.copy.read()

    def sum(self, vector: Tensor) -> PendingSum:
        """Start to sum a vector over all processes.

        What a stage has sent before is let go when the sum has come: all begin it
        behind their passes, so what these read has been received.
        """
        with _reaching_all(self.failures, "could not begin a sum with"):
            work = self.groups.everyone.allreduce([vector])
            copy = self._waits.copy_after(work, vector)
        read = partial(self._read_sum, self._n_sent)
        return PendingSum(HostMessage(work, copy, None), read)

    def _read_sum(
        self, n_sent: int, message: HostMessage, context: WaitContext
    ) -> Tensor:
        total = self.read(message, context)
        for sent in self._take(n_sent):
            where = ("the end of the step to hand", sent.value, "to")
            self._waits.let_go(sent.work, where, sent.peer)
        return total

    def gather(self, thing: Any) -> list[Any]:
        """Give every process the picklable things of all, by rank."""
        everyone = self.groups.everyone
        with _reaching_all(self.failures, "waits at a gather for"):
            if not self.on_device:  # this waits no longer than a step, unlike a gather
                everyone.monitored_barrier(self.failures.timeout)
            return gather_objects(everyone, thing, self.device)

    def end(self) -> None:
        """End a step: what was sent in the steps before it is let go."""
        for sent in self._take(self._n_older):
            self._finish(sent, "the end of the step to hand")

    def flush(self) -> None:
        """Wait on the host until all sends have left."""
        for sent in self._take(self._n_sent):
            self._finish(sent, "the end to hand")
            self._waits.confirm(sent.work)

    def _take(self, n: int) -> Iterator[_Sent]:
        """Take out the sends that are not let go yet of the first ``n`` of all."""
        while self._sends and self._n_sent - len(self._sends) < n:
            yield self._sends.popleft()

    def _finish(self, sent: _Sent, when: str) -> None:
        self.wait(sent.work, (when, sent.value, "to"), sent.peer)

    @property
    def is_idle(self) -> bool:
        """True if no send is under way, as far as is known without a wait.

        On a device a send may have left and not arrived: only `flush` can know.
        """
        return not self.on_device and not self._sends

    def close(self) -> None:
        """End the groups."""
        self.groups.close()


def tag(value: Message, slot: int, *, training: bool) -> int:
    """Give a tensor of a value a number that no other has within a step.

    An evaluation has numbers of its own: a step would take its tensors for those that
    it waits for, if one rank alone evaluates.
    """
    if isinstance(value, TiedGradient):  # only in training, as gradients are
        number, kind = value.tie, 3
    else:
        number = value.microbatch
        kind = _KIND_OF[value.what] + 2 * (not training)
    index = (number * _CHUNKS + value.chunk) * 4 + kind
    return (index * _SLOTS + slot) % 2**31


def sum_on_hosts(failures: Failures, group: Group, numbers: Tensor) -> PendingSum:
    """Start to sum numbers of the host over a gloo group."""
    with _reaching_all(failures, "could not begin a sum with"):
        work = group.allreduce([numbers])
    read = partial(_read_on_host, HostWaits(failures))
    return PendingSum(HostMessage(work, HostCopy(numbers), None), read)


def _read_on_host(
    waits: HostWaits, message: HostMessage, context: WaitContext
) -> Tensor:
    waits.wait(message.work, context, message.peer)
    return message.copy.read()


@contextmanager
def _reaching_all(failures: Failures, what: str) -> Iterator[None]:
    """Within this, an error says that another process is gone."""
    try:
        yield
    except RuntimeError as error:
        raise failures.peer_error(what, None) from error
