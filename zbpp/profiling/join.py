"""Make one profile of steps and of layers alone: the layers, scaled to their chunks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from statistics import fmean

from zbpp.core import LayerCosts, PassKind
from zbpp.profiling.alone import LayerTimes
from zbpp.profiling.links import link_list
from zbpp.profiling.memory import columns_of_bytes
from zbpp.profiling.points import layer_parts
from zbpp.profiling.profile import ChunkProfile, Profile, spread
from zbpp.profiling.steps import StepTimes

__all__ = ["join"]


def join(
    times: StepTimes,
    alone: Mapping[int, LayerTimes],
    split: Sequence[int],
    *,
    rounds: int,
    device: str,
) -> Profile:
    """Make one profile of what all ranks have found.

    Args:
        times: of the steps.
        alone: times of every layer.
        split: layers of each chunk.
        rounds: that were counted.
        device: kind of the devices.
    """
    timeline = times.last
    placement = timeline.placement
    rows = [alone[i] for i in range(sum(split))]
    ends = list(accumulate(split, initial=0))
    inside = [range(first, end) for first, end in pairwise(ends)]
    measured = [
        _chunk_times(times, chunk, [rows[i] for i in layers])
        for chunk, layers in enumerate(inside)
    ]
    # at most half of the shortest pass: the rest is that of its layers
    overhead = {
        kind: min(fmean(times.gaps), min(chunk[kind] for chunk in measured) / 2)
        for kind in "fbw"
    }
    scaled: dict[str, list[float]] = {"f": [], "b": [], "w": []}
    chunks = []
    for chunk, layers in enumerate(inside):
        stage = placement.stage_of[chunk]
        ratio = {}
        for kind, column in scaled.items():
            each = [getattr(rows[i], kind) for i in layers]
            whole = measured[chunk][kind]
            column += _dealt(whole - overhead[kind], each)
            without_gap = whole - times.gaps[stage]
            ratio[kind.upper()] = sum(each) / without_gap if without_gap > 0 else 1.0
        passes = {
            str(kind): spread(times.passes[kind, chunk])
            for kind in PassKind
            if times.passes.get((kind, chunk))
        }
        chunks.append(ChunkProfile(chunk, stage, passes, ratio))
    last = rows[-1]
    loss = scaled["f"][-1] * (last.loss / last.f if last.f > 0 else 0.0)
    scaled["f"][-1] -= loss
    links = {
        pair: replace(
            link,
            delay=max(
                0.0,
                times.waits[pair] - fmean(x.message for x in rows) / link.bandwidth,
            ),
        )
        if pair in times.waits
        else link
        for pair, link in times.wires.links.items()
    }
    each_pass = zip(*scaled.values(), strict=True)
    costs = LayerCosts(
        n_layers=len(rows),
        f=tuple(scaled["f"]),
        b=tuple(scaled["b"]),
        w=tuple(scaled["w"]),
        pass_f=overhead["f"],
        pass_b=overhead["b"],
        pass_w=overhead["w"],
        loss=loss,
        optimizer=_optimizer(times, inside, rows),
        message=tuple(float(x.message) for x in rows[:-1]) or 0.0,
        bandwidth=link_list(links, placement.n_stages, "bandwidth") or None,
        delay=link_list(links, placement.n_stages, "delay"),
        reduction=times.wires.reduction,
        validation=max(times.validation),
        parts=layer_parts(
            [x.parts for x in rows],
            [
                {"F": f, "B": b, "W": w, "loss": loss * (i == len(rows) - 1)}
                for i, (f, b, w) in enumerate(each_pass)
            ],
        ),
    )
    memory = [x.memory for x in rows if x.memory is not None]
    return Profile(
        layers=costs,
        memory=columns_of_bytes(memory) if len(memory) == len(rows) else None,
        placement=placement,
        split=tuple(split),
        chunks=tuple(chunks),
        optimizer=times.optimizer,
        validation=times.validation,
        links=times.wires.links,
        splits=times.splits,
        rounds=rounds,
        device=device,
        speculative=any(times.validation),
    )


def _chunk_times(
    times: StepTimes, chunk: int, layers: Sequence[LayerTimes]
) -> dict[str, float]:
    """Times of a chunk's passes and the gap before each; a BW is dealt to B and W."""
    gap = times.gaps[times.last.placement.stage_of[chunk]]
    apart = {kind: times.mean(kind, chunk) for kind in PassKind}
    f, b, w = (apart[kind] for kind in (PassKind.F, PassKind.B, PassKind.W))
    both = apart[PassKind.BW]
    if both is not None and w is None:
        alone_b, alone_w = sum(x.b for x in layers), sum(x.w for x in layers)
        in_w = alone_w / (alone_b + alone_w) if alone_b + alone_w > 0 else 0.5
        b, w = both * (1 - in_w) - gap / 2, both * in_w - gap / 2  # one gap
    return {
        name: max(0.0, (ms or 0.0) + gap) for name, ms in (("f", f), ("b", b), ("w", w))
    }


def _dealt(whole: float, each: Sequence[float]) -> list[float]:
    """Deal the time of a chunk to its layers as they have taken it alone."""
    total = sum(each)
    return [whole * x / total if total > 0 else whole / len(each) for x in each]


def _optimizer(
    times: StepTimes, inside: Sequence[range], rows: Sequence[LayerTimes]
) -> tuple[float, ...]:
    """Deal the optimizer's time of each stage to its layers by their parameters."""
    placement = times.last.placement
    costs = [0.0] * len(rows)
    for stage, in_step in enumerate(times.optimizer):
        layers = [i for chunk in placement.chunks_of[stage] for i in inside[chunk]]
        shares = _dealt(in_step, [rows[i].n_learning for i in layers])
        for i, share in zip(layers, shares, strict=True):
            costs[i] = share
    return tuple(costs)
