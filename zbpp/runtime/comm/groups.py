"""Process groups of one pipeline alone, made by their members only.

`torch.distributed.new_group` waits for the whole world, or names the group by a hash of
its ranks, under which the store may still have the addresses of a group that has ended.
Here every pipeline draws a name that no other has, so that pipelines may follow each
other or run at the same time. The groups of the user stay as they are.
"""

import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions

from zbpp.core import RequestError
from zbpp.runtime.comm.place import Place

_NO_TAG = 2**31 - 1
"""Tag of no message."""

_WATCHDOG = 2
"""Times as long as zbpp waits: the watchdog of NCCL would end the process without the
name of the rank that is missing."""

Group = Any
"""One of torch's backends. Its stubs lack their methods: send, recv, allreduce,
allgather, and monitored_barrier (gloo) or abort (others)."""


class Channel(NamedTuple):
    """A group that messages to or from a process go through, and its rank there."""

    group: Group
    rank: int


@dataclass
class Groups:
    """The groups that one process of a pipeline is in; channels by the other stage."""

    on_device: bool  # messages move on streams, as NCCL's do; else by the host (gloo)
    device: torch.device  # where tensors must be to be moved
    everyone: Group
    hosts: Group  # the same processes, for numbers of the host (gloo)
    numbers: dict[int, Channel]
    sends: dict[int, Channel]
    receives: dict[int, Channel]
    opened: list[Group]  # in the same order on all members
    store: Any  # for these processes alone

    def abort(self) -> None:
        """Let all other members fail at once, not when this process ends."""
        for group in self.opened:
            if group is self.hosts:
                _break_connections(group)
            else:
                group.abort()

    def close(self) -> None:
        """End the groups; gloo's threads end with the last references to them.

        A thread that still frees a tensor when Python ends aborts the process.
        """
        for group in self.opened:
            group.shutdown()
        self.opened, self.numbers, self.sends, self.receives = [], {}, {}, {}
        del self.everyone, self.hosts


def _break_connections(group: Group) -> None:
    """Break a gloo group: a receive that is late closes what it waits on."""
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):
                never = group.recv([torch.zeros(1)], peer, _NO_TAG)
                never.wait(timedelta(milliseconds=1))


def open_groups(
    place: Place,
    neighbours: Sequence[set[int]],
    *,
    device: torch.device,
    timeout_s: float,
) -> Groups:
    """Open the groups of a pipeline; all that step together must call, and no others.

    With gloo one group serves everything, as messages of other pairs do not wait for
    each other. With NCCL what shares a communicator does: a send and a receive between
    the same two stages must not, so every direction has a group.

    A receive that is posted early runs on its communicator's stream. This stream waits
    for what the stage's stream had to do before, and the stage's stream waits for it
    only where a job reads the value: no job in between. Each tensor of a value is a
    separate message; to group them would move them to a communicator of collectives,
    where they wait for each other (`docs/how_to/gpus.md` on
    CUDA_DEVICE_MAX_CONNECTIONS).
    """
    world, pipeline = place.everyone, place.pipeline
    assert world is not None
    name = f"zbpp_{place.gather(secrets.token_hex(8))[0]}"
    backend = _backend_of(world, device)
    open_members = partial(_open_group, place, timeout_s=timeout_s)
    hosts = open_members(range(place.n_ranks), f"{name}/hosts", "gloo")
    numbers = {stage: Channel(hosts, rank) for stage, rank in enumerate(pipeline)}
    if backend == "gloo":
        wire, everyone, sends, receives = torch.device("cpu"), hosts, numbers, numbers
        opened = [hosts]
    else:
        wire, sends, receives = device, {}, {}
        everyone = open_members(range(place.n_ranks), f"{name}/device", backend)
        opened = [everyone, hosts]
        here = pipeline.index(place.rank)
        for source, targets in enumerate(neighbours):
            for target in sorted(targets):  # the same order everywhere: no deadlock
                if here in (source, target):
                    both = pipeline[source], pipeline[target]
                    title = f"{name}/{both[0]}_to_{both[1]}"
                    group = open_members(both, title, backend)
                    _connect(group, sends=here == source, device=wire)
                    opened.append(group)
                    if here == source:
                        sends[target] = Channel(group, 1)
                    else:
                        receives[source] = Channel(group, 0)
    # A member that is refused right after this drops its groups, and would break those
    # of a member that is still connecting.
    place.gather(None)
    on_device, notes = backend != "gloo", _store(world, f"{name}/notes")
    return Groups(
        on_device, wire, everyone, hosts, numbers, sends, receives, opened, notes
    )


def _backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Name of what moves a device's tensors; a group may have several backends.

    NCCL, and what torch takes in its place for other accelerators, moves them on the
    device's streams. All else is treated as gloo is, which waits on the host.
    """
    try:
        name = str(group._get_backend(device).name())
    except RuntimeError as error:
        raise RequestError(
            f"the process group cannot move tensors of {device}: {error}; "
            "torch.distributed.init_process_group() without a backend can"
        ) from error
    return name if name == dist.get_default_backend_for_device(device.type) else "gloo"


def _connect(group: Group, *, sends: bool, device: torch.device) -> None:
    """Connect the two members now: done lazily, it has hung.

    By a message, as NCCL makes another communicator for messages than for collectives.
    """
    move = group.send if sends else group.recv
    move([torch.zeros(1, device=device)], int(sends), 0).wait()


def _store(world: dist.ProcessGroup, name: str) -> Any:
    return dist.PrefixStore(name, world.get_group_store())  # type: ignore[attr-defined]


def _open_group(
    place: Place, members: Sequence[int], name: str, backend: str, *, timeout_s: float
) -> Group:
    """Make a group of some ranks of `Place.everyone`; only these must call.

    By hand, as torch splits a new group off the communicator of the world, which all
    of the world must do together. The group ends with its last reference.
    """
    assert place.everyone is not None
    store, rank, n = (
        _store(place.everyone, name),
        members.index(place.rank),
        len(members),
    )
    timeout = timedelta(seconds=timeout_s)
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, n, timeout)
    timeout *= _WATCHDOG
    ranks = dist.get_process_group_ranks(place.everyone)
    ranks = [ranks[member] for member in members]
    kind = getattr(dist, f"ProcessGroup{backend.upper()}", None)
    if kind is not None:
        # Of high priority: a message need not wait until a large job has ended.
        options = kind.Options(is_high_priority_stream=True)
        options._timeout = timeout
        options.group_name, options.global_ranks_in_group = name, ranks  # in dumps
        return kind(store, rank, n, options)
    plugin = dist.Backend._plugins[backend.upper()]  # as torch_npu gives torch hccl
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, n, timeout)
    about = _DistributedBackendOptions()
    about.store, about.timeout, about.group_id = store, timeout, name
    about.group_rank, about.group_size, about.global_ranks_in_group = rank, n, ranks
    return plugin.creator_fn(about, None)
