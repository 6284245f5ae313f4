"""Make one profile of what all ranks have found: layers scaled to their chunks."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from zbpp.core import LayerCosts, Pass, PassKind, Placement, Schedule
from zbpp.profiling.links import Link, link_list
from zbpp.profiling.points import layer_parts
from zbpp.profiling.profile import ChunkProfile, Profile
from zbpp.profiling.rehearsal import rehearsed_steps
from zbpp.profiling.step_times import StepTimes, measure_step_times
from zbpp.profiling.stopwatch import Spread
from zbpp.profiling.window import Wires
from zbpp.runtime.comm.place import Place
from zbpp.runtime.driver.build import Settings
from zbpp.runtime.driver.stages import LocalStages
from zbpp.runtime.support.devices import device_name

__all__ = ["Profiled", "join", "most_in_flight"]


@dataclass(frozen=True)
class Profiled:
    """The parts of a pipeline that a profile needs."""

    stages: LocalStages
    schedule: Schedule
    split: Sequence[int]
    options: Settings
    step: int
    place: Place


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
    wires: Wires,
) -> Profile:
    """Make one profile of what all ranks have found."""
    placement, links = pipeline.schedule.placement, wires.links
    figures: dict[str, dict[int, Any]] = {
        key: {k: v for part in parts for k, v in part[key].items()}
        for key in (
            "chunks",
            "layers",
            "nothing",
            "steps",
            "memory",
            "bytes",
            "shares",
            "splits",
            "rows",
            "points",
        )
    }
    sizes = figures["bytes"]
    message_bytes = fmean(sizes.values()) if sizes else 0.0
    rehearsed = rehearsed_steps(figures["rows"], pipeline.schedule)
    seen = None
    if rehearsed is not None:
        seen = measure_step_times(
            rehearsed,
            links,
            message_bytes=message_bytes,
            one_clock=wires.one_clock,
        )
    measured = _chunk_times(figures["chunks"], placement, links, seen)
    each = _overheads(figures["nothing"], measured, seen)
    chunks, layers = _scale(pipeline, figures, measured, each)
    waited = _waited_for(links, seen, message_bytes) if seen else links
    steps = [figures["steps"][stage] for stage in range(placement.n_stages)]
    optimizer = _by_share(pipeline, figures["shares"], steps)
    n_layers = sum(pipeline.split)
    every = range(n_layers)
    costs = LayerCosts(
        n_layers=n_layers,
        f=tuple(layers[i]["F"] for i in every),
        b=tuple(layers[i]["B"] for i in every),
        w=tuple(layers[i]["W"] for i in every),
        pass_f=each["F"],
        pass_b=each["B"],
        pass_w=each["W"],
        loss=layers[n_layers - 1]["loss"],
        optimizer=optimizer,
        message=tuple(float(figures["bytes"][i]) for i in every[:-1]),
        bandwidth=link_list(waited, placement.n_stages, "bandwidth") or None,
        delay=link_list(waited, placement.n_stages, "delay"),
        reduction=wires.reduction.mean,
        validation=max(step["V"].mean for step in steps),
        parts=layer_parts(
            [figures["points"][i] for i in every], [layers[i] for i in every]
        ),
    )
    return Profile(
        layers=costs,
        placement=placement,
        split=tuple(pipeline.split),
        chunks=chunks,
        optimizer=tuple(step["O"] + step["norm"] for step in steps),
        validation=tuple(step["V"] for step in steps),
        norm=tuple(step["norm"] for step in steps),
        reduction=wires.reduction,
        links=links,
        splits=tuple(figures["splits"][stage] for stage in range(placement.n_stages)),
        rounds=min(part["rounds"] for part in parts),
        device=device_name(pipeline.options.device),
        speculative=pipeline.schedule.is_post_validated,
    )


def _chunk_times(
    alone: Mapping[int, Mapping[str, Spread]],
    placement: Placement,
    links: Mapping[tuple[int, int], Link],
    seen: StepTimes | None,
) -> dict[int, dict[str, Spread]]:
    """Times of the passes as they are in a step, by chunk.

    Their means are those of a rehearsal, with the host's time between two passes;
    without one, what the passes took alone, with the host's time to send.
    """
    chunk_times = {}
    for chunk, times in alone.items():
        if seen is None:
            sends = _sends(chunk, placement, links)
            chunk_times[chunk] = {
                k: spread + sends.get(k, 0.0) for k, spread in times.items()
            }
            continue
        gap = seen.gaps[placement.stage_of[chunk]]
        joint = seen.mean(PassKind.BW, chunk)
        factor = _over(joint or 0.0, times["BW"].mean)
        mean = {}
        for kind in (PassKind.F, PassKind.B, PassKind.W):
            in_step = seen.mean(kind, chunk)
            alone_ms = times[kind].mean * factor
            mean[str(kind)] = (alone_ms if in_step is None else in_step) + gap
        mean["BW"] = mean["B"] + mean["W"] - gap  # one pass, one gap
        if joint is not None:
            mean["B"] -= gap / 2
            mean["W"] -= gap / 2
            mean["BW"] = joint + gap
        chunk_times[chunk] = {
            k: spread.with_mean(mean[k]) for k, spread in times.items()
        }
    return chunk_times


def _overheads(
    nothing: Mapping[int, Mapping[str, float]],
    measured: Mapping[int, Mapping[str, Spread]],
    seen: StepTimes | None,
) -> dict[str, float]:
    """Time of a pass on top of its layers', by kind: a cut, and the host's between.

    At most half of the shortest pass: the rest is that of its layers.
    """
    gap = 0.0 if seen is None else fmean(seen.gaps)
    overheads = {}
    for kind in "FBW":
        cut = fmean([cuts[kind] for cuts in nothing.values()]) if nothing else 0.0
        shortest = min(times[kind].mean for times in measured.values())
        overheads[kind] = min(cut + gap, shortest / 2)
    return overheads


def _waited_for(
    links: Mapping[tuple[int, int], Link], seen: StepTimes, n_bytes: float
) -> dict[tuple[int, int], Link]:
    """Links with the delays that messages had in a rehearsal, where jobs waited.

    Args:
        links: measured alone, which tells their bandwidth.
        seen: times of the rehearsal.
        n_bytes: of a message, by the layers' outputs.
    """
    return {
        pair: replace(link, delay=max(0.0, seen.waits[pair] - n_bytes / link.bandwidth))
        if pair in seen.waits
        else link
        for pair, link in links.items()
    }


def _scale(
    pipeline: Profiled,
    figures: Mapping[str, Mapping[int, Any]],
    measured: Mapping[int, Mapping[str, Spread]],
    each: Mapping[str, float],
) -> tuple[tuple[ChunkProfile, ...], dict[int, dict[str, float]]]:
    """Scale the times of layers to what their chunks take without an overhead.

    Args:
        pipeline: that was measured.
        figures: all that were measured.
        measured: times of the chunks, overheads included.
        each: overhead of a pass, by kind.
    """
    chunks, layers = [], {}
    cuts = list(figures["nothing"].values())
    cut = {
        k: fmean([stage_cuts[k] for stage_cuts in cuts]) if cuts else 0.0 for k in "FBW"
    }
    first = 0
    for chunk, count in enumerate(pipeline.split):
        indices = range(first, first + count)
        first += count
        times, alone = measured[chunk], figures["chunks"][chunk]
        raw = {
            (k, i): max(figures["layers"][i][k] - cut[k], figures["layers"][i][k] / 2)
            for k in "FBW"
            for i in indices
        }
        sums = {k: sum(raw[k, i] for i in indices) for k in "FBW"}
        whole = {k: sum(figures["layers"][i][k] for i in indices) for k in "FBW"}
        factor = {k: _over(times[k].mean - each[k], sums[k]) for k in "FBW"}
        for i in indices:
            scaled = {k: raw[k, i] * factor[k] for k in "FBW"}
            scaled["loss"] = min(
                scaled["F"], figures["layers"][i]["loss"] * factor["F"]
            )
            scaled["F"] -= scaled["loss"]
            layers[i] = scaled
        ratio = {k: _over(whole[k], alone[k].mean) for k in "FBW"}
        memory = figures["memory"].get(chunk, {"left": {}, "peak": {}})
        stage = pipeline.schedule.placement.stage_of[chunk]
        chunks.append(ChunkProfile(chunk, stage, times, ratio, **memory))
    return tuple(chunks), layers


def _sends(
    chunk: int, placement: Placement, links: Mapping[tuple[int, int], Link]
) -> dict[str, float]:
    """The host's time to send what F and B of a chunk put out, in ms."""
    stage_of = placement.stage_of

    def to(neighbour: int) -> float:
        if (
            not 0 <= neighbour < placement.n_chunks
            or stage_of[neighbour] == stage_of[chunk]
        ):
            return 0.0
        pair = sorted((stage_of[chunk], stage_of[neighbour]))
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


def _over(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else 1.0
