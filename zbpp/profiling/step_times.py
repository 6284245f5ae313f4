"""Times of steps: of their passes, and the time between the jobs of a stage.

Steps of a training that goes on, or those of a rehearsal; profiles and the watcher of
``auto`` read both here. Between two jobs lies what the host needs, or a message:

    stage 0 | F0 ..... F1 ..        gap       from a job to the next that waits for none
                \\                   latency   from the end of the pass that sends to
    stage 1 |    `---- F0                     the start of the one that has waited

A job whose message was sent long before it could start waits for none, as does a W. A
job has waited where its message was sent after the job before it had ended; what lies
between the two may be either, and counts as neither. Of each step the mean counts, of
the steps the robust mean: rare long waits are a part of every step.

Ends of other stages are compared with, so both need clocks that agree; without them
only W's are known to have waited for nothing.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from statistics import fmean

from zbpp.core import (
    Check,
    Pair,
    Part,
    Pass,
    PassKind,
    Slot,
    Step,
    Timeline,
    passes_in,
)
from zbpp.profiling.links import Link
from zbpp.profiling.stopwatch import robust_mean

__all__ = ["StepTimes", "host_gaps", "latencies", "measure_step_times"]

_MS = 1e3

_LONG = 3.0  # times a message: so early, one has come
_SHORTEST = 10  # where nothing is known: a tenth of the gaps

HopTime = Callable[[int, int], float]
"""Seconds that a message takes from one stage to another, roughly."""


@dataclass(frozen=True)
class StepTimes:
    """Times in ms; means are those of `zbpp.profiling.stopwatch.robust_mean`.

    Args:
        passes: all durations, by kind and chunk; of those in pairs only where these ran
            in a row; of those in segments without what they have communicated beside
            others.
        pairs: all durations of pairs in turns, by the chunk of the forward.
        gaps: of each stage, mean from a pass to the next that waits for nothing.
        waits: mean time of a message, by pair of stages; those that were waited for.
        optimizer, validation: means of O and V, by stage.
    """

    passes: Mapping[tuple[PassKind, int], Sequence[float]]
    pairs: Mapping[int, Sequence[float]]
    gaps: tuple[float, ...]
    waits: Mapping[tuple[int, int], float]
    optimizer: tuple[float, ...]
    validation: tuple[float, ...]

    def mean(self, kind: PassKind, chunk: int) -> float | None:
        """Mean time of a pass; None: there was none."""
        times = self.passes.get((kind, chunk))
        return robust_mean(times) if times else None


def measure_step_times(
    timelines: Sequence[Timeline],
    links: Mapping[tuple[int, int], Link],
    *,
    message_bytes: float,
    one_clock: bool,
) -> StepTimes:
    """Read the times of some steps.

    Args:
        timelines: in seconds.
        links: measured alone.
        message_bytes: of a message, roughly.
        one_clock: the times of all stages can be compared.
    """

    def hop(source: int, target: int) -> float:
        link = links.get((min(source, target), max(source, target)))
        return 0.0 if link is None else link.time(message_bytes) / _MS

    durations: dict[object, list[float]] = defaultdict(list)
    passes: dict[tuple[PassKind, int], list[float]] = defaultdict(list)
    pairs: dict[int, list[float]] = defaultdict(list)
    for timeline in timelines:
        for stage, row in enumerate(timeline.rows):
            for slot in row:
                ms = _MS * slot.duration
                if isinstance(slot.job, Pass):
                    passes[slot.job.kind, slot.job.chunk].append(ms)
                elif isinstance(slot.job, Pair):
                    pairs[slot.job.forward.chunk].append(ms)
                elif not isinstance(slot.job, Part):
                    durations[type(slot.job), stage].append(ms)
        for job, ms in _in_segments(timeline).items():
            passes[job.kind, job.chunk].append(ms)
    stages = range(timelines[0].placement.n_stages)
    gaps = [_MS * gap for gap in host_gaps(timelines, hop if one_clock else None)]
    waits = latencies(timelines) if one_clock else {}
    return StepTimes(
        passes,
        pairs,
        tuple(gaps),
        {  # the gap before a job is a part of its pass already
            (a, b): max(0.0, _MS * seconds - (gaps[a] + gaps[b]) / 2)
            for (a, b), seconds in waits.items()
        },
        tuple(robust_mean(durations[Step, stage]) for stage in stages),
        tuple(robust_mean(durations[Check, stage]) for stage in stages),
    )


def _in_segments(timeline: Timeline) -> dict[Pass, float]:
    """Milliseconds of the passes that ran in segments, without what lay between."""
    times: dict[Pass, float] = defaultdict(float)
    for slot in chain.from_iterable(timeline.lines):
        if isinstance(slot.job, Part):
            times[slot.job.of] += _MS * slot.duration
    return times


def host_gaps(timelines: Sequence[Timeline], hop: HopTime | None) -> list[float]:
    """Seconds between two jobs of each stage, where the second waits for nothing.

    Where no such job is known, the shortest tenth of all gaps.

    Args:
        timelines: of measured steps, in seconds.
        hop: None: the clocks of the stages do not agree.
    """
    gaps = []
    for stage in range(timelines[0].placement.n_stages):
        of_steps, every = [], []
        for timeline in timelines:
            ends = _ends(timeline)
            free = []
            for before, after in _pairs(timeline.rows[stage]):
                gap = max(0.0, after.start - before.end)
                every.append(gap)
                if _waits_for_none(timeline, ends, before, after, hop):
                    free.append(gap)
            of_steps += [fmean(free)] if free else []
        shortest = sorted(every)[len(every) // _SHORTEST] if every else 0.0
        gaps.append(robust_mean(of_steps) if of_steps else shortest)
    return gaps


def latencies(timelines: Sequence[Timeline]) -> dict[tuple[int, int], float]:
    """Seconds from a pass to one of another stage that waited for what it sent.

    Both ways together, by pair of stages, the lower one first; only of pairs where
    jobs have waited.
    """
    of_steps: dict[tuple[int, int], list[float]] = defaultdict(list)
    for timeline in timelines:
        ends, stage_of = _ends(timeline), timeline.placement.stage_of
        delays: dict[tuple[int, int], list[float]] = defaultdict(list)
        for stage, row in enumerate(timeline.rows):
            for before, after in _pairs(row):
                source = _source(timeline, after)
                if source is None or stage_of[source.chunk] == stage:
                    continue
                sent = ends[source]
                if sent > before.end:
                    peer = stage_of[source.chunk]
                    late = max(0.0, after.start - sent)
                    delays[min(stage, peer), max(stage, peer)].append(late)
        for pair, several in delays.items():
            of_steps[pair].append(fmean(several))
    return {pair: robust_mean(several) for pair, several in of_steps.items()}


def _ends(timeline: Timeline) -> Mapping[Pass, float]:
    """Ends of all passes, of a BW as of its B, in a pair that of the pair."""
    return {
        _with_b(part): slot.end
        for row in timeline.rows
        for slot in row
        for part in passes_in(slot.job)
    }


def _with_b(job: Pass) -> Pass:
    joint = job.kind is PassKind.BW
    return Pass(PassKind.B, job.chunk, job.microbatch) if joint else job


def _pairs(row: Sequence[Slot]) -> Iterator[tuple[Slot, Slot]]:
    """Passes that follow one another; after an O or a V other things are waited for."""
    for before, after in pairwise(row):
        if isinstance(before.job, Pass) and isinstance(after.job, Pass):
            yield before, after


def _source(timeline: Timeline, slot: Slot) -> Pass | None:
    """The pass whose output a pass reads, if it is one of another chunk."""
    job = slot.job
    assert isinstance(job, Pass)
    if job.kind is PassKind.W:
        return None
    step = -1 if job.kind is PassKind.F else 1
    neighbour = job.chunk + step
    if not 0 <= neighbour < timeline.placement.n_chunks:
        return None
    return Pass(_with_b(job).kind, neighbour, job.microbatch)


def _waits_for_none(
    timeline: Timeline,
    ends: Mapping[Pass, float],
    before: Slot,
    after: Slot,
    hop: HopTime | None,
) -> bool:
    job, stage_of = after.job, timeline.placement.stage_of
    assert isinstance(job, Pass)
    if job.kind is PassKind.W:
        return True
    if hop is None:
        return False
    source = _source(timeline, after)
    if source is None or stage_of[source.chunk] == stage_of[job.chunk]:
        return True
    early = _LONG * hop(stage_of[source.chunk], stage_of[job.chunk])
    return ends[source] + early <= before.end
