"""Make one profile of what all ranks have found: layers scaled to their chunks."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zbpp.core import LayerCosts, Pass, PassKind, Placement, Schedule
from zbpp.profiling.links import Link, link_list
from zbpp.profiling.profile import ChunkProfile, Profile
from zbpp.profiling.stopwatch import Spread
from zbpp.runtime.driver.build import StageOptions
from zbpp.runtime.executor import Executor

__all__ = ["Profiled", "join", "most_in_flight"]


@dataclass(frozen=True)
class Profiled:
    """The parts of a pipeline that a profile needs."""

    executors: Mapping[int, Executor]
    schedule: Schedule
    split: Sequence[int]
    options: StageOptions
    step: int


def most_in_flight(schedule: Schedule, stage: int) -> int:
    """The most forwards of one chunk, on a stage, whose backward is not done."""
    held: Counter[int] = Counter()
    most = 0
    for job in schedule.orders[stage]:
        if isinstance(job, Pass):
            first, last = job.kind is PassKind.F, job.kind in (PassKind.W, PassKind.BW)
            held[job.chunk] += first - last
            most = max(most, held[job.chunk])
    return most


def join(
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
        reduction=max(part["reduction"].mean for part in parts),
        validation=max(step["V"].mean for step in steps),
    )
    return Profile(
        layers=costs,
        placement=placement,
        split=tuple(pipeline.split),
        chunks=chunks,
        optimizer=tuple(step["O"] + step["norm"] for step in steps),
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
        (steps[stage]["O"].mean + steps[stage]["norm"].mean)
        * (shares[layer] / totals[stage] if totals[stage] else 1 / stages.count(stage))
        for layer, stage in enumerate(stages)
    )


def _over(one: float, other: float) -> float:
    return one / other if other > 0 else 1.0


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return device.type
