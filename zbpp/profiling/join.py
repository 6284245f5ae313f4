"""Make one profile of steps and of layers alone: the layers, scaled to their chunks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from statistics import fmean

from zbpp.core import LayerCosts
from zbpp.profiling.alone import LayerTimes
from zbpp.profiling.links import link_list
from zbpp.profiling.points import layer_parts
from zbpp.profiling.profile import Profile
from zbpp.profiling.steps import StepTimes

__all__ = ["join"]


def join(
    times: StepTimes,
    alone: Mapping[int, LayerTimes],
    split: Sequence[int],
    device: str,
) -> Profile:
    """Make one profile of what all ranks have found.

    Args:
        times: of the steps.
        alone: times of every layer.
        split: layers of each chunk.
        device: kind of the devices.

    Raises:
        RequestError: B and W have run as one pass.
    """
    placement = times.last.placement
    rows = [alone[i] for i in range(sum(split))]
    inside = [range(*ends) for ends in pairwise(accumulate(split, initial=0))]
    chunks = times.costs(joint=False).on(placement)
    measured = {"f": chunks.f, "b": chunks.b, "w": chunks.w}
    # at most half of the shortest pass: the rest is that of its layers
    overhead = {
        kind: min(fmean(times.gaps), min(of_chunks) / 2)
        for kind, of_chunks in measured.items()
    }
    columns = {
        kind: [
            time
            for layers, whole in zip(inside, of_chunks, strict=True)
            for time in _dealt(
                whole - overhead[kind], [getattr(rows[i], kind) for i in layers]
            )
        ]
        for kind, of_chunks in measured.items()
    }
    last = rows[-1]
    loss = columns["f"][-1] * min(1.0, last.loss / last.f if last.f > 0 else 0.0)
    columns["f"][-1] -= loss
    message = fmean(x.message for x in rows)
    links = {
        pair: replace(
            link,
            alpha=max(0.0, times.waits[pair] - message / link.bandwidth),
        )
        if pair in times.waits
        else link
        for pair, link in times.wires.links.items()
    }
    f, b, w = map(tuple, columns.values())
    costs = LayerCosts(
        n_layers=len(rows),
        f=f,
        b=b,
        w=w,
        pass_f=overhead["f"],
        pass_b=overhead["b"],
        pass_w=overhead["w"],
        loss=loss,
        optimizer=_optimizer(times, inside, rows),
        message=tuple(float(x.message) for x in rows[:-1]) or 0.0,
        bandwidth=link_list(links, placement.n_stages, "bandwidth") or None,
        delay=link_list(links, placement.n_stages, "alpha"),
        reduction=times.wires.reduction,
        validation=max(times.validation),
        parts=layer_parts([x.parts for x in rows], columns, loss),
    )
    return Profile(costs, times, rows, tuple(split), device)


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
