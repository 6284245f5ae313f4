"""Process groups of one pipeline alone, made by their members and by nobody else.

`torch.distributed.new_group` waits for the whole world, or names the group by a hash of
its ranks, under which the store may still hold the addresses of a group that is gone.
Here every pipeline draws a name that no other ever had, so that pipelines may follow
each other or stand beside each other.
"""

import pickle
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _DistributedBackendOptions

from zbpp.core import RequestError
from zbpp.runtime.support.collectives import backend_of

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
    if backend_of(group, wire) == "gloo":
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
    backend: str,
    timeout_s: float,
) -> PrivateGroup:
    """Make a group of some members of another; only these must call.

    The group is unknown to `torch.distributed`, so it ends with its last reference.

    Args:
        base: has the store where the members meet.
        members: ranks in ``base``; a member's rank in the group is its place here.
        name: never used before; the same for all members.
        backend: its name, as `backend_of` tells it.
        timeout_s: for joining, and for its collectives.
    """
    store = dist.PrefixStore(name, base.get_group_store())  # type: ignore[attr-defined]
    rank = members.index(dist.get_rank(base))
    timeout = timedelta(seconds=timeout_s)
    make = _MAKERS.get(backend) or _registered(backend)
    group = make(store, rank, len(members), timeout)
    return cast("PrivateGroup", group)


_Make = Callable[[Any, int, int, timedelta], object]
"""From a store, this member's place, the number of members and a time-out."""


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> object:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def _on_streams(kind: str, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Make a group by hand, also because torch splits a new one off the world's
    communicator, which all of the world must do together."""
    make = getattr(dist, kind)
    # Of high priority: a message need not wait until a large job has ended.
    options = make.Options(is_high_priority_stream=True)
    options._timeout = _WATCHDOG * timeout
    return make(store, rank, size, options)


def _registered(backend: str) -> _Make:
    """A backend that another package has given to torch, as torch_npu does hccl.

    Raises:
        RequestError: torch knows none of this name.
    """
    plugin = dist.Backend._plugins.get(backend.upper())
    if plugin is None:
        raise RequestError(f"torch knows no backend {backend}; see `zbpp doctor`")

    def make(store: Any, rank: int, size: int, timeout: timedelta) -> object:
        timeout *= _WATCHDOG
        if not plugin.extended_api:
            return plugin.creator_fn(store, rank, size, timeout)
        options = _DistributedBackendOptions()
        options.store, options.timeout = store, timeout
        options.group_rank, options.group_size = rank, size
        return plugin.creator_fn(options, None)

    return make


_WATCHDOG = 2
"""Times as long as this house waits: NCCL's watchdog, and its likes, would end the
process without a word of which rank is missing."""
_MAKERS: dict[str, _Make] = {
    "gloo": _gloo,
    "nccl": partial(_on_streams, "ProcessGroupNCCL"),
    "xccl": partial(_on_streams, "ProcessGroupXCCL"),
}
"""What makes a group, by the name of its backend; see `_registered` for the rest."""


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
