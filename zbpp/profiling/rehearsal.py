"""Steps without their end: the passes and messages of the schedule, by all stages.

    step        F F B W ... B W | reduce  O  V
    rehearsal   F F B W ... B W               the same order, threads and messages

Passes that are timed alone are a little faster than in a step, and between two passes
of a step the host sends, waits its turn and wakes up. Both are seen here. Every stage
must be a process of its own: stages that share one take turns.
"""

import time
from collections.abc import Mapping, Sequence

from zbpp.core import (
    Pass,
    Receive,
    Schedule,
    Send,
    Slot,
    Timeline,
)
from zbpp.profiling.capture import Given, begin
from zbpp.runtime.executor import Executor, drive
from zbpp.runtime.job_times import JobTimes
from zbpp.runtime.microbatches import MicroBatches
from zbpp.schedules import lower

__all__ = ["rehearse", "rehearsed_steps"]

_MOST = 5


def rehearse(
    stage: int,
    executor: Executor,
    schedule: Schedule,
    microbatch: Given,
    *,
    step: int,
    most_s: float,
) -> list[list[Slot]]:
    """Run the passes of some steps (every rank must call, within `training_kept`).

    Args:
        stage: of this process, its only one.
        executor: of the stage.
        schedule: whose passes run, each on the same micro-batch.
        microbatch: inputs and targets of that micro-batch.
        step: its number, for seeds.
        most_s: seconds after which fewer steps will do.

    Returns:
        The passes of each step after the first, with their times in seconds.
    """
    program = tuple(
        job for job in lower(schedule)[stage] if isinstance(job, Pass | Send | Receive)
    )
    runner, transport = executor.stage, executor.transport
    kept = executor.times, dict(runner.where), runner.defers
    executor.times = JobTimes(runner.device)
    n, m = 1, schedule.n_microbatches
    done = 0
    while done < n:
        transport.gather(None)
        began = time.perf_counter()
        begin(executor, microbatch, step=step, n_microbatches=m)
        drive({stage: executor}, {stage: program})
        done += 1
        if done == 1:
            slowest = max(transport.gather(time.perf_counter() - began))
            n = 1 + max(1, min(_MOST, int(most_s / max(slowest, 1e-9))))
    rows = executor.times.steps(done - 1)
    executor.times, runner.where, runner.defers = kept
    runner.begin(MicroBatches(1, step))
    return rows


def rehearsed_steps(
    rows: Mapping[int, Sequence[Sequence[Slot]]], schedule: Schedule
) -> list[Timeline] | None:
    """Join what all stages have rehearsed; None: they have not."""
    placement = schedule.placement
    if len(rows) < placement.n_stages:
        return None
    steps = zip(*(rows[stage] for stage in range(placement.n_stages)), strict=True)
    name, m = schedule.name, schedule.n_microbatches
    return [Timeline(name, placement, m, tuple(map(tuple, step))) for step in steps]
