"""Bounds for passes in parts, which overlap on the two lanes of a stage.

Times of a pass are of two kinds here: its *length*, all parts in a row, is what a
micro-batch needs on its way (`PathLengths`), and its *compute* is what it takes of the
lane that computes. Parts of several passes may alternate, so nothing here says that a
pass keeps others from running.

Notation of a stage as in `zbpp.core.bounds`; a is its first chunk, z its last one.
"""

import math

from zbpp.core.bounds.paths import MARGIN, PathLengths
from zbpp.core.costs.chunks import ChunkCosts
from zbpp.core.jobs import Lane, Part, Pass, PassKind

__all__ = ["bounds_on_lanes"]

_F, _B, _W = PassKind.F, PassKind.B, PassKind.W


def bounds_on_lanes(costs: ChunkCosts, n_microbatches: int) -> dict[str, float]:
    """Bound the largest span of every schedule of parts, one entry per proof.

    Args:
        costs: joined, with parts.
        n_microbatches: in a step.
    """
    paths = PathLengths(costs)
    stages = [
        _Stage(paths, index, n_microbatches) for index in range(len(paths.chunks_of))
    ]
    bounds = (
        _Stage.work,
        _Stage.network,
        _Stage.front,
        _Stage.bottleneck,
        _Stage.cycle,
        _Stage.area,
    )
    return {bound.__name__: max(map(bound, stages)) for bound in bounds}


class _Stage:
    """One stage, and the sums that its bounds share."""

    def __init__(self, paths: PathLengths, index: int, m: int) -> None:
        self.paths, self.m = paths, m
        self.costs, self.chunks = paths.costs, paths.chunks_of[index]
        self.limit = self.costs.limit[index] * (1 + MARGIN)
        self.last_w = self._w_after(self.chunks[0])

    def _sum(self, kind: PassKind, chunk: int, lane: Lane) -> float:
        return self.costs.parts[chunk].on_lane(kind, lane)

    def _on_lane(self, lane: Lane) -> float:
        """Time of a micro-batch's passes on a lane."""
        kinds = (_F, _B, _W)
        return sum(self._sum(kind, c, lane) for kind in kinds for c in self.chunks)

    def work(self) -> float:
        """Bound by all that the stage computes."""
        return self.m * self._on_lane(Lane.COMPUTE)

    def network(self) -> float:
        """Bound by all that it exchanges, what comes before, and what must follow.

        The span starts with an F of a (all other passes need one), so with its parts
        before the first exchange. The last exchange is one of a B, whose F and all else
        came before: the B's later parts follow, and the parts of W that need these.
        """
        lead = 0.0
        for lane, time in self.costs.parts_of(Pass(_F, self.chunks[0], 0)):
            if lane is Lane.NETWORK:
                break
            lead += time
        after = min(self._after_exchange(chunk) for chunk in self.chunks)
        exchanged = self.m * self._on_lane(Lane.NETWORK)
        return exchanged + lead + after if exchanged else 0.0

    def _after_exchange(self, chunk: int) -> float:
        """The time of a B and its W after the last exchange; 0 if W exchanges too.

        Of a chunk that exchanges nothing nothing follows an exchange: infinite.
        """
        exchanges = {k for k in (_F, _B, _W) if self._sum(k, chunk, Lane.NETWORK)}
        if not exchanges:
            return math.inf
        if exchanges - {_F} != {_B}:
            return 0.0
        b = self.costs.parts_of(Pass(_B, chunk, 0))
        last = max(
            i for i, (lane, time) in enumerate(b) if lane is Lane.NETWORK and time
        )
        return sum(time for _, time in b[last + 1 :]) + self._w_from(chunk, last + 1)

    def _w_from(self, chunk: int, first: int) -> float:
        """Time of W's parts that need a part of B from ``first`` on."""
        w = Pass(_W, chunk, 0)
        return sum(
            time
            for i, (lane, time) in enumerate(self.costs.parts_of(w))
            if self.costs.source_of(Part(w, i, lane)) >= first
        )

    def _w_after(self, chunk: int) -> float:
        """Time of W's parts that need the last part of B."""
        n_parts = len(self.costs.parts_of(Pass(_B, chunk, 0)))
        return self._w_from(chunk, n_parts - 1)

    def front(self) -> float:
        """Bound by the work, and what the stage waits before its first B computes.

        The first B is one of z. It starts when a micro-batch has gone the way from F of
        a to there; and what it exchanges first is still to come. Until then the stage
        computes F's alone, no more than there are, and than fit in memory.
        """
        a, z = self.chunks[0], self.chunks[-1]
        end = self.paths.last_chunk
        way = self.paths.starts[2 * end + 1 - z] - self.paths.down[a]
        for lane, time in self.costs.parts_of(Pass(_B, z, 0)):
            if lane is Lane.COMPUTE:
                break
            way += time
        each = [self._sum(_F, c, Lane.COMPUTE) for c in self.chunks]
        forwards = self.m * sum(each)
        least = min(self.costs.m_b[c] for c in self.chunks)
        if least > 0 and self.limit < math.inf:
            forwards = min(forwards, math.floor(self.limit / least) * max(each))
        return self.work() + max(0.0, way - forwards)

    def bottleneck(self) -> float:
        """Bound by what all micro-batches take through a stage."""
        return self.way_of(self.m) + self.last_w

    def way_of(self, n: int) -> float:
        """Least time from the first F of a to the last B of a, of n micro-batches.

        Of every stage k whose first chunk c is not before a: all that k computes for
        F's and B's lies between the first F of c and the last B of c; and the ways from
        a's F to c's, and back from c's B to a's, lie outside. Or one goes the way.
        """
        a, paths = self.chunks[0], self.paths
        longest = paths.loop(a)
        for chunks in paths.chunks_of:
            if chunks[0] >= a:
                busy = sum(
                    self._sum(kind, c, Lane.COMPUTE)
                    for kind in (_F, _B)
                    for c in chunks
                )
                way = paths.down[chunks[0]] - paths.down[a]
                way += paths.up[chunks[0]] - paths.up[a]
                longest = max(longest, way + n * busy)
        return longest

    def cycle(self) -> float:
        """Bound by memory, which lets few micro-batches into the loop of a at a time.

        If K fit, then when the (i + K)-th F of a starts, i B's of a have ended, each a
        loop or more after its F: so that start is a loop or more after the i-th. From
        the last of these rounds on, the micro-batches that are left go the way.
        """
        held = self.costs.m_b[self.chunks[0]]
        if held <= 0 or self.limit == math.inf:
            return 0.0
        fits = math.floor(self.limit / held)
        rounds, rest = divmod(self.m - 1, max(1, fits))
        loop = self.paths.loop(self.chunks[0])
        return rounds * loop + self.way_of(rest + 1) + self.last_w

    def area(self) -> float:
        """Bound by the memory that is held, over time: m_b of each chunk for a loop."""
        if not 0 < self.limit < math.inf:
            return 0.0
        held = sum(self.costs.m_b[c] * self.paths.loop(c) for c in self.chunks)
        return self.m * held / self.limit
