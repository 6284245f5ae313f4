"""Messages to and fro between two stages, timed.

    leader     send | ............ | receive      one way = half of that
    follower          receive | send

Both ends have posted their receive before the message comes, as in a step. What a
message costs the host and the copies to and from a GPU are a part of it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from zbpp.runtime.comm.channels import Channel
from zbpp.runtime.support.devices import runs_ahead

__all__ = ["Ping", "PingEnds", "ping"]

_TAG = 2**31 - 2
"""Of no message: it would be the last tensor but one of a full message."""


@dataclass(frozen=True)
class Ping:
    """Seconds of one message, and of the host's part in sending it."""

    one_way_s: float
    send_s: float


@dataclass(frozen=True)
class PingEnds:
    """The two channels between this stage and a peer, and where tensors live."""

    outgoing: Channel
    incoming: Channel
    device: torch.device
    wire: torch.device


def ping(
    ends: PingEnds,
    n_bytes: int,
    rounds: int,
    *,
    leads: bool,
    wait: Callable[[dist.Work], None],
) -> list[Ping]:
    """Send to and fro; both ends must call with the same numbers.

    Args:
        ends: of this stage.
        n_bytes: of a message.
        rounds: messages each way; the first one is not counted.
        leads: this end begins.
        wait: for a message, no longer than the time-out.

    Returns:
        One entry a round for the end that leads, else none.
    """
    own = torch.zeros(max(1, n_bytes), dtype=torch.uint8, device=ends.device)
    own = own.to(ends.wire)
    found = []
    work, buffer = _post(ends, own)
    for number in range(rounds + 1):
        start = time.perf_counter()
        if not leads:
            wait(work)
            buffer.to(ends.device)
            if number < rounds:
                work, buffer = _post(ends, own)
        before = time.perf_counter()
        payload = own.to(ends.device).to(ends.wire)
        sent = ends.outgoing.group.send([payload], ends.outgoing.target, _TAG)
        send_s = time.perf_counter() - before
        if leads:
            wait(work)
            buffer.to(ends.device)
            _finish(ends.device)
            found.append(Ping((time.perf_counter() - start) / 2, send_s))
            if number < rounds:
                work, buffer = _post(ends, own)
        wait(sent)
    return found[1:]


def _post(ends: PingEnds, like: Tensor) -> tuple[dist.Work, Tensor]:
    buffer = torch.empty_like(like)
    channel = ends.incoming
    return channel.group.recv([buffer], channel.source, _TAG), buffer


def _finish(device: torch.device) -> None:
    if runs_ahead(device):
        torch.accelerator.synchronize(device)
