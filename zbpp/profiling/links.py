"""Delay and bandwidth of the links between neighbouring stages.

A message of n bytes takes delay + n / bandwidth, one way. Both follow from the means
of two sizes, sent to and fro while the other stages wait:

    time  |            x  the size of the largest message, or more
          |     .
          |  x           a few bytes: the delay
          +--------------- bytes
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from zbpp.core import Placement
from zbpp.core.measured import robust_mean
from zbpp.runtime.comm.ping import Ping
from zbpp.runtime.executor import Executor

__all__ = ["FASTEST", "Link", "fit", "link_list", "measure_links"]

_SMALL, _LARGE = 64, 2**20
_ROUNDS = {_SMALL: 30}
_FEW = 10
_MS = 1e3
FASTEST = 1e15
"""Bytes in a ms where a large message took no longer than a small one."""


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
        pings = [
            (size, executor.transport.ping(peer, size, _ROUNDS.get(size, _FEW)))
            for size in sizes
        ]
        if stage == pair[0]:
            measured[pair] = fit(*pings)
    links: dict[tuple[int, int], Link] = {}
    for part in executor.transport.gather(measured):
        links |= part
    return links


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
