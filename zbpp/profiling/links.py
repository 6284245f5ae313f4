"""Delay and bandwidth of the links between neighbouring stages.

A message of n bytes takes delay + n / bandwidth, one way. Both follow from the means
of two sizes, sent to and fro while the other stages wait:

    time  |            x  the size of the largest message, or more
          |     .
          |  x           a few bytes: the delay
          +--------------- bytes

    lower stage     send | ............ | receive    one way = half of that
    higher stage           receive | send

Both ends have posted their receive before the message comes, as in a step. The work of
the host and the copies to and from a GPU are a part of the time.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch

from zbpp.core import Placement, TiedGradient
from zbpp.profiling.stopwatch import robust_mean
from zbpp.runtime.executor import Executor
from zbpp.runtime.support.devices import runs_ahead

__all__ = ["FASTEST", "Link", "Ping", "fit", "link_list", "measure_links"]

_SMALL, _LARGE = 64, 2**20
_ROUNDS = {_SMALL: 30}
_FEW = 10
_MS = 1e3
FASTEST = 1e15
"""Bytes in a ms where a large message took no longer than a small one."""


_MESSAGE = TiedGradient(0, 0)
"""Both ends know its shapes, so that no header is sent."""


@dataclass(frozen=True)
class Ping:
    """Seconds of one message, and of the host's part in sending it."""

    one_way_s: float
    send_s: float


@dataclass(frozen=True)
class Link:
    """Delay in ms, bytes in a ms, and the host's time for a send in ms."""

    delay: float
    bandwidth: float
    send: float

    def time(self, n_bytes: float) -> float:
        """Time of a message, in ms."""
        return self.delay + n_bytes / self.bandwidth


def fit(small: tuple[int, list[Ping]], large: tuple[int, list[Ping]]) -> Link:
    """Delay and bandwidth from the means of two sizes (`robust_mean`).

    >>> link = fit((64, [Ping(1e-3, 0)]), (1000064, [Ping(3e-3, 1e-4)]))
    >>> round(link.delay, 3), round(link.bandwidth), link.send
    (1.0, 500000, 0.1)
    """
    short, long = (
        _MS * robust_mean([p.one_way_s for p in pings]) for _, pings in (small, large)
    )
    per_byte = max(0.0, (long - short) / (large[0] - small[0]))
    bandwidth = 1 / per_byte if per_byte > 1 / FASTEST else FASTEST
    delay = max(0.0, short - small[0] / bandwidth)
    send = robust_mean([p.send_s for p in large[1]])
    return Link(delay, bandwidth, _MS * send)


def measure_links(
    executors: Mapping[int, Executor], placement: Placement, n_bytes: int
) -> dict[tuple[int, int], Link]:
    """Measure the links of a placement, one after the other (every rank must call).

    Returns:
        By pair of stages, the lower one first; none if all are in one process.
    """
    pairs = sorted({(min(e), max(e)) for e in pairwise(placement.stage_of)})
    pairs = [pair for pair in pairs if pair[0] != pair[1]]
    if len(executors) > 1 or not pairs:
        return {}
    ((stage, executor),) = executors.items()
    measured: dict[tuple[int, int], Link] = {}
    sizes = (_SMALL, max(_LARGE, n_bytes))
    for pair in pairs:
        executor.transport.gather(None)
        if stage not in pair:
            continue
        peer = pair[1] if stage == pair[0] else pair[0]
        leads = stage == pair[0]
        pings = [
            (size, _ping(executor, peer, size, _ROUNDS.get(size, _FEW), leads=leads))
            for size in sizes
        ]
        if leads:
            measured[pair] = fit(*pings)
    links: dict[tuple[int, int], Link] = {}
    for part in executor.transport.gather(measured):
        links |= part
    return links


def _ping(
    executor: Executor, peer: int, n_bytes: int, rounds: int, *, leads: bool
) -> list[Ping]:
    """Time messages to and fro, on the end that leads; the first one warms up."""
    transport, device = executor.transport, executor.stage.device
    tensors = (torch.zeros(max(1, n_bytes // 8), dtype=torch.float64, device=device),)
    expected = transport.post(_MESSAGE, peer, tensors)
    pings = []
    for number in range(rounds + 1):
        start = time.perf_counter()
        if not leads:
            expected.receive("a ping")
            if number < rounds:
                expected = transport.post(_MESSAGE, peer, tensors)
        sends = time.perf_counter()
        transport.send(_MESSAGE, tensors, peer)
        send_s = time.perf_counter() - sends
        if leads:
            expected.receive("a ping")
            if runs_ahead(device):
                torch.accelerator.synchronize(device)
            pings.append(Ping((time.perf_counter() - start) / 2, send_s))
            if number < rounds:
                expected = transport.post(_MESSAGE, peer, tensors)
    transport.flush()
    return pings[1:]


def link_list(
    links: Mapping[tuple[int, int], Link], n_stages: int, name: str
) -> float | tuple[float, ...]:
    """One figure of every link, as `zbpp.core.costs.columns` lists them.

    A link that was not measured takes the median of those that were.
    """
    if not links:
        return 0.0
    usual = median(getattr(link, name) for link in links.values())
    ends = [(stage, stage + 1) for stage in range(n_stages - 1)]
    if n_stages > 2 and (0, n_stages - 1) in links:
        ends.append((0, n_stages - 1))
    return tuple(
        getattr(links[pair], name) if pair in links else usual for pair in ends
    )
