"""Process groups that stay in one process, for mailboxes of several stages."""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbpp.runtime.comm.failures import Failures
from zbpp.runtime.comm.groups import Channel, Groups
from zbpp.runtime.comm.links import HostWaits, P2PLink
from zbpp.runtime.comm.mailbox import Mailbox, StageLinks

CPU = torch.device("cpu")
N_SLOTS = 256

Mail = dict[tuple[int, int, int], deque[Tensor]]
"""Tensors under way, by source, target and tag."""


class MemoryGroup:
    """One member of a group; messages are told apart by tags, as gloo's."""

    def __init__(self, rank: int, mail: Mail) -> None:
        self._rank, self._mail = rank, mail
        self.sent: list[int] = []
        """The slot of every tensor that was sent."""

    def send(self, tensors: Sequence[Tensor], target: int, tag: int) -> Any:
        self._mail[self._rank, target, tag].append(tensors[0].detach().clone())
        self.sent.append(tag % N_SLOTS)
        return MemoryWork(None, deque())

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Any:
        return MemoryWork(tensors[0], self._mail[source, self._rank, tag])

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 1  # whose connections nobody need break

    def shutdown(self) -> None:
        pass


class MemoryWork:
    """A message; a receive is done when one waits for it and a send has come."""

    def __init__(self, buffer: Tensor | None, mail: deque[Tensor]) -> None:
        self._buffer, self._mail = buffer, mail

    def wait(self, *_: object) -> None:
        if self._buffer is not None:
            if not self._mail:
                raise RuntimeError("nothing was sent")
            self._buffer.copy_(self._mail.popleft())

    def is_completed(self) -> bool:
        return self._buffer is None


def make_mailboxes(stage_of: Sequence[int]) -> tuple[list[Mailbox], list[MemoryGroup]]:
    """One mailbox for each stage, and the group that it sends by.

    Args:
        stage_of: stage of every chunk; stage 0 reads the inputs.
    """
    n = max(stage_of) + 1
    mail: Mail = defaultdict(deque)
    members = [MemoryGroup(rank, mail) for rank in range(n)]
    store = dist.HashStore()
    links = StageLinks(
        stage_of=stage_of,
        neighbours=[{s for s in (stage - 1, stage + 1) if s < n} for stage in range(n)],
        parents=[None, *range(n - 1)],
    )
    boxes = []
    for stage, member in enumerate(members):
        pairs = [(s, t) for s in range(n) for t in range(n) if stage in (s, t)]
        channels = {pair: Channel(member, *pair) for pair in pairs}
        groups = Groups(False, CPU, member, channels, store)
        failures = Failures(
            groups, stage, range(n), pipeline=range(n), device=CPU, timeout_s=60.0
        )
        link = P2PLink(groups, failures, HostWaits(failures))
        boxes.append(Mailbox(link, links, timeout_s=60.0))
    return boxes, members
