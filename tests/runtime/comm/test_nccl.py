"""NCCL's side of the messages, on groups that are played: CPUs have no other.

Work enters the stream that is current when it begins, and whoever waits for it is the
stream that is current then: "jobs", or the one beside it for what the host reads.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from zbpp.core import Job, Pass, PassKind, TiedGradient, Value, What
from zbpp.runtime import PeerError
from zbpp.runtime.comm.failures import Failures
from zbpp.runtime.comm.groups import Channel, Groups
from zbpp.runtime.comm.links import P2PLink, StreamWaits
from zbpp.runtime.comm.mailbox import Mailbox, StageLinks
from zbpp.runtime.comm.transport import Opening

CPU = torch.device("cpu")
KINDS = [-1, 2, 0, 0, 0]
"""Inputs of unknown size for two micro-batches, the oldest kind, and their kinds."""


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody writes notes here, so that waiting for them finds nothing."""
    monkeypatch.setattr("zbpp.runtime.comm.failures._PATIENCE_S", 0.05)


class Played:
    """A communicator, and the streams of the process that waits for it."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str, str]] = []
        self.stream = "jobs"
        self.is_late = False
        self.error: RuntimeError | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        before, self.stream = self.stream, "beside"
        yield
        self.stream = before

    def hand_over(self, tensor: Tensor) -> None:
        pass

    def abort(self) -> None:
        self.log.append(("abort", "", self.stream))

    def send(self, tensors: list[Tensor], target: int, tag: int) -> "PlayedWork":
        return self._begun("send", tensors[0])

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> "PlayedWork":
        (buffer,) = tensors
        if buffer.dtype is torch.int64:
            buffer.copy_(torch.tensor(KINDS))
        return self._begun("receive", buffer)

    def allreduce(self, tensors: list[Tensor]) -> "PlayedWork":
        return self._begun("sum", tensors[0])

    def _begun(self, what: str, tensor: Tensor) -> "PlayedWork":
        name = "kinds" if tensor.dtype is torch.int64 else str(len(tensor))
        self.log.append((what, name, self.stream))
        return PlayedWork(self, name)


class PlayedWork:
    def __init__(self, group: Played, name: str) -> None:
        self._group, self._name = group, name

    def wait(self) -> None:
        self._group.log.append(("wait", self._name, self._group.stream))

    def is_completed(self) -> bool:
        return not self._group.is_late

    def exception(self) -> RuntimeError | None:
        return self._group.error


def stage_1(timeout_s: float = 60.0) -> tuple[Played, Mailbox]:
    """The messages of the middle one of three stages."""
    group = Played()
    channels = {pair: Channel(group, 0, 1) for pair in ((0, 1), (1, 0), (1, 2), (2, 1))}
    groups = Groups(True, CPU, group, channels, dist.HashStore())
    failures = Failures(
        groups, 1, range(3), pipeline=range(3), device=CPU, timeout_s=timeout_s
    )
    side: Any = group  # the stream beside the jobs, too
    link = P2PLink(groups, failures, StreamWaits(failures, side))
    links = StageLinks(
        stage_of=range(3), neighbours=[{1}, {0, 2}, {1}], parents=[None, 0, 1]
    )
    return group, Mailbox(link, links, timeout_s=timeout_s)


def activation(microbatch: int) -> Value:
    return Value(What.ACTIVATION, 0, microbatch)


def forward(microbatch: int) -> Job:
    return Pass(PassKind.F, 1, microbatch)


def like(length: int) -> tuple[Tensor]:
    return (torch.zeros(length),)


def test_a_receive_that_is_posted_early_is_waited_for_where_it_is_read() -> None:
    """
    channel   kinds  receive 10  receive 11
    beside    kinds  send on
    jobs                          wait 10, F0  send  wait 11, F1
    """
    group, messages = stage_1()
    messages.begin(Opening(2))
    assert group.log == [
        ("receive", "kinds", "beside"),
        ("wait", "kinds", "beside"),  # the copy to the host does
        ("wait", "kinds", "beside"),
        ("send", "kinds", "beside"),
        ("wait", "kinds", "beside"),  # it has left
    ]
    group.log.clear()
    first = messages.post(activation(0), 0, like(10))
    second = messages.post(activation(1), 0, like(11))
    assert group.log == [("receive", "10", "jobs"), ("receive", "11", "jobs")]
    group.log.clear()
    first.receive(forward(0))
    assert group.log == [("wait", "10", "jobs")]
    group.log.clear()
    second.receive(forward(1))
    assert group.log == [("wait", "11", "jobs")]


def test_a_sum_goes_to_the_host_beside_the_jobs() -> None:
    group, mailbox = stage_1()
    pending = mailbox.reduce(torch.ones(3))
    assert group.log == [("sum", "3", "jobs"), ("wait", "3", "beside")]
    group.is_late = True
    assert not pending.done()
    group.is_late = False
    assert pending.done() and pending.result().tolist() == [1.0, 1.0, 1.0]
    assert {where for what, _, where in group.log if what == "wait"} == {"beside"}


def test_a_failure_aborts_the_communicators_once_and_in_order() -> None:
    group, mailbox = stage_1()
    mailbox.report(ValueError("5 samples"), ends=False)
    assert not group.log
    mailbox.report(OSError("disk full"))
    mailbox.report(OSError("again"))
    assert group.log == [("abort", "", "jobs")]


def test_a_message_that_does_not_come_is_named() -> None:
    group, messages = stage_1(timeout_s=0.01)
    group.is_late = True
    words = "at the start for the size of the batch from stage 0: no answer in 0.01"
    with pytest.raises(PeerError, match=words):
        messages.begin(Opening(2))


@pytest.mark.parametrize("step_on", [False, True])
def test_a_message_that_has_failed_is_not_taken_for_one_that_has_come(
    step_on: bool,
) -> None:
    """NCCL calls a failed work completed too; nobody has written to its tensor.

    The control is `test_a_sum_goes_to_the_host_beside_the_jobs`: no exception, a sum.
    """
    group, messages = stage_1()
    messages.begin(Opening(2))
    first = messages.post(activation(0), 0, like(10))
    second = messages.post(activation(1), 0, like(11))
    first.receive(forward(0))
    group.error = RuntimeError("NCCL communicator was aborted")
    with pytest.raises(PeerError, match=r"waits at .*: the connection broke") as caught:
        if step_on:  # the next message finds it out, or the next sum
            second.receive(forward(1))
        else:
            messages.reduce(torch.ones(3)).result()
    assert caught.value.__cause__ is group.error


class SlowWork:
    """A send that has left after the host has asked for it some times."""

    def __init__(self, n_asks: int) -> None:
        self.n_asks = n_asks

    def wait(self, *limit: object) -> None:
        assert not limit, "NCCL holds up the host where a limit is given"

    def is_completed(self) -> bool:
        self.n_asks -= 1
        return self.n_asks <= 0

    def exception(self) -> None:
        return None


def test_the_end_waits_on_the_host_until_all_sends_have_left() -> None:
    group, messages = stage_1()
    works = [SlowWork(20), SlowWork(30)]
    left = iter(works)
    group.send = lambda *_: next(left)  # type: ignore[assignment, method-assign]
    messages.begin(None)
    for tie in range(2):
        messages.send(TiedGradient(tie, 1), like(10), 0)
    messages.flush()
    assert all(work.n_asks <= 0 for work in works)
