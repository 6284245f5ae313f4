"""Messages to and fro between two stages, timed.

    leader     send | ............ | receive      one way = half of that
    follower          receive | send

Both ends have posted their receive before the message comes, as in a step. What a
message costs the host and the copies to and from a GPU are a part of it.
"""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from zbpp.core import Value, What
from zbpp.runtime.comm.links import P2PLink
from zbpp.runtime.support.devices import runs_ahead

__all__ = ["Ping", "ping"]

_VALUE = Value(What.ACTIVATION, 0, 0)
"""In the name of which the messages travel."""


@dataclass(frozen=True)
class Ping:
    """Seconds of one message, and of the host's part in sending it."""

    one_way_s: float
    send_s: float


def ping(
    link: P2PLink,
    peer: int,
    n_bytes: int,
    rounds: int,
    *,
    device: torch.device,
    leads: bool,
) -> list[Ping]:
    """Send to and fro; both ends must call with the same numbers.

    Args:
        link: of this stage.
        peer: the other stage.
        n_bytes: of a message.
        rounds: messages each way; the first one is not counted.
        device: where tensors live.
        leads: this end begins.

    Returns:
        One entry a round for the end that leads, else none.
    """
    tensor = torch.zeros(max(1, n_bytes), dtype=torch.uint8, device=device)
    pings = []
    work, buffer = _post(link, tensor, peer)
    for number in range(rounds + 1):
        start = time.perf_counter()
        if not leads:
            link.wait(work, ("a ping with",), peer)
            buffer.to(device)
            if number < rounds:
                work, buffer = _post(link, tensor, peer)
        before = time.perf_counter()
        link.send(_VALUE, tensor.to(link.device), peer)
        send_s = time.perf_counter() - before
        if leads:
            link.wait(work, ("a ping with",), peer)
            buffer.to(device)
            if runs_ahead(device):
                torch.accelerator.synchronize(device)
            pings.append(Ping((time.perf_counter() - start) / 2, send_s))
            if number < rounds:
                work, buffer = _post(link, tensor, peer)
    link.flush()
    return pings[1:]


def _post(link: P2PLink, like: Tensor, peer: int) -> tuple[dist.Work, Tensor]:
    buffer = torch.empty_like(like, device=link.device)
    return link.receive(_VALUE, buffer, peer), buffer
