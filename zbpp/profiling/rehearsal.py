"""Steps without their end: the passes and messages of the schedule, by all stages.

    step        F F B W ... B W | reduce  O  V
    rehearsal   F F B W ... B W               the same order, threads and messages

Passes that are timed alone are a little faster than in a step, and between two passes
of a step the host sends, waits its turn and wakes up. Both are seen here. Every stage
must be a process of its own: stages that share one take turns.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zbpp.core import (
    Pass,
    PassKind,
    Receive,
    Schedule,
    Send,
    Slot,
    Timeline,
)
from zbpp.core.measured import robust_mean
from zbpp.profiling.capture import Given, begin
from zbpp.profiling.links import Link
from zbpp.profiling.waits import host_gaps, latencies
from zbpp.runtime.executor import Executor, drive
from zbpp.runtime.job_times import JobTimes
from zbpp.schedules import lower

__all__ = ["Rehearsed", "rehearse", "seen_in"]

_MOST = 5
_MS = 1e3
_KINDS = {PassKind.F: "F", PassKind.B: "B", PassKind.W: "W", PassKind.BW: "BW"}


@dataclass(frozen=True)
class Rehearsed:
    """Means in ms, of what the passes took beside and between each other.

    Args:
        passes: by kind (F, B, W or BW) and chunk.
        gaps: of each stage, from a pass to the next.
        waits: for a message, by pair of stages; those that were waited for.
    """

    passes: Mapping[tuple[str, int], float]
    gaps: tuple[float, ...]
    waits: Mapping[tuple[int, int], float]


def rehearse(
    stage: int,
    executor: Executor,
    schedule: Schedule,
    given: Given,
    *,
    step: int,
    most_s: float,
) -> list[list[Slot]]:
    """Run the passes of some steps (every rank must call, within `training_kept`).

    Args:
        stage: of this process, its only one.
        executor: of the stage.
        schedule: whose passes run, each on the same micro-batch.
        given: inputs and targets of that micro-batch.
        step: its number, for seeds.
        most_s: seconds after which fewer steps will do.

    Returns:
        The passes of each step after the first, with their times in seconds.
    """
    program = tuple(
        one for one in lower(schedule)[stage] if isinstance(one, Pass | Send | Receive)
    )
    runner, transport = executor.stage, executor.transport
    kept = executor.times, dict(runner.where), runner.defers
    executor.times = JobTimes(runner.device)
    n, m = 1, schedule.n_microbatches
    done = 0
    while done < n:
        transport.gather(None)
        began = time.perf_counter()
        begin(executor, given, step=step, n_microbatches=m)
        drive({stage: executor}, {stage: program})
        done += 1
        if done == 1:
            slowest = max(transport.gather(time.perf_counter() - began))
            n = 1 + max(1, min(_MOST, int(most_s / max(slowest, 1e-9))))
    found = executor.times.steps(done - 1)
    executor.times, runner.where, runner.defers = kept
    runner.begin(step=step, inputs=None, targets=None, n_microbatches=1)
    return found


def seen_in(
    rows: Mapping[int, Sequence[Sequence[Slot]]],
    schedule: Schedule,
    links: Mapping[tuple[int, int], Link],
    *,
    one_clock: bool,
) -> Rehearsed | None:
    """Join what all stages have rehearsed; None: they have not.

    Args:
        rows: by stage, of each step.
        schedule: that was rehearsed.
        links: measured alone.
        one_clock: the times of all stages can be compared.
    """
    placement = schedule.placement
    if len(rows) < placement.n_stages:
        return None
    steps = zip(*(rows[stage] for stage in range(placement.n_stages)), strict=True)
    timelines = [
        Timeline(
            schedule.name,
            placement,
            schedule.n_microbatches,
            tuple(tuple(row) for row in step),
        )
        for step in steps
    ]

    def hop(one: int, other: int) -> float:
        link = links.get((min(one, other), max(one, other)))
        return 0.0 if link is None else link.delay / _MS

    gaps = [_MS * gap for gap in host_gaps(timelines, hop if one_clock else None)]
    waited = latencies(timelines) if one_clock else {}
    return Rehearsed(
        _means(timelines),
        tuple(gaps),
        {
            (a, b): max(0.0, _MS * seconds - (gaps[a] + gaps[b]) / 2)
            for (a, b), seconds in waited.items()
        },
    )


def _means(timelines: Sequence[Timeline]) -> dict[tuple[str, int], float]:
    times: dict[tuple[str, int], list[float]] = {}
    for timeline in timelines:
        for row in timeline.rows:
            for slot in row:
                if isinstance(slot.job, Pass):
                    key = _KINDS[slot.job.kind], slot.job.chunk
                    times.setdefault(key, []).append(_MS * slot.duration)
    return {key: robust_mean(several) for key, several in times.items()}
