"""Process groups of one pipeline alone, made by their members and by nobody else.

`torch.distributed.new_group` waits for the whole world, or names the group by a hash of
its ranks, under which the store may still hold the addresses of a group that is gone.
Here every pipeline draws a name that no other ever had, so that pipelines may follow
each other or stand beside each other.
"""

import pickle
import secrets
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from zbpp.runtime.support.collectives import uses_nccl

__all__ = [
    "PrivateGroup",
    "break_connections",
    "draw_name",
    "gather_objects",
    "open_group",
]

_NO_TAG = 2**31 - 1
"""Tag of no message: it would be the last tensor of a full message."""


class PrivateGroup(Protocol):
    """Messages and collectives as both of torch's backends have them."""

    def size(self) -> int:
        """Count the members."""

    def rank(self) -> int:
        """Return this member's place."""

    def send(self, tensors: list[Tensor], target: int, tag: int) -> dist.Work:
        """Start to send one tensor."""

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        """Start to receive one tensor."""

    def allreduce(self, tensors: list[Tensor]) -> dist.Work:
        """Start to sum one tensor."""

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> dist.Work:
        """Start to collect one tensor of every member."""

    def monitored_barrier(self, timeout: timedelta) -> None:
        """Wait for all members; gloo only."""

    def abort(self) -> None:
        """End what is under way, here and on the other members."""

    def shutdown(self) -> None:
        """End the connections and threads."""


def draw_name(group: dist.ProcessGroup, wire: torch.device, *, timeout_s: float) -> str:
    """Give all members of a group the same new name; all must call.

    Args:
        group: the pipeline's processes.
        wire: device of the tensors that the group sends.
        timeout_s: how long to wait for the other members, with gloo.

    Raises:
        RuntimeError: a member did not come.
    """
    if not uses_nccl(group, wire):
        gloo = cast("PrivateGroup", group._get_backend(wire))
        gloo.monitored_barrier(timedelta(seconds=timeout_s))
    number = torch.tensor([secrets.randbits(62)], device=wire)
    dist.broadcast(number, group=group, group_src=0)
    return f"zbpp_{int(number):x}"


def open_group(
    base: dist.ProcessGroup,
    members: Sequence[int],
    name: str,
    *,
    nccl: bool,
    timeout_s: float,
) -> PrivateGroup:
    """Make a group of some members of another; only these must call.

    The group is unknown to `torch.distributed`, so it ends with its last reference.

    Args:
        base: has the store where the members meet.
        members: ranks in ``base``; a member's rank in the group is its place here.
        name: never used before; the same for all members.
        nccl: gloo if False.
        timeout_s: for joining, and for its collectives.
    """
    store = dist.PrefixStore(name, base.get_group_store())  # type: ignore[attr-defined]
    rank = members.index(dist.get_rank(base))
    timeout = timedelta(seconds=timeout_s)
    group: object
    if nccl:
        # Made by hand also because torch splits a new group off the world's
        # communicator, which all of the world must do together.
        # Of high priority: a message need not wait until a large job has ended.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        # Twice as long as this house waits: NCCL's watchdog would end the process
        # without a word of which rank is missing.
        options._timeout = 2 * timeout
        group = dist.ProcessGroupNCCL(store, rank, len(members), options)
    else:
        group = dist.ProcessGroupGloo(store, rank, len(members), timeout)
    return cast("PrivateGroup", group)


def gather_objects(group: PrivateGroup, thing: Any, wire: torch.device) -> list[Any]:
    """Give every member the picklable things of all, by rank."""
    data = torch.frombuffer(bytearray(pickle.dumps(thing)), dtype=torch.uint8)
    own_length = torch.tensor([len(data)], device=wire)
    lengths = [torch.zeros_like(own_length) for _ in range(group.size())]
    group.allgather([lengths], [own_length]).wait()
    counts = [int(length) for length in lengths]
    own = torch.zeros(max(counts), dtype=torch.uint8, device=wire)
    own[: len(data)] = data
    rows = [torch.empty_like(own) for _ in counts]
    group.allgather([rows], [own]).wait()
    return [
        pickle.loads(row[:count].cpu().numpy().tobytes())
        for row, count in zip(rows, counts, strict=True)
    ]


def break_connections(group: PrivateGroup) -> None:
    """Let the other members of a gloo group fail at once, not when this process ends.

    There is no call for it; but a receive that is late closes what it waits on.
    """
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):
                never = group.recv([torch.zeros(1)], peer, _NO_TAG)
                never.wait(timedelta(milliseconds=1))
