"""The oracle of the simulator's times: the longest path through the graph of the jobs.

    0F0 --1.2--> 1F0 --1--> 1B0 --1.2--> 0B0     an edge is a wait: for the end of a
     |            |          |            |      job, plus the message's delay if the
     v            v          v            v      two are on different stages
    0F1          1F1        1W0          0W0     down: the order on each stage

It shares nothing with the engine but the costs of a job and what a pass reads and
writes. UNSHARD and REDUCE_GRAD form a separate chain on each stage: each starts
when the stage has come to it and the one before it has ended. A pair of passes is in
both chains, as it exchanges data too. The jobs of an iteration
follow those of the one before on their stage. O behind a barrier, or V of the next
iteration, waits until all stages have ended their passes and the norms are summed.
"""

from graphlib import TopologicalSorter
from math import inf

from zbpp.core import (
    Check,
    Collective,
    CollectiveKind,
    Pair,
    PassKind,
    Step,
    passes_in,
    reads,
    writes,
)

_BESIDE = CollectiveKind.UNSHARD, CollectiveKind.REDUCE_GRAD


class Events:
    """Starts and ends of the jobs of iterations; a job is (iteration, stage, number).

    Args:
        free: when each stage may start, and when the first V knows the sum.
        reduction: the time of the sum over all stages.
    """

    def __init__(self, schedule, costs, n_iterations=1, *, free=None, reduction=0.0):
        self.schedule, self.times = schedule, costs.on(schedule.placement)
        self.n_iterations, self.reduction = n_iterations, reduction
        self.waits, self.last = {}, []  # (job, delay) by job; the last one of a stage
        *self.free, self.verdict = free or [0.0] * (schedule.n_stages + 1)
        for iteration in range(n_iterations):
            self._add(iteration)
        self.start, self.end = {}, {}
        graph = {job: {j for j, _ in waits} for job, waits in self.waits.items()}
        for node in TopologicalSorter(graph).static_order():
            iteration, stage, _ = node
            starts = [self.end[job] + delay for job, delay in self.waits[node]]
            if iteration == 0:
                is_check = isinstance(self.job(node), Check)
                starts += [self.free[stage]] + [self.verdict] * is_check
            self.start[node] = max(starts)
            self.end[node] = self.start[node] + self.times.of(self.job(node))

    def job(self, node):
        _, stage, number = node
        return self.schedule.orders[stage][number]

    def _add(self, iteration):
        """Add an iteration's jobs, and what each waits for."""
        n_chunks = self.schedule.placement.n_chunks
        is_checked = Check(0) in self.schedule.orders[0]
        sums_before = [(job, self.reduction) for job in self.last]
        written, steps, self.last = {}, [], []
        for stage, order in enumerate(self.schedule.orders):
            step_before = iteration - 1, stage, len(order) - 1
            before = [(step_before, 0.0)] if iteration else []
            lane, begun = before, {}
            for number, job in enumerate(order):
                node, waits = (iteration, stage, number), list(before)
                match job:
                    case Collective(kind=CollectiveKind.RESHARD):
                        self.waits[node] = waits
                        continue
                    case Collective() if job.kind in _BESIDE:
                        self.waits[node] = waits + lane
                        lane = begun[job.kind, job.chunk] = [(node, 0.0)]
                        continue
                    case Collective():
                        waits += begun[CollectiveKind.REDUCE_GRAD, job.chunk]
                    case Check():
                        waits += sums_before
                    case Step():
                        self.last += [last for last, _ in before]
                        steps += [node] * (not is_checked)
                for part in passes_in(job):
                    if part.kind is not PassKind.W:
                        waits += begun.get((CollectiveKind.UNSHARD, part.chunk), [])
                    written |= dict.fromkeys(writes(part, n_chunks), node)
                before = [(node, 0.0)]
                if isinstance(job, Pair):
                    waits, lane = waits + lane, before
                self.waits[node] = waits
        for step in steps:
            self.waits[step] += [(last, self.reduction) for last in self.last]
        for node in [node for node in self.waits if node[0] == iteration]:
            for part in passes_in(self.job(node)):
                for value in reads(part, n_chunks):
                    delay = self.times.delay(value.chunk, part.chunk)
                    self.waits[node].append((written[value], delay))

    @property
    def length(self):
        """The time at which the last job ends."""
        return max(self.end.values())

    @property
    def left(self):
        """What the last iteration leaves: ends of the stages, and the sum's time."""
        i, orders = self.n_iterations - 1, self.schedule.orders
        ends = [self.end[i, stage, len(row) - 1] for stage, row in enumerate(orders)]
        return [*ends, max(self.end[job] for job in self.last) + self.reduction]

    def starts(self, stage, *, beside=False):
        """Starts of a stage's jobs in their order, or of its collectives."""
        return [
            (job, self.start[i, stage, number])
            for i in range(self.n_iterations)
            for number, job in enumerate(self.schedule.orders[stage])
            if isinstance(job, Collective) == beside
            if not beside or job.kind in _BESIDE
        ]


def period(schedule, costs):
    """The time of an iteration among many: the largest mean of a cycle.

    Karp's theorem (1978) on the matrix of the max-plus map of one iteration. Entry
    (i, j): how much later than j alone was ready is i, an iteration later.
    """
    n, much = schedule.n_stages + 1, 1e6
    reduction, columns = costs.on(schedule.placement).reduction, []
    for j in range(n):
        free = [much if i == j else 0.0 for i in range(n)]
        left = Events(schedule, costs, free=free, reduction=reduction).left
        columns.append([end - much if end >= much else -inf for end in left])
    walks = [[0.0] + [-inf] * (n - 1)]
    for _ in range(n):
        walks.append(
            [max(walks[-1][j] + columns[j][i] for j in range(n)) for i in range(n)]
        )
    return max(
        min((walks[n][i] - walks[k][i]) / (n - k) for k in range(n))
        for i in range(n)
        if walks[n][i] > -inf
    )
