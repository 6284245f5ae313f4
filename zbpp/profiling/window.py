"""Costs from the last steps of a training that goes on.

    passes       medians of F, B, W; with what the host needs between two jobs
    O, V         medians, the wait for the sum not in them; O with the norms
    messages     delay and bandwidth of the links, measured once between two steps
    reduction    the sum over the stages, likewise

The times of the passes are noted anyway, so that a window costs one gather. What the
host needs between two jobs is seen where a job waits for no message: before a W.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from zbpp.core import Check, Costs, Pass, PassKind, Placement, Slot, Step, Timeline
from zbpp.core.costs import PerChunk
from zbpp.core.measured import measured_costs
from zbpp.profiling.links import Link, measure_links
from zbpp.profiling.steps import time_reduction
from zbpp.runtime.executor import Executor

__all__ = ["Wires", "host_gap", "measure_wires", "together", "window_costs"]

_MS = 1e3
_REDUCTIONS = 10


@dataclass(frozen=True)
class Wires:
    """Links between the stages; times in ms, sizes in bytes."""

    links: Mapping[tuple[int, int], Link]
    reduction: float
    message: Mapping[int, int]

    def hops(self, placement: Placement) -> tuple[float, ...]:
        """Time of a message on each edge between two chunks."""
        hops = []
        for chunk, ends in enumerate(pairwise(placement.stage_of)):
            link = self.links.get((min(ends), max(ends)))
            hops.append(0.0 if link is None else link.time(self.message.get(chunk, 0)))
        return tuple(hops)


def measure_wires(executors: Mapping[int, Executor], placement: Placement) -> Wires:
    """Measure links and the sum, between two steps (every rank must call)."""
    transport = next(iter(executors.values())).transport
    message: dict[int, int] = {}
    for part in transport.gather(transport.message_bytes()):
        message |= part
    links = measure_links(executors, placement, max(message.values(), default=0))
    n_numbers = placement.n_chunks + 64  # as long as that of a step, more or less
    reduction = time_reduction(executors, n_numbers, _REDUCTIONS)
    return Wires(links, reduction.median, message)


def window_costs(
    timelines: Sequence[Timeline],
    norms: Mapping[int, Sequence[float]],
    *,
    splits: Sequence[bool],
    wires: Wires | None,
    joint: bool = False,
) -> Costs:
    """Costs in ms, per chunk.

    Args:
        timelines: of the steps of a window, in seconds.
        norms: seconds that the norms of each stage's gradients took.
        splits: for each stage whether W has anything to do.
        wires: None: messages and sums take no time.
        joint: let B stand for BW where the schedule has such passes.

    Raises:
        RequestError: the schedule has passes that run B and W together.
    """
    placement = timelines[0].placement
    if joint:
        timelines = [together(one) for one in timelines]
    told = None if all(splits) else list(splits)
    costs = measured_costs(timelines, splits=told)
    gaps = [host_gap([one.rows[s] for one in timelines])
            for s in range(placement.n_stages)]  # fmt: skip
    add = [_MS * gaps[stage] for stage in placement.stage_of]
    steps = [_median(timelines, stage, Step) for stage in range(placement.n_stages)]
    optimizer = [
        _MS * (step + (median(norms[stage]) if norms.get(stage) else 0.0))
        for stage, step in enumerate(steps)
    ]
    checks = [_median(timelines, stage, Check) for stage in range(placement.n_stages)]
    shares = [len(placement.chunks_of[stage]) for stage in placement.stage_of]
    return replace(
        costs,
        f=_sums(costs.f, add),
        b=_sums(costs.b, add),
        w=_sums(costs.w, add),
        optimizer=tuple(
            optimizer[stage] / share
            for stage, share in zip(placement.stage_of, shares, strict=True)
        ),
        validation=_MS * max(checks),
        comm=(0.0 if wires is None else wires.hops(placement)) or 0.0,
        reduction=0.0 if wires is None else wires.reduction,
    )


def _sums(times: PerChunk, more: Sequence[float]) -> tuple[float, ...]:
    assert isinstance(times, tuple), "one entry per chunk was measured"
    return tuple(one + other for one, other in zip(times, more, strict=True))


def host_gap(rows: Sequence[Sequence[Slot]]) -> float:
    """Seconds between two jobs of one stage, where the second one waits for nothing.

    That is before a W; where there is none, the shortest tenth of all gaps.
    """
    gaps: dict[bool, list[float]] = defaultdict(list)
    for row in rows:
        for before, after in pairwise(row):
            if isinstance(before.job, Pass) and isinstance(after.job, Pass):
                is_w = after.job.kind is PassKind.W
                gaps[is_w].append(max(0.0, after.start - before.end))
    if gaps[True]:
        return median(gaps[True])
    others = sorted(gaps[False])
    return others[len(others) // 10] if others else 0.0


def together(timeline: Timeline) -> Timeline:
    """The same with every BW as a B, and a W of no time after it."""
    return replace(timeline, rows=tuple(tuple(_apart(row)) for row in timeline.rows))


def _apart(row: Sequence[Slot]) -> list[Slot]:
    found = []
    for slot in row:
        job = slot.job
        if isinstance(job, Pass) and job.kind is PassKind.BW:
            found.append(replace(slot, job=replace(job, kind=PassKind.B)))
            late = replace(job, kind=PassKind.W)
            found.append(Slot(late, slot.end, slot.end))
        else:
            found.append(slot)
    return found


def _median(timelines: Sequence[Timeline], stage: int, kind: type) -> float:
    found = [
        slot.duration
        for timeline in timelines
        for slot in timeline.rows[stage]
        if isinstance(slot.job, kind)
    ]
    return median(found) if found else 0.0
