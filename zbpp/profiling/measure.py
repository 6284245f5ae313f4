"""A profile of a pipeline: every rank measures its own stages, then all tell all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zbpp.core import LayerCosts, Placement, RequestError, Schedule
from zbpp.profiling.capture import Given, capture
from zbpp.profiling.kept import training_kept
from zbpp.profiling.links import Link, link_list, measure_links
from zbpp.profiling.memory import measure_memory
from zbpp.profiling.passes import PassTiming, time_passes
from zbpp.profiling.profile import ChunkProfile, Profile
from zbpp.profiling.steps import time_reduction, time_steps
from zbpp.profiling.stopwatch import Spread, Stopwatch, spread
from zbpp.runtime.driver.build import StageOptions
from zbpp.runtime.executor import Executor
from zbpp.runtime.microbatches import Batch, split_inputs, split_targets

__all__ = ["Profiled", "measure"]

_REDUCTIONS = 10


@dataclass(frozen=True)
class Profiled:
    """The parts of a pipeline that a profile needs."""

    executors: Mapping[int, Executor]
    schedule: Schedule
    split: Sequence[int]
    options: StageOptions
    step: int


def measure(
    pipeline: Profiled,
    inputs: Batch | None,
    targets: Batch | None,
    *,
    rounds: int,
    most_s: float,
    memory: bool,
) -> Profile:
    """Measure (every rank must call, with its last step validated).

    Args:
        pipeline: what to measure.
        inputs, targets: a batch as for a step; its first micro-batch is used.
        rounds: passes to count, after a warm-up.
        most_s: seconds after which fewer rounds will do.
        memory: also measure what the passes leave and need.

    Raises:
        RequestError: the batch does not fit, or a number is none.
    """
    if rounds < 1 or not most_s > 0:
        raise RequestError(
            f"rounds is {rounds} and most_s {most_s}; they must be above 0"
        )
    device = pipeline.options.device
    given = _given(pipeline, inputs, targets)
    with training_kept(pipeline.executors, device):
        own = _measure_own(pipeline, given, rounds, most_s, memory)
    links = measure_links(
        pipeline.executors,
        pipeline.schedule.placement,
        max(own["bytes"].values(), default=0),
    )
    transport = next(iter(pipeline.executors.values())).transport
    parts = transport.gather(own)
    return _join(pipeline, parts, links)


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
        for stage in pipeline.executors
    }


def _measure_own(
    pipeline: Profiled,
    given: Mapping[int, Given],
    rounds: int,
    most_s: float,
    memory: bool,
) -> dict[str, Any]:
    """Measure the stages of this process; what is found can be pickled."""
    executors, placement = pipeline.executors, pipeline.schedule.placement
    options = pipeline.options
    capture(executors, placement, options, given, step=pipeline.step)
    watches = {stage: Stopwatch(options.device) for stage in executors}
    timings = {
        stage: PassTiming(
            list(executor.stage.chunks.values()),
            n_chunks=placement.n_chunks,
            n_layers=sum(pipeline.split),
            options=options,
            given=given[stage],
            step=pipeline.step,
            watch=watches[stage],
        )
        for stage, executor in executors.items()
    }
    executors_one = next(iter(executors.values()))
    executors_one.transport.gather(None)  # all begin together: they share a machine
    counted = time_passes(timings, rounds, most_s)
    for stage, executor in executors.items():
        time_steps(executor, watches[stage])
    reduction = time_reduction(
        executors, sum(pipeline.split) + pipeline.schedule.n_microbatches, _REDUCTIONS
    )
    found: dict[str, Any] = {
        "rounds": counted,
        "reduction": reduction,
        "chunks": {},
        "layers": {},
        "steps": {},
        "memory": {},
        "bytes": {},
        "shares": {},
        "splits": {stage: one.splits() for stage, one in timings.items()},
    }
    for stage, executor in executors.items():
        _note_times(found, stage, executor, watches[stage])
        found["bytes"] |= timings[stage].out_bytes
        if memory:
            found["memory"] |= measure_memory(timings[stage], options.device)
    return found


def _note_times(
    found: dict[str, Any], stage: int, executor: Executor, watch: Stopwatch
) -> None:
    for chunk in executor.stage.chunks.values():
        times = {k: watch.seconds((k, "chunk", chunk.index)) for k in "FBW"}
        times["BW"] = [b + w for b, w in zip(times["B"], times["W"], strict=True)]
        found["chunks"][chunk.index] = {k: spread(v) for k, v in times.items()}
        for index, layer in chunk.numbered():
            found["layers"][index] = {
                k: spread(watch.seconds((k, "layer", index))).median
                for k in ("F", "B", "W", "loss")
            }
            found["shares"][index] = sum(
                p.numel() for p in layer.parameters() if p.requires_grad
            )
    found["steps"][stage] = {k: spread(watch.seconds(k)) for k in ("O", "V", "norm")}


def _join(
    pipeline: Profiled,
    parts: Sequence[dict[str, Any]],
    links: Mapping[tuple[int, int], Link],
) -> Profile:
    """Make one profile of what all ranks have found."""
    placement = pipeline.schedule.placement
    known: dict[str, dict[int, Any]] = {
        key: {k: v for part in parts for k, v in part[key].items()}
        for key in ("chunks", "layers", "steps", "memory", "bytes", "shares", "splits")
    }
    chunks, layers = _scale(pipeline, known, placement, links)
    steps = [known["steps"][stage] for stage in range(placement.n_stages)]
    optimizer = _by_share(pipeline, known["shares"], steps)
    n_layers = sum(pipeline.split)
    each = range(n_layers)
    costs = LayerCosts(
        n_layers=n_layers,
        f=tuple(layers[i]["F"] for i in each),
        b=tuple(layers[i]["B"] for i in each),
        w=tuple(layers[i]["W"] for i in each),
        loss=layers[n_layers - 1]["loss"],
        optimizer=optimizer,
        message=tuple(float(known["bytes"][i]) for i in each[:-1]),
        bandwidth=link_list(links, placement.n_stages, "bandwidth") or None,
        delay=link_list(links, placement.n_stages, "delay"),
        reduction=max(part["reduction"].median for part in parts),
        validation=max(step["V"].median for step in steps),
    )
    return Profile(
        layers=costs,
        placement=placement,
        split=tuple(pipeline.split),
        chunks=chunks,
        optimizer=tuple(step["O"] + step["norm"].median for step in steps),
        validation=tuple(step["V"] for step in steps),
        norm=tuple(step["norm"] for step in steps),
        reduction=max((p["reduction"] for p in parts), key=lambda one: one.median),
        links=links,
        splits=tuple(known["splits"][stage] for stage in range(placement.n_stages)),
        rounds=min(part["rounds"] for part in parts),
        device=_device_name(pipeline.options.device),
        speculative=pipeline.schedule.is_post_validated,
    )


def _scale(
    pipeline: Profiled,
    known: Mapping[str, Mapping[int, Any]],
    placement: Placement,
    links: Mapping[tuple[int, int], Link],
) -> tuple[tuple[ChunkProfile, ...], dict[int, dict[str, float]]]:
    """Scale the times of layers to those of their chunks."""
    chunks, layers = [], {}
    first = 0
    for chunk, count in enumerate(pipeline.split):
        own = range(first, first + count)
        first += count
        sends = _sends(chunk, placement, links)
        times: dict[str, Spread] = {
            kind: one + sends.get(kind, 0.0)
            for kind, one in known["chunks"][chunk].items()
        }
        sums = {k: sum(known["layers"][i][k] for i in own) for k in "FBW"}
        ratio = {k: _over(sums[k], known["chunks"][chunk][k].median) for k in "FBW"}
        for i in own:
            raw = known["layers"][i]
            scaled = {k: raw[k] * _over(times[k].median, sums[k]) for k in "FBW"}
            scaled["loss"] = raw["loss"] * _over(times["F"].median, sums["F"])
            scaled["F"] = max(0.0, scaled["F"] - scaled["loss"])
            layers[i] = scaled
        measured = known["memory"].get(chunk, {"left": {}, "peak": {}})
        chunks.append(
            ChunkProfile(chunk, placement.stage_of[chunk], times, ratio, **measured)
        )
    return tuple(chunks), layers


def _sends(
    chunk: int, placement: Placement, links: Mapping[tuple[int, int], Link]
) -> dict[str, float]:
    """The host's time to send what F and B of a chunk put out, in ms."""
    stage_of = placement.stage_of

    def to(other: int) -> float:
        if not 0 <= other < placement.n_chunks or stage_of[other] == stage_of[chunk]:
            return 0.0
        pair = sorted((stage_of[chunk], stage_of[other]))
        link = links.get((pair[0], pair[1]))
        return 0.0 if link is None else link.send

    return {"F": to(chunk + 1), "B": to(chunk - 1), "BW": to(chunk - 1)}


def _by_share(
    pipeline: Profiled, shares: Mapping[int, int], steps: Sequence[dict[str, Spread]]
) -> tuple[float, ...]:
    """Deal the optimizer's time of each stage to its layers by their parameters."""
    placement = pipeline.schedule.placement
    stages = [
        placement.stage_of[chunk]
        for chunk, count in enumerate(pipeline.split)
        for _ in range(count)
    ]
    totals = [0.0] * placement.n_stages
    for layer, stage in enumerate(stages):
        totals[stage] += shares[layer]
    return tuple(
        (steps[stage]["O"].median + steps[stage]["norm"].median)
        * (shares[layer] / totals[stage] if totals[stage] else 1 / stages.count(stage))
        for layer, stage in enumerate(stages)
    )


def _over(one: float, other: float) -> float:
    return one / other if other > 0 else 1.0


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return device.type
