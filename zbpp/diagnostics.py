"""Reports on a pipeline's last steps: times, memory, split; read between two steps.

timeline, timelines            jobs of the last steps, with their times
measured_costs                 costs of the last steps
prediction                     the simulated step beside the measured one
split_report, split_summary    where W computes gradients, and why not elsewhere
"""

from collections import ChainMap, Counter
from collections.abc import Mapping
from itertools import chain
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from zbpp.core import (
    Costs,
    MemoryModel,
    PassKind,
    RequestError,
    Schedule,
    Slot,
    Timeline,
)
from zbpp.core.clock import off_lane
from zbpp.core.measured import not_told_apart
from zbpp.profiling.memory import peak_held
from zbpp.profiling.prediction import Prediction, predict
from zbpp.profiling.window import Wires, measure_wires, window_costs
from zbpp.runtime.backward.causes import NO_WEIGHT
from zbpp.runtime.driver.stages import LocalStages
from zbpp.runtime.job_times import clock_offsets

__all__ = [
    "RunningPipeline",
    "measured_costs",
    "prediction",
    "split_report",
    "split_summary",
    "split_warning",
    "summarize_split",
    "timeline",
    "timelines",
]

_IN_B = f"B: {NO_WEIGHT}"

_wires: WeakKeyDictionary[LocalStages, Wires] = WeakKeyDictionary()
"""Links between the stages of each pipeline, measured once."""


class RunningPipeline(Protocol):
    """The part of `zbpp.Pipeline` that is read here."""

    schedule: Schedule
    device: Any
    stages: LocalStages


def timeline(pipeline: RunningPipeline) -> Timeline:
    """Jobs of every stage in the last step, in seconds (every rank must call).

    Times of several machines are those of the first one's clock, within a message's
    time. On GPUs they are those of CUDA events around the jobs, and the call waits for
    the last one.

    Raises:
        RequestError: there was no step yet.
    """
    return timelines(pipeline, 1)[-1]


def timelines(pipeline: RunningPipeline, n: int) -> list[Timeline]:
    """The last steps, oldest first, as far as they are kept: 10 or fewer.

    Those before a switch of the schedule are forgotten.

    Raises:
        RequestError: there was no step yet.
    """
    schedule, stages = pipeline.schedule, pipeline.stages
    slots = {s: x.times.steps(n) for s, x in stages.executors.items()}
    gather = stages.transport.gather_pipeline
    by_stage: dict[int, list[list[Slot]]] = {}
    for part, ahead_s in zip(gather(slots), clock_offsets(gather), strict=True):
        for stage, its_steps in part.items():
            by_stage[stage] = [_earlier(step, ahead_s) for step in its_steps]
    steps = [*zip(*(by_stage[stage] for stage in sorted(by_stage)), strict=True)]
    if not steps:
        raise RequestError("nothing is measured yet; call pipeline.step() first")
    lines = []
    for step in steps:
        rows, lanes = off_lane(step)
        lines.append(
            Timeline(
                schedule.name,
                schedule.placement,
                schedule.n_microbatches,
                rows,
                recomputing=schedule.recomputing,
                collectives=lanes,
            )
        )
    return lines


def _earlier(slots: list[Slot], seconds: float) -> list[Slot]:
    if seconds == 0.0:
        return slots
    return [Slot(x.job, x.start - seconds, x.end - seconds) for x in slots]


def measured_costs(
    pipeline: RunningPipeline, n: int = 1, *, joint: bool = False
) -> Costs:
    """Costs of the last steps, in ms (every rank must call).

    Robust means of the passes, of O with its norms, and of V; the wait for the sum of
    the norms is in none of them. The first call also measures the links and that sum,
    some ms between two steps; they are kept. The loss is a part of the last F.

    Args:
        pipeline: after some steps.
        n: steps that count; 10 or fewer are kept.
        joint: where B and W run as one pass, let B stand for both.

    Raises:
        RequestError: the schedule has passes that run B and W together.
    """
    schedule, stages = pipeline.schedule, pipeline.stages
    if not joint and schedule.runs(PassKind.BW):
        raise RequestError(not_told_apart(schedule.name))
    lines = timelines(pipeline, n)
    executors = stages.executors
    norms = stages.gather_dict(
        {s: x.times.norm_seconds(n) for s, x in executors.items()}
    )
    if stages not in _wires:
        _wires[stages] = measure_wires(executors, schedule.placement)
    defers = stages.gather_dict({s: x.stage.defers for s, x in executors.items()})
    splits = [defers[stage] for stage in sorted(defers)]
    return window_costs(lines, norms, splits=splits, wires=_wires[stages], joint=joint)


def prediction(
    pipeline: RunningPipeline,
    costs: Costs | None = None,
    memory: MemoryModel | None = None,
    *,
    n: int = 10,
) -> Prediction:
    """Simulated beside measured: step time, bubble, memory (every rank must call).

    Args:
        pipeline: after some steps.
        costs: in ms; None: those of the same steps.
        memory: in bytes, see `zbpp.memory`; None: that of the costs, if they give any.
        n: last steps that count; what the script does between them is in their time.

    Raises:
        RequestError: there was no step yet.
    """
    lines = timelines(pipeline, n)
    executors = pipeline.stages.executors
    # stages that share the process: no stage's memory is known
    peak = peak_held(pipeline.device) if len(executors) == 1 else None
    held = pipeline.stages.gather_dict(dict.fromkeys(executors, peak))
    has_costs = costs is not None
    costs = costs or measured_costs(pipeline, n, joint=True)
    if memory is not None:
        costs = costs.with_memory(memory)
    return predict(
        pipeline.schedule,
        lines,
        costs,
        held=[held[stage] for stage in sorted(held)],
        costs_given=has_costs,
        side_by_side=len(executors) == 1,
    )


def split_report(pipeline: RunningPipeline) -> dict[str, str]:
    """Name the origin of each gradient of this process, by parameter.

    ``"W"``, or ``"B: "`` and the reason why it cannot wait; of the first step.
    """
    report = {}
    for executor in pipeline.stages.executors.values():
        where = ChainMap(*executor.stage.where.values())
        for _, name, p in executor.stage.named_leaves():
            if p in where:
                report[name] = where[p]
    return report


def split_summary(pipeline: RunningPipeline) -> str:
    """One line about `split_report` on all processes (every rank must call)."""
    report, sizes = split_report(pipeline), _leaf_sizes(pipeline)
    where = pipeline.stages.gather_dict(report)
    return summarize_split(where, pipeline.stages.gather_dict(sizes))


def summarize_split(where: Mapping[str, str], sizes: Mapping[str, int]) -> str:
    """One line: the share of the weights in W, and the reasons of the others.

    Args:
        where: for each parameter ``"W"`` or ``"B: "`` and the reason.
        sizes: elements of each parameter.

    >>> summarize_split({"a": "W", "b": "B: used 2 times"}, {"a": 90, "b": 10})
    'W computes the gradients of 90.0% of 100 parameters; B those of 10 (used 2 times)'
    """
    total = sum(sizes[name] for name in where)
    reasons: Counter[str] = Counter()
    for name, text in where.items():
        if text != "W":
            reasons[text.removeprefix("B: ")] += sizes[name]
    in_w = total - sum(reasons.values())
    line = (
        f"W computes the gradients of {in_w / max(1, total):.1%} of {total:,} "
        "parameters"
    )
    if reasons:
        parts = (f"{n:,} ({reason})" for reason, n in reasons.most_common())
        line += "; B those of " + ", ".join(parts)
    return line


def split_warning(pipeline: RunningPipeline) -> str | None:
    """Say that W has less to do than is kept in B for a reason to be mended.

    Embeddings, norms and biases do not count: nothing of theirs could wait.
    """
    schedule = pipeline.schedule
    if not schedule.runs(PassKind.W):
        return None
    where, sizes = split_report(pipeline), _leaf_sizes(pipeline)
    in_w = sum(sizes[name] for name, text in where.items() if text == "W")
    kept = sum(sizes[name] for name, text in where.items() if text not in ("W", _IN_B))
    stages = (executor.stage for executor in pipeline.stages.executors.values())
    if in_w >= kept or (not in_w and any(stage.defers for stage in stages)):
        return None  # modules that leave work for W by themselves are in no plan
    return (
        f"{schedule.name} gains little here: {summarize_split(where, sizes)}; "
        "zbpp.diagnostics.split_report(pipeline) names them, and '1F1B' is as fast"
    )


def _leaf_sizes(pipeline: RunningPipeline) -> dict[str, int]:
    """Elements of each parameter, by the names of `split_report`."""
    stages = (x.stage for x in pipeline.stages.executors.values())
    leaves = chain.from_iterable(stage.named_leaves() for stage in stages)
    return {name: p.numel() for _, name, p in leaves}
