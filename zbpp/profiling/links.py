"""Links between neighbouring stages, and the sum over all stages, measured alone.

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

import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch

from zbpp.core import Link, Placement, RequestError, TiedGradient, fit_link
from zbpp.profiling.means import robust_mean
from zbpp.runtime.executor import Executor
from zbpp.runtime.support.devices import runs_ahead

_SMALL, _LARGE = 64, 2**20
_ROUNDS = {_SMALL: 30}
_FEW = 10
_LOSSES = 64
"""Numbers of a step's sum in addition to the norms, more or less."""
_MS = 1e3
FASTEST = 1e15
"""Bytes in a ms where a large message took no longer than a small one."""


_MESSAGE = TiedGradient(0, 0)
"""Both ends know its shapes, so that no header is sent."""


@dataclass(frozen=True)
class Wires:
    """Links between the stages; times in ms, sizes in bytes.

    Args:
        links: by pair of stages, alpha in ms and bytes in a ms; none where all stages
            are in one process.
        reduction: the sum over the stages.
        message: bytes that each chunk puts out.
        one_clock: all stages read the same clock.
    """

    links: Mapping[tuple[int, int], Link]
    reduction: float
    message: Mapping[int, int]
    one_clock: bool

    def hop(self, pair: tuple[int, int], n_bytes: float | None = None) -> float:
        """Time of a message between two stages; without a size, of the largest."""
        link = self.links.get((min(pair), max(pair)))
        if n_bytes is None:
            n_bytes = max(self.message.values(), default=0)
        return 0.0 if link is None else link.time(n_bytes)


def measure_wires(executors: Mapping[int, Executor], placement: Placement) -> Wires:
    """Measure links and the sum, between two steps (every rank must call).

    Args:
        executors: of this process; they have taken a step.
        placement: of the chunks.
    """
    transport = next(iter(executors.values())).transport
    parts = transport.gather((platform.node(), dict(transport.message_bytes())))
    message = {chunk: n_bytes for _, part in parts for chunk, n_bytes in part.items()}
    return Wires(
        _measure_links(executors, placement, max(message.values(), default=0)),
        _measure_sum(executors, placement.n_chunks + _LOSSES),
        message,
        one_clock=len({machine for machine, _ in parts}) == 1,
    )


def _measure_links(
    executors: Mapping[int, Executor], placement: Placement, n_bytes: int
) -> dict[tuple[int, int], Link]:
    """Measure the links of a placement, one after the other.

    Returns:
        By pair of stages, the lower one first; none if all are in one process.
    """
    pairs = sorted({(min(e), max(e)) for e in pairwise(placement.stage_of)})
    pairs = [pair for pair in pairs if pair[0] != pair[1]]
    if len(executors) > 1 or not pairs:
        return {}
    ((stage, executor),) = executors.items()
    measured: dict[tuple[int, int], Link] = {}
    for pair in pairs:
        executor.transport.gather(None)
        if stage not in pair:
            continue
        small, large = (
            (size, _ping(executor, sum(pair) - stage, size, leads=stage == pair[0]))
            for size in (_SMALL, max(_LARGE, n_bytes))
        )
        if stage == pair[0]:
            measured[pair] = _fit(small, large)
    links: dict[tuple[int, int], Link] = {}
    for part in executor.transport.gather(measured):
        links |= part
    return links


def _fit(small: tuple[float, float], large: tuple[float, float]) -> Link:
    """Find delay and bandwidth from the times of two sizes, in ms.

    >>> link = _fit((64, 1.0), (1000064, 3.0))
    >>> round(link.alpha, 3), round(link.bandwidth)
    (1.0, 500000)
    >>> _fit((64, 1.0), (1000064, 0.9)).alpha
    1.0
    """
    try:
        return fit_link([small, large])
    except RequestError:  # the large one takes no longer
        return Link(small[1], FASTEST)


def _ping(executor: Executor, peer: int, n_bytes: int, *, leads: bool) -> float:
    """Time messages to and fro, on the end that leads; the first one warms up."""
    transport, device = executor.transport, executor.stage.device
    tensors = (torch.zeros(max(1, n_bytes // 8), dtype=torch.float64, device=device),)
    expected = transport.post(_MESSAGE, peer, tensors)
    one_way = []
    rounds = _ROUNDS.get(n_bytes, _FEW)
    for number in range(rounds + 1):
        start = time.perf_counter()
        if leads:
            transport.send(_MESSAGE, tensors, peer)
        expected.receive("a ping")
        if leads and runs_ahead(device):
            torch.accelerator.synchronize(device)
        one_way.append(_MS * (time.perf_counter() - start) / 2)
        if number < rounds:
            expected = transport.post(_MESSAGE, peer, tensors)
        if not leads:
            transport.send(_MESSAGE, tensors, peer)
    transport.flush()
    return robust_mean(one_way[1:])


def _measure_sum(executors: Mapping[int, Executor], length: int) -> float:
    """Time the sum of a vector over the stages, in ms.

    From the start of the stage that is the last one: that stage waits the least, so no
    two clocks are compared. In one process there is nothing to wait for.
    """
    if len(executors) > 1:
        return 0.0
    (executor,) = executors.values()
    transport, times = executor.transport, []
    vector = torch.zeros(length, dtype=torch.float64, device=executor.stage.device)
    for _ in range(_FEW + 1):
        transport.gather(None)
        start = time.perf_counter()
        transport.reduce(vector.clone()).result()
        times.append(_MS * (time.perf_counter() - start))
    transport.end()
    least = [min(row) for row in zip(*transport.gather(times), strict=True)]
    return robust_mean(least[1:])


def link_list(
    links: Mapping[tuple[int, int], Link], n_stages: int, name: str
) -> float | tuple[float, ...]:
    """One figure of every link, as `zbpp.core.columns` lists them.

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
