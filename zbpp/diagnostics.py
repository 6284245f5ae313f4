"""Reports on a pipeline's steps: times, memory, split; read between two steps.

timeline, timelines            jobs of the last steps, with their times
measured_costs                 costs of the last steps
prediction                     the simulated and the measured step
profile                        costs of every layer: some steps, and each layer alone
split_report, split_summary    the gradients that W computes, and their share
"""

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import chain
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import nn

from zbpp.core import (
    Costs,
    PassKind,
    RequestError,
    Schedule,
    Slot,
    Timeline,
)
from zbpp.profiling.alone import WARM_UP, LayerTimes, noted_inputs, time_layers
from zbpp.profiling.join import join
from zbpp.profiling.links import Wires, measure_wires
from zbpp.profiling.prediction import Prediction, predict
from zbpp.profiling.profile import Profile
from zbpp.profiling.steps import StepTimes, read_steps
from zbpp.runtime.driver.build import Settings
from zbpp.runtime.driver.stages import LocalStages
from zbpp.runtime.job_times import clock_offsets
from zbpp.runtime.microbatches import Batch
from zbpp.runtime.stage import Stage
from zbpp.runtime.support.devices import device_name

__all__ = [
    "RunningPipeline",
    "measured_costs",
    "prediction",
    "profile",
    "split_report",
    "split_summary",
    "split_warning",
    "summarize_split",
    "timeline",
    "timelines",
]

_KEPT = 10
"""Steps whose times are there."""

_wires: WeakKeyDictionary[LocalStages, Wires] = WeakKeyDictionary()
"""Links between the stages of each pipeline, measured once."""


class RunningPipeline(Protocol):
    """The part of `zbpp.Pipeline` that is read here."""

    schedule: Schedule
    device: Any
    stages: LocalStages
    settings: Settings
    split: tuple[range, ...]
    n_layers: int

    @property
    def step(self) -> Callable[[Batch, Batch], Any]:
        """Train on one batch."""

    def synchronize(self) -> None:
        """Settle the last step."""


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
            by_stage[stage] = [
                [Slot(x.job, x.start - ahead_s, x.end - ahead_s) for x in step]
                for step in its_steps
            ]
    steps = [*zip(*(by_stage[stage] for stage in sorted(by_stage)), strict=True)]
    if not steps:
        raise RequestError("nothing is measured yet; call pipeline.step() first")
    return [schedule.timeline(step) for step in steps]


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
        joint: where B and W run as one pass, B has the time of both.

    Raises:
        RequestError: the schedule has passes that run B and W together.
    """
    return _step_times(pipeline, n).costs(joint=joint)


def _step_times(pipeline: RunningPipeline, n: int) -> StepTimes:
    """Read the times of the last steps (every rank must call)."""
    stages = pipeline.stages
    executors = stages.executors
    lines = timelines(pipeline, n)
    norms = stages.gather_dict(
        {s: x.times.norm_seconds(n) for s, x in executors.items()}
    )
    if stages not in _wires:
        _wires[stages] = measure_wires(executors, pipeline.schedule.placement)
    defers = stages.gather_dict({s: x.stage.defers for s, x in executors.items()})
    splits = [defers[stage] for stage in sorted(defers)]
    return read_steps(lines, norms, _wires[stages], splits)


def profile(
    pipeline: RunningPipeline,
    inputs: Batch = None,
    targets: Batch = None,
    *,
    rounds: int = 8,
) -> Profile:
    """Measure the costs of every layer on these devices (every rank must call).

    It trains: some steps on the batch; then each layer runs alone on what it reads in a
    step, which shows how each chunk's times divide among its layers. Make the
    pipeline for it; no layer is recomputed in it from here on.

    Args:
        pipeline: of layers that are not sharded.
        inputs: of a batch, as for `zbpp.Pipeline.step`.
        targets: of the same batch.
        rounds: runs of each layer alone that count, after two for warming up; as many
            steps do, but 10 at most.

    Raises:
        RequestError: rounds is below 1, layers are sharded, or the batch does not fit.
        PeerError: another stage died, did not answer, or does not profile.
    """
    if rounds < 1:
        raise RequestError(f"rounds is {rounds}; it must be at least 1")
    stages = pipeline.stages
    executors = stages.executors
    if any(x.collectives.has_units for x in executors.values()):
        raise RequestError(
            "sharded layers cannot be profiled, because they cannot run alone; profile "
            "the layers without shards, in a pipeline with shard='none': their passes "
            "are the same"
        )
    for executor in executors.values():
        executor.stage.recompute(())
    with ExitStack() as noting:
        inputs_of = {
            s: noting.enter_context(noted_inputs(x.stage)) for s, x in executors.items()
        }
        pipeline.step(inputs, targets)
    n = min(rounds, _KEPT)
    for _ in range(WARM_UP - 1 + n):
        pipeline.step(inputs, targets)
    pipeline.synchronize()
    times = _step_times(pipeline, n)
    alone: dict[int, LayerTimes] = {}
    with stages.running():
        for s, executor in executors.items():
            alone |= time_layers(
                executor.stage,
                inputs_of[s],
                pipeline.settings,
                n_layers=pipeline.n_layers,
                rounds=rounds,
            )
        return join(
            times,
            stages.gather_dict(alone),
            [*map(len, pipeline.split)],
            device_name(executor.stage.device),
        )


def prediction(
    pipeline: RunningPipeline, costs: Costs | None = None, *, n: int = 10
) -> Prediction:
    """Simulated and measured: step time and bubble (every rank must call).

    Args:
        pipeline: after some steps.
        costs: in ms; None: those of the same steps.
        n: last steps that count; their times include the script's work between them.

    Raises:
        RequestError: there was no step yet.
    """
    return predict(
        pipeline.schedule,
        timelines(pipeline, n),
        costs or measured_costs(pipeline, n, joint=True),
        costs_given=costs is not None,
        side_by_side=len(pipeline.stages.executors) == 1,
    )


def split_report(pipeline: RunningPipeline) -> dict[str, str]:
    """Name the pass that computes each gradient of this process, in the first step.

    ``"W"``, or ``"B: no product's weight"``: a weight waits for W if it is used by
    products only, as it is or through views, casts and slices.
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
    """One line: the share of the parameters whose gradients W computes.

    Args:
        where: see `split_report`.
        sizes: elements of each parameter.

    >>> summarize_split({"a": "W", "b": "B: no product's weight"}, {"a": 90, "b": 10})
    'W computes the gradients of 90.0% of 100 parameters'
    """
    total = sum(sizes[name] for name in where)
    in_w = sum(sizes[name] for name, text in where.items() if text == "W")
    share = in_w / max(1, total)
    return f"W computes the gradients of {share:.1%} of {total:,} parameters"


def split_warning(pipeline: RunningPipeline) -> str | None:
    """Warn that W computes the gradients of less than half of the matrices.

    Embeddings, norms and biases do not count: they have no work for W.
    """
    schedule = pipeline.schedule
    if not schedule.runs(PassKind.W):
        return None
    where, sizes = split_report(pipeline), _leaf_sizes(pipeline)
    stages = [executor.stage for executor in pipeline.stages.executors.values()]
    matrices = [name for name in _matrices(stages) if name in where]
    n = sum(sizes[name] for name in matrices)
    in_w = sum(sizes[name] for name in matrices if where[name] == "W")
    if 2 * in_w >= n or (not in_w and any(stage.defers for stage in stages)):
        return None  # modules that leave work for W by themselves are in no plan
    return (
        f"{schedule.name} gains little here: {summarize_split(where, sizes)}; "
        "zbpp.diagnostics.split_report(pipeline) names them, and '1F1B' is as fast"
    )


def _matrices(stages: Iterable[Stage]) -> Iterator[str]:
    """Names of parameters that products may multiply by."""
    for chunk in chain.from_iterable(stage.chunks.values() for stage in stages):
        for index, layer in chunk.numbered():
            for path, module in layer.named_modules():
                for name, p in module.named_parameters(path, recurse=False):
                    if p.dim() > 1 and not isinstance(module, nn.Embedding):
                        yield chunk.own_name(index, name)


def _leaf_sizes(pipeline: RunningPipeline) -> dict[str, int]:
    """Elements of each parameter, by the names of `split_report`."""
    stages = (x.stage for x in pipeline.stages.executors.values())
    leaves = chain.from_iterable(stage.named_leaves() for stage in stages)
    return {name: p.numel() for _, name, p in leaves}
