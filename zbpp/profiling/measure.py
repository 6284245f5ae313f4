"""A profile of a pipeline: every rank measures its own stages, then all tell all."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from zbpp.core import RequestError, Slot
from zbpp.profiling.capture import Given, capture
from zbpp.profiling.join import Profiled, join, most_in_flight
from zbpp.profiling.kept import training_kept
from zbpp.profiling.memory import measure_memory
from zbpp.profiling.passes import PassTiming, time_passes
from zbpp.profiling.profile import Profile
from zbpp.profiling.rehearsal import rehearse
from zbpp.profiling.steps import time_steps
from zbpp.profiling.stopwatch import Stopwatch, spread
from zbpp.profiling.window import measure_wires
from zbpp.runtime.comm.place import Place
from zbpp.runtime.executor import Executor
from zbpp.runtime.microbatches import Batch, split_inputs, split_targets

__all__ = ["measure"]


def measure(
    pipeline: Profiled,
    inputs: Batch | None,
    targets: Batch | None,
    *,
    rounds: int,
    most_s: float,
    memory: bool,
) -> Profile:
    """Measure the costs of every layer; `zbpp.Pipeline.profile` explains the arguments.

    Raises:
        RequestError: layers are sharded, steps were taken, a number is not above 0, or
            the batch does not fit; only the last of these ends the pipeline.
    """
    if rounds < 1 or not most_s > 0:
        raise RequestError(
            f"rounds is {rounds} and most_s {most_s}; they must be above 0"
        )
    stages, device = pipeline.stages, pipeline.options.device
    executors = stages.executors
    if any(x.collectives.has_units for x in executors.values()):
        raise RequestError(
            "layers that are sharded cannot be profiled, as they cannot be copied; "
            "profile the bare ones, in a pipeline with shard='none': their passes "
            "are the same"
        )
    if pipeline.step != pipeline.options.numerics.first_step:
        raise RequestError(
            "profile() comes before the first step, as it clears the optimizers' "
            "state; profile a new Pipeline, or use "
            "zbpp.diagnostics.measured_costs(pipeline) during a training"
        )
    stages.synchronize()
    stages.transport.doing = "profile"
    with stages.running():
        microbatch = _given(pipeline, inputs, targets)
        with training_kept(executors, device):
            figures = _measure_own(pipeline, microbatch, rounds, most_s, memory)
        sent = {c: n for part in microbatch.values() for c, n in part.out_bytes.items()}
        wires = measure_wires(executors, pipeline.schedule.placement, sent)
        parts = stages.transport.gather(figures)
        return join(pipeline, parts, wires)


def _given(
    pipeline: Profiled, inputs: Batch | None, targets: Batch | None
) -> dict[int, Given]:
    placement, m = pipeline.schedule.placement, pipeline.schedule.n_microbatches
    first, last = placement.stage_of[0], placement.stage_of[-1]
    return {
        stage: Given(
            split_inputs(inputs, m)[0] if stage == first else None,
            split_targets(targets, m)[0] if stage == last else None,
        )
        for stage in pipeline.stages.executors
    }


def _measure_own(
    pipeline: Profiled,
    microbatch: Mapping[int, Given],
    rounds: int,
    most_s: float,
    memory: bool,
) -> dict[str, Any]:
    """Measure the stages of this process; what is found can be pickled."""
    executors, placement = pipeline.stages.executors, pipeline.schedule.placement
    options = pipeline.options
    capture(executors, placement, options, microbatch, step=pipeline.step)
    watches = {stage: Stopwatch(options.device) for stage in executors}
    timings = {
        stage: PassTiming(
            list(executor.stage.chunks.values()),
            n_chunks=placement.n_chunks,
            n_layers=sum(pipeline.split),
            options=options,
            microbatch=microbatch[stage],
            step=pipeline.step,
            watch=watches[stage],
            ahead=most_in_flight(pipeline.schedule, stage) > 1,
        )
        for stage, executor in executors.items()
    }
    transport = next(iter(executors.values())).transport
    transport.gather(None)  # all begin together: they share a machine
    any_of = partial(_any_beside, pipeline.place, options.device)
    counted = time_passes(timings, rounds, most_s, any_of)
    rows: dict[int, list[list[Slot]]] = {}
    if len(executors) == 1 and placement.n_stages > 1:
        ((stage, executor),) = executors.items()
        rows[stage] = rehearse(
            stage,
            executor,
            pipeline.schedule,
            microbatch[stage],
            step=pipeline.step,
            most_s=most_s,
        )
    for stage, executor in executors.items():
        time_steps(executor, watches[stage])
    figures: dict[str, Any] = {
        "rounds": counted,
        "rows": rows,
        "nothing": {},
        "chunks": {},
        "layers": {},
        "steps": {},
        "memory": {},
        "bytes": {},
        "shares": {},
        "points": {},
        "splits": {stage: timing.splits() for stage, timing in timings.items()},
    }
    for stage, executor in executors.items():
        _note_times(figures, stage, executor, watches[stage])
        figures["bytes"] |= timings[stage].out_bytes
        if memory:
            figures["memory"] |= measure_memory(timings[stage], options.device)
    return figures


def _any_beside(place: Place, device: torch.device, flag: bool) -> bool:
    """True if a flag is for any process of this stage; all of them must call."""
    groups = [place.group(dim) for dim in place.dims]
    if not groups:
        return flag
    number = torch.tensor([int(flag)], device=device)
    for group in groups:
        dist.all_reduce(number, dist.ReduceOp.MAX, group=group)
    return bool(number)


def _note_times(
    figures: dict[str, Any], stage: int, executor: Executor, watch: Stopwatch
) -> None:
    for chunk in executor.stage.chunks.values():
        times = {k: watch.seconds((k, "chunk", chunk.index)) for k in "FBW"}
        times["BW"] = [b + w for b, w in zip(times["B"], times["W"], strict=True)]
        figures["chunks"][chunk.index] = {k: spread(v) for k, v in times.items()}
        for index, layer in chunk.numbered():
            figures["layers"][index] = {
                k: spread(watch.seconds((k, "layer", index))).mean
                for k in ("F", "B", "W", "loss")
            }
            figures["points"][index] = {
                k: watch.parts((k, "layer", index)) for k in "FB"
            }
            figures["shares"][index] = sum(
                p.numel() for p in layer.parameters() if p.requires_grad
            )
    cuts = {k: watch.seconds((k, "nothing", 1)) for k in "FBW"}
    if cuts["F"]:
        figures["nothing"][stage] = {k: spread(v).mean for k, v in cuts.items()}
    figures["steps"][stage] = {k: spread(watch.seconds(k)) for k in ("O", "V", "norm")}
