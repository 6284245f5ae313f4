"""Steps of a schedule on layers that sleep, measured and simulated."""

import statistics
import time
from itertools import pairwise

from zbpp.core import Costs, Schedule
from zbpp.diagnostics import timeline
from zbpp.emulation import emulated_batch, emulated_pipeline
from zbpp.pipeline import Pipeline
from zbpp.simulator import bubble_rate, simulate, steady_step_time, step_time

_WARM_UP = 2  # steps that are not counted: the first one learns the shapes
_SETTLING = 2  # more of them, for steps in a row: until all stages lead as they will


def measure_steps(
    schedule: Schedule,
    costs: Costs,
    *,
    n_steps: int,
    post_validation: bool | None = None,
) -> dict[str, float]:
    """Step times in ms and bubble rates, medians over the steps that count.

    Every rank must call. Without ``post_validation`` each step has a common start; else
    steps run in a row, validated in the next one or behind a barrier.
    """
    with emulated_pipeline(schedule, costs, post_validation=post_validation) as run:
        simulated = simulate(run.schedule, costs)
        if post_validation is None:
            predicted = step_time(simulated)
            step_ms, bubble = _one_by_one(run, n_steps)
        else:
            predicted = steady_step_time(run.schedule, costs)
            step_ms, bubble = _in_a_row(run, n_steps)
    return {
        "step_ms": step_ms,
        "simulated_step_ms": predicted,
        "bubble_rate": bubble,
        "simulated_bubble_rate": bubble_rate(simulated),
    }


def _one_by_one(pipeline: Pipeline, n_steps: int) -> tuple[float, float]:
    batch = emulated_batch(pipeline)
    steps, bubbles = [], []
    for _ in range(_WARM_UP + n_steps):
        pipeline.gather(None)  # all ranks start together
        start = time.perf_counter()
        pipeline.step(batch, batch)
        steps.append(max(pipeline.gather(time.perf_counter() - start)))
        bubbles.append(bubble_rate(timeline(pipeline)))
    step_s, bubble = (statistics.median(of[_WARM_UP:]) for of in (steps, bubbles))
    return step_s * 1e3, bubble


def _in_a_row(pipeline: Pipeline, n_steps: int) -> tuple[float, float]:
    """Time between the ends of steps, and the bubble rate of the last one."""
    batch = emulated_batch(pipeline)
    pipeline.step(batch, batch)
    pipeline.gather(None)  # the first step is slow
    ends = []
    for _ in range(_WARM_UP + _SETTLING + n_steps):
        pipeline.step(batch, batch)
        ends.append(time.perf_counter())
    last = [max(of_ranks) for of_ranks in zip(*pipeline.gather(ends), strict=True)]
    bubble = bubble_rate(timeline(pipeline))
    pipeline.synchronize()
    steps = [after - before for before, after in pairwise(last)][-n_steps:]
    return statistics.median(steps) * 1e3, bubble
