"""Replicas of a stage: their shards, and times of their collectives.

========== =============================== ===========================
shard      each replica keeps              gradients are summed
========== =============================== ===========================
none       everything                      once, after the last W
optimizer  its part of the state           once, after the last W
gradients  its part of gradients too       after every W
parameters its part of parameters as well  after every W
========== =============================== ===========================

Also known as data parallelism and ZeRO 1, 2 and 3 (Rajbhandari et al., arXiv
1910.02054). With ``optimizer`` and ``gradients`` parameters are in parts between steps,
and whole from a chunk's first F to its last B.

A message of S bytes takes alpha + S / bandwidth (R. Hockney, "The communication
challenge for MPP", 1994). On n processes, of which each has S bytes at the end of an
all-gather, and at the start of a sum:

    ring        all-gather, reduce-scatter   (n-1) (alpha + S/n / bandwidth)
                all-reduce                   both, one after the other
    tree        all-gather, reduce-scatter   ceil(log2 n) alpha + (n-1)/n S / bandwidth
                all-reduce                   2 ceil(log2 n) (alpha + S / bandwidth)
    two levels  within nodes on all bytes, between them on each process's part

The ring is P. Patarasu and X. Yuan, "Bandwidth optimal all-reduce algorithms", 2009;
the tree's gathers (recursive doubling and halving) and its sum (binomial, there and
back) are R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective
communication operations in MPICH", 2005.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, get_args

import numpy as np

from zbpp.core.errors import RequestError

Shard = Literal["none", "optimizer", "gradients", "parameters"]
"""State that is divided among replicas; each word includes the words before."""

SHARDS: tuple[Shard, ...] = get_args(Shard)


def reduces_every(shard: str) -> bool:
    """True if gradients are summed after every W, not after the last."""
    return shard in ("gradients", "parameters")


class CollectiveOperation(StrEnum):
    """Operations among processes that all have, or get, S bytes."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"


@dataclass(frozen=True)
class Link:
    """A connection between two processes: alpha + S / bandwidth for S bytes.

    Args:
        alpha: time of an empty message, in any unit.
        bandwidth: bytes in that unit of time.

    Raises:
        RequestError: a number is none.
    """

    alpha: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.alpha) and self.alpha >= 0):
            raise RequestError(f"alpha is {self.alpha!r}; it must be at least 0")
        if not self.bandwidth > 0:
            raise RequestError(f"bandwidth is {self.bandwidth!r}; it must be above 0")

    def time(self, n_bytes: float) -> float:
        """Time of one message."""
        return self.alpha + n_bytes / self.bandwidth


def fit_link(messages: Sequence[tuple[float, float]]) -> Link:
    """Find alpha and bandwidth of measured messages: (bytes, time) of each.

    Errors count by their share of the time, as sizes lie orders of magnitude apart.

    >>> link = fit_link([(1e6, 1e6 / 30e9), (128e6, 128e6 / 130e9)])
    >>> f"{link.alpha * 1e6:.1f} us, {link.bandwidth / 1e9:.1f} GB/s"
    '25.8 us, 133.5 GB/s'

    Raises:
        RequestError: there are not two sizes, a time is not above 0, or larger messages
            are no slower.
    """
    if len({size for size, _ in messages}) < 2:
        raise RequestError("alpha and bandwidth need messages of two sizes at least")
    if min(time for _, time in messages) <= 0:
        raise RequestError("a message takes no time; measure with a finer clock")
    times = np.array([time for _, time in messages])
    sizes = np.array([size for size, _ in messages])
    # Least squares of alpha / time + size / time / bandwidth against 1.
    terms = np.stack((1 / times, sizes / times), axis=1)
    alpha, slope = np.linalg.lstsq(terms, np.ones(len(times)), rcond=None)[0].tolist()
    if slope <= 0:
        raise RequestError(
            "larger messages take no longer than small ones; measure larger ones, "
            "where bandwidth counts"
        )
    if alpha < 0:  # a line through 0 is then the best
        alpha, slope = 0.0, terms[:, 1].sum() / np.square(terms[:, 1]).sum()
    return Link(alpha, float(1 / slope))


def collective_time(
    operation: CollectiveOperation,
    n_bytes: float,
    n: int,
    link: Link,
    *,
    node: int = 1,
    node_link: Link | None = None,
) -> float:
    """Time by the faster of ring and tree, on two levels if a node's link is given.

    Then ``node`` processes share that faster link, and each handles its part between
    the nodes: of a sum, a reduce-scatter in the node, the operation among nodes on a
    part of 1 / node, and an all-gather in the node. With no more processes than one
    node there is one level.

    Raises:
        RequestError: n is no multiple of node.
    """

    is_sum = operation is CollectiveOperation.ALL_REDUCE

    def faster(n_bytes: float, n: int, link: Link) -> float:
        ring = (1 + is_sum) * (n - 1) * link.time(n_bytes / n)
        steps = math.ceil(math.log2(n))
        if is_sum:
            return min(ring, 2 * steps * link.time(n_bytes))
        tree = steps * link.alpha + (n - 1) / n * n_bytes / link.bandwidth
        return min(ring, tree)

    if node_link is None:
        return faster(n_bytes, n, link)
    if n <= node:
        return faster(n_bytes, n, node_link)
    if n % node:
        raise RequestError(
            f"{n} processes do not fill nodes of {node}; take a multiple of {node}"
        )
    return faster(n_bytes / node, n // node, link) + faster(n_bytes, node, node_link)
