"""Process groups of one pipeline alone, made by their members and by nobody else.

`torch.distributed.new_group` waits for the whole world, or names the group by a hash of
its ranks, under which the store may still hold the addresses of a group that is gone.
Here every pipeline draws a name that no other ever had, so that pipelines may follow
each other or stand beside each other.
"""

import pickle
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions

from zbpp.core import RequestError
from zbpp.runtime.support.collectives import backend_of, wire_of

__all__ = [
    "Channel",
    "Group",
    "Groups",
    "gather_objects",
    "open_group",
    "open_groups",
]

_NO_TAG = 2**31 - 1
"""Tag of no message."""

_WATCHDOG = 2
"""Times as long as this house waits: NCCL's watchdog, and its likes, would end the
process without a word of which rank is missing."""


Group = Any
"""One of torch's backends with their own methods, which its stubs do not know: send,
recv, allreduce, allgather, and monitored_barrier (gloo) or abort (others)."""


@dataclass(frozen=True)
class Channel:
    """A process group and the ranks in it of a channel's two ends."""

    group: Group
    source: int
    target: int


@dataclass
class Groups:
    """The groups that one process of a pipeline is in.

    Args:
        on_device: messages are moved on the device's streams, as NCCL does; False: by
            the host, as gloo does.
        device: where tensors must be to be moved.
        everyone: all processes that step together.
        hosts: the same processes, for numbers of the host (gloo).
        pipeline: ranks in these of this pipeline's processes, by stage.
        channels: of this stage, by (sending stage, receiving stage).
        store: for these processes alone.
        replicas: those with the same part of this stage on other replicas, for numbers
            of the host (gloo); None: there are none.
    """

    on_device: bool
    device: torch.device
    everyone: Group
    hosts: Group
    pipeline: Sequence[int]
    channels: dict[tuple[int, int], Channel]
    store: Any
    replicas: Group | None = None

    def numbers(self, source: int, target: int) -> Channel:
        """Return the channel for numbers of the host between two stages."""
        return Channel(self.hosts, self.pipeline[source], self.pipeline[target])

    def opened(self) -> list[Group]:
        """The pipeline's own, in an order that is the same on all members."""
        groups = [self.everyone, self.hosts]
        groups += [channel.group for channel in self.channels.values()]
        if self.replicas is not None:
            groups.append(self.replicas)
        return list(dict.fromkeys(groups))

    def abort(self) -> None:
        """Let all other members fail at once, not when this process ends.

        Groups of the user's own mesh stay as they are.
        """
        for group in self.opened():
            if self.on_device and group not in (self.hosts, self.replicas):
                group.abort()
            else:
                _break_connections(group)

    def close(self) -> None:
        """End the groups; gloo's threads end with the last references to them.

        A thread that still lets go of a tensor when Python ends aborts the process.
        """
        for group in self.opened():
            group.shutdown()
        self.channels = {}
        self.replicas = None
        del self.everyone, self.hosts


def _break_connections(group: Group) -> None:
    """Break a gloo group: there is no call for it, but a receive that is late closes
    what it waits on."""
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):
                never = group.recv([torch.zeros(1)], peer, _NO_TAG)
                never.wait(timedelta(milliseconds=1))


def open_groups(
    world: dist.ProcessGroup,
    pipeline: Sequence[int],
    *,
    neighbours: Sequence[set[int]],
    device: torch.device,
    timeout_s: float,
    replicas: Sequence[int] = (),
) -> Groups:
    """Open the groups of a pipeline; all that step together must call, nobody else.

    With gloo one group serves everything, as messages of other pairs do not wait for
    each other. With NCCL what shares a communicator does: a send and a receive between
    the same two stages must not, so every direction has its own.

    A receive that is posted early runs on its communicator's own stream. This stream
    waits for what was given to the stage's before, and the stage's waits for it only
    where a job reads the value: no job in between. Tensors of a value are messages of
    their own; to group them would move them to a communicator of collectives, where
    they wait for each other (`docs/how_to/gpus.md` on CUDA_DEVICE_MAX_CONNECTIONS).

    Args:
        world: the processes that step together: those of the pipeline, and of others
            that train the same model on other samples.
        pipeline: ranks in ``world`` of this pipeline's processes, by stage.
        neighbours: the stages that each stage sends to.
        device: of this process.
        timeout_s: for joining, and for collectives.
        replicas: ranks in ``world`` of `Groups.replicas`, with this process.

    Raises:
        RuntimeError: a process did not come.
    """
    stage = pipeline.index(dist.get_rank(world))
    backend = backend_of(world, device)
    wire = wire_of(backend, device)
    name = _draw_name(world, wire, timeout_s=timeout_s)
    open_members = partial(open_group, world, backend=backend, timeout_s=timeout_s)
    all_ranks = range(dist.get_world_size(world))
    hosts = open_group(world, all_ranks, name, backend="gloo", timeout_s=timeout_s)
    pairs = [  # in the same order on all stages: no circle of waits
        (source, target)
        for source, targets in enumerate(neighbours)
        for target in sorted(targets)
        if stage in (source, target)
    ]
    if backend == "gloo":
        everyone = hosts
        channels = {(i, j): Channel(hosts, pipeline[i], pipeline[j]) for i, j in pairs}
    else:
        everyone = open_members(all_ranks, f"{name}/device")
        channels = {}
        for pair in pairs:
            both = pipeline[pair[0]], pipeline[pair[1]]
            group = open_members(both, f"{name}/{both[0]}_to_{both[1]}")
            _connect(group, sends=stage == pair[0], device=wire)
            channels[pair] = Channel(group, 0, 1)
    of_replicas: Group | None = None
    if len(replicas) > 1:
        title = f"{name}/replicas_{replicas[0]}"
        of_replicas = open_group(
            world, replicas, title, backend="gloo", timeout_s=timeout_s
        )
    _await_members(world, wire, timeout_s=timeout_s)
    store = world.get_group_store()
    notes = dist.PrefixStore(f"{name}/notes", store)  # type: ignore[attr-defined]
    return Groups(
        backend != "gloo",
        wire,
        everyone,
        hosts,
        pipeline,
        channels,
        notes,
        of_replicas,
    )


def _connect(group: Group, *, sends: bool, device: torch.device) -> None:
    """Connect the two members now: done lazily, it has hung.

    By a message, as NCCL makes another communicator for messages than for collectives.
    """
    move = group.send if sends else group.recv
    move([torch.zeros(1, device=device)], int(sends), 0).wait()


def _draw_name(
    group: dist.ProcessGroup, wire: torch.device, *, timeout_s: float
) -> str:
    """Give all members of a group the same new name; all must call.

    Args:
        group: the pipeline's processes.
        wire: device of the tensors that the group sends.
        timeout_s: how long to wait for the other members, with gloo.

    Raises:
        RuntimeError: a member did not come.
    """
    _await_members(group, wire, timeout_s=timeout_s)
    number = torch.tensor([secrets.randbits(62)], device=wire)
    dist.broadcast(number, group=group, group_src=0)
    return f"zbpp_{int(number):x}"


def _await_members(
    group: dist.ProcessGroup, wire: torch.device, *, timeout_s: float
) -> None:
    """Wait until all members have come here.

    A member that is refused right after it has its groups drops them, and would break
    those of a member that is still connecting: nobody goes on before all have theirs.

    Raises:
        RuntimeError: a member did not come.
    """
    if backend_of(group, wire) == "gloo":
        gloo: Group = group._get_backend(wire)
        gloo.monitored_barrier(timedelta(seconds=timeout_s))
    else:
        dist.all_reduce(torch.zeros(1, device=wire), group=group)


def open_group(
    base: dist.ProcessGroup,
    members: Sequence[int],
    name: str,
    *,
    backend: str,
    timeout_s: float,
) -> Group:
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
    make = _MAKERS.get(backend) or _registered(backend)
    return make(store, rank, len(members), timedelta(seconds=timeout_s))


_Make = Callable[[Any, int, int, timedelta], Group]
"""From a store, this member's place, the number of members and a time-out."""


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Group:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def _on_streams(
    kind: str, store: Any, rank: int, size: int, timeout: timedelta
) -> Group:
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

    def make(store: Any, rank: int, size: int, timeout: timedelta) -> Group:
        timeout *= _WATCHDOG
        if not plugin.extended_api:
            return plugin.creator_fn(store, rank, size, timeout)
        options = _DistributedBackendOptions()
        options.store, options.timeout = store, timeout
        options.group_rank, options.group_size = rank, size
        return plugin.creator_fn(options, None)

    return make


_MAKERS: Mapping[str, _Make] = {
    "gloo": _gloo,
    "nccl": partial(_on_streams, "ProcessGroupNCCL"),
    "xccl": partial(_on_streams, "ProcessGroupXCCL"),
}
"""Makers of groups, by the name of the backend; see `_registered` for the rest."""


def gather_objects(group: Group, thing: Any) -> list[Any]:
    """Give every member of a gloo group the picklable things of all, by rank."""
    data = torch.frombuffer(bytearray(pickle.dumps(thing)), dtype=torch.uint8)
    length = torch.tensor([len(data)])
    lengths = [torch.zeros_like(length) for _ in range(group.size())]
    group.allgather([lengths], [length]).wait()
    counts = [int(count) for count in lengths]
    padded = torch.zeros(max(counts), dtype=torch.uint8)
    padded[: len(data)] = data
    rows = [torch.empty_like(padded) for _ in counts]
    group.allgather([rows], [padded]).wait()
    return [
        pickle.loads(row[:count].numpy().tobytes())
        for row, count in zip(rows, counts, strict=True)
    ]
