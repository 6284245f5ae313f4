"""Channels between neighbours, one pair and direction each; and sums over all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbpp.core import Job, Message, TiedGradient, What
from zbpp.runtime.comm.header import MOST_TENSORS, Spec
from zbpp.runtime.comm.private_group import PrivateGroup, draw_name, open_group
from zbpp.runtime.comm.waits import Words
from zbpp.runtime.support.collectives import wire_of
from zbpp.runtime.support.streams import HostCopy

__all__ = [
    "HEADER",
    "HEADER_REST",
    "KINDS",
    "Channel",
    "Incoming",
    "PendingSum",
    "Port",
    "has_tags",
    "join",
    "tag",
]

_CHUNKS = 1024
_SLOTS = 256
assert MOST_TENSORS + 3 < _SLOTS
HEADER, HEADER_REST, KINDS = 0, _SLOTS - 2, _SLOTS - 1
"""Slots of what is no tensor of a value; these have 1, 2, ..."""


@dataclass(frozen=True)
class Channel:
    """A process group and the ranks in it of the channel's two ends."""

    group: PrivateGroup
    source: int
    target: int


@dataclass
class Incoming:
    """A receive that is posted; its buffers exist once the shapes are known.

    ``known`` is what this end knows of them without the other.
    """

    value: Message
    peer: int
    known: Spec | None = None
    spec: Spec | None = None
    buffers: list[Tensor] = field(default_factory=list)
    works: list[dist.Work] = field(default_factory=list)


def has_tags(backend: str) -> bool:
    """True if messages of one group are told apart by tags."""
    return backend == "gloo"


def join(
    everyone: dist.ProcessGroup,
    pipeline: Sequence[int],
    neighbours: Sequence[set[int]],
    *,
    backend: str,
    device: torch.device,
    timeout_s: float,
) -> tuple[PrivateGroup, dict[tuple[int, int], Channel], Any, str]:
    """Open the groups of a pipeline; all that step together must call, nobody else.

    With gloo one group serves all, as tags tell the messages apart. NCCL has no tags,
    and what shares a communicator waits for each other: a send and a receive between
    the same two stages must not, so every direction has its own, and none is shared.

    A receive that is posted early runs on its communicator's own stream. This stream
    waits for what was given to the stage's before, and the stage's waits for it only
    where a job reads the value: no job in between. Tensors of a value are messages of
    their own; to group them would move them to a communicator of collectives, where
    they wait for each other (`docs/gpus.md` on CUDA_DEVICE_MAX_CONNECTIONS).

    Args:
        everyone: processes that step together: those of the pipeline, and of others
            that train the same model on other samples.
        pipeline: ranks of this pipeline's processes among them, by stage.
        neighbours: the stages that each stage sends to.
        backend: of their tensors, as `backend_of` tells it.
        device: of this process.
        timeout_s: for joining, and for collectives.

    Returns:
        The group of everyone; the channels of this stage by (sending stage, receiving
        stage); a store for these processes alone; a name that only they know.

    Raises:
        RuntimeError: a stage did not come.
    """
    stage = pipeline.index(dist.get_rank(everyone))
    wire = wire_of(backend, device)
    name = draw_name(everyone, wire, timeout_s=timeout_s)
    open_one = partial(open_group, everyone, backend=backend, timeout_s=timeout_s)
    all_ranks = range(dist.get_world_size(everyone))
    whole = its = open_one(all_ranks, name)
    if len(pipeline) < len(all_ranks) and has_tags(backend):
        its = open_one(pipeline, f"{name}/pipeline_{pipeline[0]}")
    channels = {}
    # All stages go through the pairs in the same order: no circle of waits.
    for source, peers in enumerate(neighbours):
        for target in sorted(peers):
            if stage not in (source, target):
                continue
            if has_tags(backend):
                channels[source, target] = Channel(its, source, target)
                continue
            ends = pipeline[source], pipeline[target]
            pair = open_one(ends, f"{name}/{ends[0]}_to_{ends[1]}")
            # Connect now: done lazily, it has hung. By a message, as NCCL makes another
            # communicator for messages than for collectives.
            move = pair.send if stage == source else pair.recv
            move([torch.zeros(1, device=wire)], int(stage == source), 0).wait()
            channels[source, target] = Channel(pair, 0, 1)
    store = everyone.get_group_store()
    notes = dist.PrefixStore(f"{name}/notes", store)  # type: ignore[attr-defined]
    return whole, channels, notes, name


def tag(value: Message, slot: int, *, training: bool = True) -> int:
    """Give a tensor of a value a number that no other has within a step.

    An evaluation has numbers of its own: a step would take its tensors for those that
    it waits for, if one rank alone evaluates.
    """
    if isinstance(value, TiedGradient):  # only in training, as gradients are
        number, kind = value.tie, 3
    else:
        number = value.microbatch
        kind = (value.what is not What.ACTIVATION) + 2 * (not training)
    index = (number * _CHUNKS + value.chunk) * 4 + kind
    return (index * _SLOTS + slot) % 2**31


class Port:
    """The way of one value's tensors to or from a peer, looked up once.

    Args:
        call: the group's ``send`` or ``recv``.
        rank: of the peer, in that group.
        value: that goes this way.
    """

    __slots__ = ("_call", "_first", "_rank")

    def __init__(
        self, call: Callable[..., dist.Work], rank: int, value: Message
    ) -> None:
        self._call = call
        self._rank = rank
        self._first = [tag(value, 0, training=x) for x in (False, True)]

    def start(self, tensor: Tensor, slot: int, *, training: bool) -> dist.Work:
        """Start to send, or to receive."""
        return self._call([tensor], self._rank, self._first[training] + slot)


class PendingSum:
    """A sum that is under way; it needs no more of a stage than to have begun it.

    Args:
        work: the collective.
        copy: what it has summed, on its way to the host.
        finish: waits for both; its words are for errors.
    """

    def __init__(
        self,
        work: dist.Work,
        copy: HostCopy,
        finish: Callable[[dist.Work, HostCopy, Words], None],
    ) -> None:
        self._work: dist.Work | None = work
        self._copy = copy
        self._finish = finish

    def ready(self) -> bool:
        """Return True: a sum waits for other processes."""
        return True

    def done(self) -> bool:
        """True if it has come."""
        return self._work is None or (self._work.is_completed() and self._copy.done())

    def result(self, job: Job | None = None) -> Tensor:
        """Wait for it."""
        if self._work is not None:
            words = (job or "a result", "for the sum over")
            self._finish(self._work, self._copy, words)
            self._work = None
        return self._copy.read()
