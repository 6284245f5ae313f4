"""Costs from the last steps of a training that goes on.

    passes       means of F, B, W; with what the host needs between two jobs
    O, V         means, the wait for the sum not in them; O with the norms
    messages     as they were waited for, where the stages share a clock; else delay
                 and bandwidth of the links, measured once between two steps
    reduction    the sum over the stages, likewise

The times of the passes are noted anyway, so that a window costs one gather. Means are
those of `zbpp.core.measured.robust_mean`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from zbpp.core import Check, Costs, Pass, PassKind, Placement, Slot, Step, Timeline
from zbpp.core.costs import PerChunk
from zbpp.core.measured import measured_costs, robust_mean
from zbpp.profiling.links import Link, measure_links
from zbpp.profiling.steps import time_reduction
from zbpp.profiling.waits import HopTime, host_gaps, latencies
from zbpp.runtime.comm.clocks import clock_name
from zbpp.runtime.executor import Executor

__all__ = ["Wires", "measure_wires", "together", "window_costs"]

_MS = 1e3
_REDUCTIONS = 10


@dataclass(frozen=True)
class Wires:
    """Links between the stages; times in ms, sizes in bytes.

    Args:
        links: by pair of stages.
        reduction: the sum over the stages.
        message: bytes that each chunk puts out.
        one_clock: all stages read the same clock.
    """

    links: Mapping[tuple[int, int], Link]
    reduction: float
    message: Mapping[int, int]
    one_clock: bool = False

    def hops(self, placement: Placement) -> tuple[float, ...]:
        """Time of a message on each edge between two chunks."""
        size = self.message
        pairs = enumerate(pairwise(placement.stage_of))
        return tuple(self.time(*ends, size.get(chunk, 0)) for chunk, ends in pairs)

    def time(self, source: int, target: int, n_bytes: int | None = None) -> float:
        """Time of a message between two stages; None: of the largest."""
        if n_bytes is None:
            n_bytes = max(self.message.values(), default=0)
        link = self.links.get((min(source, target), max(source, target)))
        return 0.0 if link is None else link.time(n_bytes)


def measure_wires(executors: Mapping[int, Executor], placement: Placement) -> Wires:
    """Measure links and the sum, between two steps (every rank must call)."""
    transport = next(iter(executors.values())).transport
    message: dict[int, int] = {}
    for part in transport.gather(transport.message_bytes()):
        message |= part
    links = measure_links(executors, placement, max(message.values(), default=0))
    n_numbers = placement.n_chunks + 64  # as long as that of a step, more or less
    reduction = time_reduction(executors, n_numbers, _REDUCTIONS)
    clocks = {one for part in transport.gather([clock_name()]) for one in part}
    return Wires(links, reduction.mean, message, one_clock=len(clocks) == 1)


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
    gaps = [_MS * one for one in host_gaps(timelines, _hop_time(wires))]
    comm = 0.0 if wires is None else _hops(timelines, wires, gaps)
    runs_joint = any(_is_joint(slot) for row in timelines[0].rows for slot in row)
    if joint:
        timelines = [together(one) for one in timelines]
    told = None if all(splits) else list(splits)
    costs = measured_costs(timelines, splits=told)
    add = [gaps[stage] for stage in placement.stage_of]
    steps = [_mean(timelines, stage, Step) for stage in range(placement.n_stages)]
    optimizer = [
        _MS * (step + robust_mean(norms.get(stage, ())))
        for stage, step in enumerate(steps)
    ]
    checks = [_mean(timelines, stage, Check) for stage in range(placement.n_stages)]
    shares = [len(placement.chunks_of[stage]) for stage in placement.stage_of]
    return replace(
        costs,
        f=_sums(costs.f, add),
        b=_sums(costs.b, add),
        w=costs.w if runs_joint else _sums(costs.w, add),
        optimizer=tuple(
            optimizer[stage] / share
            for stage, share in zip(placement.stage_of, shares, strict=True)
        ),
        validation=_MS * max(checks),
        comm=comm or 0.0,
        reduction=0.0 if wires is None else wires.reduction,
    )


def _hop_time(wires: Wires | None) -> HopTime | None:
    """Seconds of a message, where what was sent can be compared with what came."""
    if wires is None or not wires.one_clock:
        return None
    return lambda source, target: wires.time(source, target) / _MS


def _hops(
    timelines: Sequence[Timeline], wires: Wires, gaps: Sequence[float]
) -> tuple[float, ...]:
    """Time of a message on each edge, as it was waited for where that is known.

    The gap before a job is a part of its pass already.
    """
    placement = timelines[0].placement
    hops = wires.hops(placement)
    if not wires.one_clock:
        return hops
    seen = latencies(timelines)
    found = []
    for hop, (one, other) in zip(hops, pairwise(placement.stage_of), strict=True):
        waited = seen.get((min(one, other), max(one, other)))
        if one != other and waited is not None:
            hop = max(0.0, _MS * waited - (gaps[one] + gaps[other]) / 2)
        found.append(hop)
    return tuple(found)


def _is_joint(slot: Slot) -> bool:
    return isinstance(slot.job, Pass) and slot.job.kind is PassKind.BW


def _sums(times: PerChunk, more: Sequence[float]) -> tuple[float, ...]:
    assert isinstance(times, tuple), "one entry per chunk was measured"
    return tuple(one + other for one, other in zip(times, more, strict=True))


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


def _mean(timelines: Sequence[Timeline], stage: int, kind: type) -> float:
    found = [
        slot.duration
        for timeline in timelines
        for slot in timeline.rows[stage]
        if isinstance(slot.job, kind)
    ]
    return robust_mean(found)
