"""Costs of layers with experts, which exchange tokens, and peers' orders in groups."""

from zbpp.core import (
    Clock,
    Costs,
    Lane,
    Part,
    Parts,
    PassKind,
    Value,
    What,
    passes_in,
)
from zbpp.core.clock import by_clock

C, N = Lane.COMPUTE, Lane.NETWORK
F, B, W, BW = PassKind


def moe_costs(share, layers=4, **more):
    """A stage of layers with F = B = W = 1, of which F and B exchange more.

    Args:
        share: of exchanges in F and B.
        layers: of the stage.
        more: other costs.
    """
    half, exchange = 0.5 / layers, 0.5 * share / (1 - share) / layers
    f = ((C, half), (N, exchange), (C, half), (N, exchange))
    b = ((N, exchange), (C, half), (N, exchange), (C, half))
    return Costs(parts=Parts(f, b, ((C, half), (C, half)), layers), **more)


class GroupClock(Clock):
    """A clock for peers: a job of the order begins when all before it has ended.

    Args:
        schedule: laid out.
        costs: with parts.
        w_first: a gradient leaves only when W has ended too.
    """

    def __init__(self, schedule, costs, *, w_first):
        times = costs.on(schedule.placement)
        super().__init__(times, n_microbatches=schedule.n_microbatches)
        self.w_first, self.group, self.base = w_first, {}, {}
        for order in schedule.orders:
            for number, job in enumerate(order):
                for one in passes_in(job):
                    kinds = (B, W) if one.kind is BW else (one.kind,)
                    for kind in kinds:
                        self.group[kind, one.chunk, one.microbatch] = number

    def start(self, job):
        start = super().start(job)
        if start is None or not isinstance(job, Part):
            return start
        stage = self.stage(job)
        number = self.group[job.kind, job.chunk, job.of.microbatch]
        if self.base.get(stage, (None,))[0] != number:
            lanes = [self._lanes[lane][stage] for lane in (C, N)]
            self.base[stage] = number, max(lanes)
        return max(start, self.base[stage][1])

    def run(self, job):
        slot = super().run(job)
        if self.w_first and slot is not None and isinstance(job, Part):
            gradient = Value(What.GRADIENT, job.chunk, job.of.microbatch)
            if job.kind is W and gradient in self._written:
                self._written[gradient] = slot.end
        return slot


def span_in_groups(schedule, costs, *, w_first=False):
    """Longest span of a stage."""
    rows = by_clock(schedule.parts, GroupClock(schedule, costs, w_first=w_first))
    parts = [[slot for slot in row if isinstance(slot.job, Part)] for row in rows]
    return max(max(s.end for s in row) - min(s.start for s in row) for row in parts)
