"""Channels between neighbours, one pair and direction each; and sums over all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from zbpp.core import Job, Value, What
from zbpp.runtime.comm.header import Spec

__all__ = ["Channel", "Incoming", "PendingSum", "open_channels", "tag", "uses_nccl"]

_TENSORS_PER_MESSAGE = 16


@dataclass(frozen=True)
class Channel:
    """A process group and the ranks in it of the channel's two ends."""

    group: dist.ProcessGroup
    source: int
    target: int


@dataclass
class Incoming:
    """A receive that is posted; its buffers exist once the shapes are known."""

    value: Value
    peer: int
    spec: Spec | None = None
    buffers: list[Tensor] = field(default_factory=list)
    works: list[dist.Work] = field(default_factory=list)


def uses_nccl(group: dist.ProcessGroup) -> bool:
    """Whether tensors of the group travel by NCCL."""
    return bool(dist.get_backend(group) == "nccl")


def open_channels(
    group: dist.ProcessGroup,
    neighbours: Sequence[set[int]],
    *,
    device: torch.device,
    timeout_s: float,
) -> dict[tuple[int, int], Channel]:
    """Open the channels of this stage; all stages must call, as groups are collective.

    With gloo one group serves all, as tags tell the messages apart. NCCL has no tags,
    and what shares a communicator waits for each other: every channel gets its own.

    Args:
        group: the pipeline's processes, by stage.
        neighbours: the stages that each stage sends to.
        device: of this process.
        timeout_s: for messages of the new groups.

    Returns:
        Channels by (sending stage, receiving stage).
    """
    stage = dist.get_rank(group)
    channels = {}
    for source, peers in enumerate(neighbours):
        for target in sorted(peers):
            ends = [dist.get_global_rank(group, end) for end in (source, target)]
            own = group
            if uses_nccl(group):
                own = dist.new_group(sorted(ends), timeout=timedelta(seconds=timeout_s))
            if stage in (source, target):
                if own is not group:  # connect now: done lazily, it has hung
                    dist.all_reduce(torch.zeros(1, device=device), group=own)
                ranks = [dist.get_group_rank(own, end) for end in ends]
                channels[source, target] = Channel(own, *ranks)
    return channels


def tag(value: Value, slot: int) -> int:
    """A number that only this tensor of this value has within a step."""
    what = 0 if value.what is What.ACTIVATION else 1
    index = (value.microbatch * 4096 + value.chunk) * 2 + what
    return (index * _TENSORS_PER_MESSAGE + slot) % 2**31


class PendingSum:
    """A sum that is under way; it needs no more of a stage than to have begun it.

    Args:
        vector: what comes to hold the sum.
        work: the collective.
        finish: waits for both and gives the sum on the host; its text is for errors.
    """

    def __init__(
        self,
        vector: Tensor,
        work: dist.Work,
        finish: Callable[[dist.Work, Tensor, str], Tensor],
    ) -> None:
        self._vector = vector
        self._work: dist.Work | None = work
        self._finish = finish

    def ready(self) -> bool:
        """Always: a sum waits for other processes."""
        return True

    def done(self) -> bool:
        """Whether it has come."""
        return self._work is None or self._work.is_completed()

    def result(self, job: Job | None = None) -> Tensor:
        """Wait for it."""
        if self._work is not None:
            what = f"{job or 'a result'} for the sum over"
            self._vector = self._finish(self._work, self._vector, what)
            self._work = None
        return self._vector
