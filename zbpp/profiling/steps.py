"""Times of the steps that a pipeline has taken, and costs of them.

    stage 0 | F0 ..... F1 ..        gap    from a job to the next that waits for none
                \\                   wait   from the end of the pass that sends to the
    stage 1 |    `---- F0                  start of the one that has waited

A job whose message was sent long before it could start waits for none, as does a W. A
job has waited where its message was sent after the job before it had ended; what lies
between the two may be either, and counts as neither. Of each step the mean counts, of
the steps the robust mean: rare long waits are a part of every step.

Ends of other stages are compared with, so both need clocks that agree; without them
only W's are known to have waited for nothing. The times are those that executors note
anyway, so that reading them costs one gather.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from statistics import fmean

from zbpp.core import (
    Check,
    Costs,
    Pair,
    Part,
    Pass,
    PassKind,
    RequestError,
    Slot,
    Step,
    Timeline,
    passes_in,
)
from zbpp.profiling.links import Wires
from zbpp.profiling.means import robust_mean

_MS = 1e3
_LONG = 3.0  # times a message: so early, one has come
_SHORTEST = 10  # where nothing is known: a tenth of the gaps


@dataclass(frozen=True)
class StepTimes:
    """Times in ms; means are those of `zbpp.profiling.means.robust_mean`.

    Args:
        last: the last step.
        passes: all durations, by kind and chunk; of those in pairs only where these ran
            in a row; of those in segments without the communication during
            other passes.
        pairs: all durations of interleaved pairs, by the chunk of the forward.
        gaps: of each stage, mean from a pass to the next that waits for nothing.
        waits: mean time of a message, by pair of stages; those that were waited for.
        optimizer: mean of O with its norms, by stage.
        validation: mean of V, by stage.
        wires: links and the sum over the stages, measured alone.
        splits: for each stage whether W has anything to do.
    """

    last: Timeline
    passes: Mapping[tuple[PassKind, int], Sequence[float]]
    pairs: Mapping[int, Sequence[float]]
    gaps: tuple[float, ...]
    waits: Mapping[tuple[int, int], float]
    optimizer: tuple[float, ...]
    validation: tuple[float, ...]
    wires: Wires
    splits: tuple[bool, ...]

    def costs(self, *, joint: bool) -> Costs:
        """Costs per chunk; what the host needs between two jobs is a part of each.

        Args:
            joint: let B stand for BW where the schedule has such passes.

        Raises:
            RequestError: the schedule has passes that run B and W together.
        """
        placement = self.last.placement
        is_joint = any(kind is PassKind.BW for kind, _ in self.passes)
        if is_joint and not joint:
            raise RequestError(
                f"{self.last.name} runs B and W as one pass, so their times cannot be "
                "distinguished; measure with a mode that splits them, such as ZBH1"
            )
        f, b, w, fb = [], [], [], []
        for chunk, stage in enumerate(placement.stage_of):
            gap = self.gaps[stage]
            of_kind = {kind: self.passes.get((kind, chunk), ()) for kind in PassKind}
            both = of_kind[PassKind.BW]
            f.append(robust_mean(of_kind[PassKind.F]) + gap)
            b.append(robust_mean([*of_kind[PassKind.B], *both]) + gap)
            late = robust_mean([*of_kind[PassKind.W], *(0.0 for _ in both)])
            w.append(late if is_joint else late + gap)
            pairs = self.pairs.get(chunk)
            fb.append(robust_mean(pairs) + gap if pairs else f[-1] + b[-1])
        return Costs(
            f=tuple(f),
            b=tuple(b),
            w=tuple(w),
            fb=tuple(fb) if self.pairs else None,
            optimizer=tuple(
                self.optimizer[stage] / len(placement.chunks_of[stage])
                for stage in placement.stage_of
            ),
            validation=max(self.validation),
            comm=tuple(
                self.waits.get(
                    (min(pair), max(pair)),
                    self.wires.hop(pair, self.wires.message.get(chunk, 0)),
                )
                for chunk, pair in enumerate(pairwise(placement.stage_of))
            )
            or 0.0,
            reduction=self.wires.reduction,
            splits=None if all(self.splits) else self.splits,
        )


def read_steps(
    timelines: Sequence[Timeline],
    norms: Mapping[int, Sequence[float]],
    wires: Wires,
    splits: Sequence[bool],
) -> StepTimes:
    """Read the times of some steps.

    Args:
        timelines: of the steps, in seconds, oldest first.
        norms: seconds that the norms of each stage's gradients took.
        wires: measured alone.
        splits: for each stage whether W has anything to do.
    """
    passes: dict[tuple[PassKind, int], list[float]] = defaultdict(list)
    pairs: dict[int, list[float]] = defaultdict(list)
    ends: dict[tuple[type, int], list[float]] = defaultdict(list)
    for timeline in timelines:
        in_parts: dict[Pass, float] = defaultdict(float)
        for slot in chain.from_iterable(timeline.lines):
            job, ms = slot.job, _MS * slot.duration
            if isinstance(job, Pass):
                passes[job.kind, job.chunk].append(ms)
            elif isinstance(job, Part):
                in_parts[job.of] += ms
            elif isinstance(job, Pair):
                pairs[job.forward.chunk].append(ms)
            elif isinstance(job, Step | Check):
                ends[type(job), job.stage].append(ms)
        for of, ms in in_parts.items():
            passes[of.kind, of.chunk].append(ms)
    gaps, waits = _between(timelines, wires)
    stages = range(timelines[0].placement.n_stages)
    return StepTimes(
        timelines[-1],
        passes,
        pairs,
        gaps,
        waits,
        tuple(
            robust_mean(ends[Step, stage]) + _MS * robust_mean(norms.get(stage, ()))
            for stage in stages
        ),
        tuple(robust_mean(ends[Check, stage]) for stage in stages),
        wires,
        tuple(splits),
    )


def _between(
    timelines: Sequence[Timeline], wires: Wires
) -> tuple[tuple[float, ...], dict[tuple[int, int], float]]:
    """Gaps of the stages, and waits for messages by pair of stages; see above.

    Both ways of a link count together. Where no job is known that waits for none, the
    gap is the shortest tenth of all times between two jobs.
    """
    stage_of = timelines[0].placement.stage_of
    free: dict[int, list[float]] = defaultdict(list)
    every: dict[int, list[float]] = defaultdict(list)
    late: dict[tuple[int, int], list[float]] = defaultdict(list)
    for timeline in timelines:
        sent = {
            _with_b(job): slot.end
            for row in timeline.rows
            for slot in row
            for job in passes_in(slot.job)
        }
        for stage, row in enumerate(timeline.rows):
            gaps: list[float] = []
            waits: dict[tuple[int, int], list[float]] = defaultdict(list)
            for before, after in _neighbours(row):
                gap = max(0.0, _MS * (after.start - before.end))
                every[stage].append(gap)
                source = _source(timeline, after)
                peer = stage if source is None else stage_of[source.chunk]
                if source is None or peer == stage:
                    gaps.append(gap)
                elif wires.one_clock:
                    pair = (min(stage, peer), max(stage, peer))
                    early = _MS * (before.end - sent[source])
                    if early >= _LONG * wires.hop(pair):
                        gaps.append(gap)
                    elif early < 0:
                        waits[pair].append(max(0.0, gap + early))
            free[stage] += [fmean(gaps)] if gaps else []
            for pair, several in waits.items():
                late[pair].append(fmean(several))
    gap_of = []
    for stage in range(timelines[0].placement.n_stages):
        shortest = sorted(every[stage])[len(every[stage]) // _SHORTEST :][:1]
        gap_of.append(robust_mean(free[stage] or shortest))
    return tuple(gap_of), {
        # the gap before a job is a part of its pass already
        (a, b): max(0.0, robust_mean(times) - (gap_of[a] + gap_of[b]) / 2)
        for (a, b), times in late.items()
        if (a, b) in wires.links
    }


def _with_b(job: Pass) -> Pass:
    """The job whose end sends a gradient: of a BW its B."""
    joint = job.kind is PassKind.BW
    return Pass(PassKind.B, job.chunk, job.microbatch) if joint else job


def _neighbours(row: Sequence[Slot]) -> Iterator[tuple[Slot, Slot]]:
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
