"""Memory of a stage along its order: by the order alone, not by the times.

Passes in one piece run one after the other. Where they overlap on two lanes, a pass
takes its memory when its first part starts, and frees it when its last part has ended.
Passes start in the order of the row. When a pass starts, other parts count as ended
only if they must have ended, however long all parts take: those before it on its lane,
those that compute its input on the stage, their predecessors, and those that had ended
when the pass before it started.

    compute  F0.0        B0.1  F1.0          B0.1 is before F1.0 on the lane, so F1
    network        B0.0~                     can use the memory that B0 frees

    compute  F0.0        F1.0                F1.0 may start while B0.1~ still runs: it
    network        B0.0~ B0.1~               needs room next to B0
"""

from collections.abc import Sequence

from zbpp.core.costs import ChunkCosts
from zbpp.core.graph import JobGraph, unit_times
from zbpp.core.jobs import Job, Lane, Part, Pass, lanes_of


def memory_during(
    order: Sequence[Job], costs: ChunkCosts, *, stage: int
) -> list[float]:
    """Largest memory of a stage during each of its jobs, fixed memory included."""
    memory = costs.fixed[stage]
    during = []
    looked_up: dict[object, tuple[float, float]] = {}
    for job in order:
        key: object = job
        if job.__class__ is Pass:
            key = job.kind, job.chunk
        elif job.__class__ is Part:
            return _memory_on_lanes(order, costs, stage=stage)
        amounts = looked_up.get(key)
        if amounts is None:
            amounts = looked_up[key] = costs.peak(job), costs.change(job)
        peak, change = amounts
        during.append(memory + peak)
        memory += change
    return during


def peaks(orders: Sequence[Sequence[Job]], costs: ChunkCosts) -> list[float]:
    """Largest memory of each stage, in the unit of the costs."""
    return [
        max(memory_during(order, costs, stage=stage), default=costs.fixed[stage])
        for stage, order in enumerate(orders)
    ]


def _memory_on_lanes(
    row: Sequence[Job], costs: ChunkCosts, *, stage: int
) -> list[float]:
    """Largest memory of a stage from each part of a row on, fixed memory included.

    ``starts`` and ``ends`` count the parts on each lane that must have ended by then.
    """
    rows = [row if s == stage else () for s in range(costs.placement.n_stages)]
    graph = JobGraph(rows, unit_times(costs.placement, rows))
    last: dict[Job, int] = {
        part.of: column for column, part in enumerate(row) if isinstance(part, Part)
    }
    starts: list[list[int]] = []
    ends: list[list[int]] = []
    counts = [0, 0]
    settled, running = costs.fixed[stage], dict[Job, tuple[int, int]]()
    during: list[float] = []
    for column, job in enumerate(row):
        lane = int(lanes_of(job)[0] is Lane.NETWORK)
        of: Job = job.of if isinstance(job, Part) else job
        n_ended = [0, 0]
        for wait in graph.waits(column):
            if wait.source == graph.all_gradients:
                n_ended = counts.copy()
            elif wait.source < len(row):  # on this stage
                known = (starts if wait.from_start else ends)[wait.source]
                n_ended = [*map(max, n_ended, known)]
        starts.append(n_ended)
        if isinstance(job, Part) and job.index:
            memory = during[-1]
        else:
            for running_job, (on, number) in list(running.items()):
                if number <= n_ended[on]:
                    settled += costs.change(running_job)
                    del running[running_job]
            memory = settled + sum(map(costs.peak, (*running, of)))
            running[of] = (0, 2**62)
        during.append(memory)
        counts[lane] += 1
        ends.append(n_ended.copy())
        ends[-1][lane] = counts[lane]
        if last.get(of, column) == column:
            running[of] = lane, counts[lane]
    return during
