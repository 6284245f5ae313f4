"""Bounds for passes in parts, which overlap on the two lanes of a stage.

Times of a pass are of two kinds here: its *length*, all parts in a row, is what a
micro-batch needs on its way (`Way`), and its *compute* is what it takes of the lane
that computes. Parts of several passes may alternate, so nothing here says that a pass
keeps others from running.

Notation of a stage as in `zbpp.core.bounds`; a is its first chunk, z its last one.
"""

import math

from zbpp.core.bounds.stage import MARGIN, Way
from zbpp.core.costs import ChunkCosts
from zbpp.core.jobs import Lane, Pass, PassKind

_F, _B, _W = _KINDS = PassKind.F, PassKind.B, PassKind.W


def bounds_on_lanes(costs: ChunkCosts, n_microbatches: int) -> dict[str, float]:
    """Bound the largest span of every schedule of parts, one entry per proof."""
    way = Way(costs)
    stages = [_Stage(costs, way, chunks, n_microbatches) for chunks in way.chunks_of]
    bounds = (_Stage.ramp, _Stage.network, _Stage.rounds)
    return {bound.__name__: max(map(bound, stages)) for bound in bounds}


class _Stage:
    """One stage, and the sums that its bounds share."""

    def __init__(
        self, costs: ChunkCosts, way: Way, chunks: tuple[int, ...], m: int
    ) -> None:
        self.costs, self.way, self.chunks, self.m = costs, way, chunks, m
        limit = costs.limit[costs.placement.stage_of[chunks[0]]]
        self.limit = limit * (1 + MARGIN)

    def _sum(self, kind: PassKind, chunk: int, lane: Lane = Lane.COMPUTE) -> float:
        return self.costs.parts[chunk].on_lane(kind, lane)

    def _loop(self, c: int) -> float:
        return self.way.end(-1 - c) - self.way.start[c]

    def ramp(self) -> float:
        """Bound by the work, and what the stage waits before its first B computes.

        The first B is one of z. It starts when a micro-batch has gone the way from F of
        a to there; and what it exchanges first is still to come. Until then the stage
        computes F's alone, no more than there are, and than fit in memory.
        """
        a, z = self.chunks[0], self.chunks[-1]
        way = self.way.start[-1 - z] - self.way.start[a]
        way += _lead(self.costs, Pass(_B, z, 0), Lane.COMPUTE)
        each = [self._sum(_F, c) for c in self.chunks]
        forwards = self.m * sum(each)
        least = min(self.costs.m_b[c] for c in self.chunks)
        if least > 0 and self.limit < math.inf:
            forwards = min(forwards, math.floor(self.limit / least) * max(each))
        work = self.m * sum(self._sum(kind, c) for kind in _KINDS for c in self.chunks)
        return work + max(0.0, way - forwards)

    def network(self) -> float:
        """Bound by all that it exchanges, and what comes before.

        The span starts with an F of a (all other passes need one), so with its parts
        before the first exchange.
        """
        lanes = [(kind, c, Lane.NETWORK) for kind in _KINDS for c in self.chunks]
        exchanged = self.m * sum(self._sum(*each) for each in lanes)
        lead = _lead(self.costs, Pass(_F, self.chunks[0], 0), Lane.NETWORK)
        return exchanged + lead if exchanged else 0.0

    def rounds(self) -> float:
        """Bound by memory, which lets few micro-batches into the loop of a at a time.

        If K fit, then when the (i + K)-th F of a starts, i B's of a have ended, each a
        loop or more after its F: so that start is a loop or more after the i-th. From
        the last of these rounds on, the micro-batches that are left go the way; or all
        do, after none.
        """
        a = self.chunks[0]
        held = self.costs.m_b[a]
        longest = self._way_of(self.m)
        if held > 0 and self.limit < math.inf:
            fits = math.floor(self.limit / held)
            n_rounds, rest = divmod(self.m - 1, max(1, fits))
            longest = max(longest, n_rounds * self._loop(a) + self._way_of(rest + 1))
        return longest

    def _way_of(self, n: int) -> float:
        """Least time from the first F of a to the last B of a, of n micro-batches.

        Of every stage whose first chunk c is not before a: all that it computes for F's
        and B's lies between the first F of c and the last B of c; and the ways from a's
        F to c's, and back from c's B to a's, lie outside. Or one goes the way.
        """
        a, way = self.chunks[0], self.way
        longest = self._loop(a)
        for chunks in way.chunks_of:
            if chunks[0] >= a:
                busy = sum(self._sum(kind, c) for kind in (_F, _B) for c in chunks)
                outside = way.around(chunks[0]) - way.around(a)
                longest = max(longest, outside + n * busy)
        return longest


def _lead(costs: ChunkCosts, of: Pass, lane: Lane) -> float:
    """Time of the parts of a pass before the first one on a lane."""
    lead = 0.0
    for on, time in costs.parts_of(of):
        if on is lane:
            break
        lead += time
    return lead
