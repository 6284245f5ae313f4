"""Make one profile of steps and of layers alone: the layers, scaled to their chunks.

    F of a layer, alone   2.0 | 1.0 | 2.0 | 1.0 | 0.2    computes, communicates, ...
    F in a step, 6.6      2.2 | 1.0 | 2.2 | 1.0 | 0.2    its parts

In a step a pass takes longer than alone for what the host does then, or for layers
that are recomputed, and shorter by the cut of the graph. All that computes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from statistics import fmean

from zbpp.core import Lane, LayerCosts, Parts, ranges_of
from zbpp.core.parts import PartTimes, merged
from zbpp.profiling.alone import LayerTimes
from zbpp.profiling.links import link_list
from zbpp.profiling.profile import Profile
from zbpp.profiling.steps import StepTimes


def join(
    times: StepTimes,
    alone: Mapping[int, LayerTimes],
    split: Sequence[int],
    device: str,
) -> Profile:
    """Make one profile of the measurements of all ranks.

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
    inside = ranges_of(split)
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
            for time in _divided(
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
        parts=_parts(rows, columns, loss),
    )
    return Profile(costs, times, tuple(split), device)


def _divided(whole: float, each: Sequence[float]) -> list[float]:
    """Divide a time in the proportions of others; evenly if all of these are 0."""
    total = sum(each)
    return [whole * x / total if total > 0 else whole / len(each) for x in each]


def _optimizer(
    times: StepTimes, inside: Sequence[range], rows: Sequence[LayerTimes]
) -> tuple[float, ...]:
    """Divide the optimizer's time of each stage among its layers by parameters."""
    placement = times.last.placement
    costs = [0.0] * len(rows)
    for stage, in_step in enumerate(times.optimizer):
        layers = [i for chunk in placement.chunks_of[stage] for i in inside[chunk]]
        shares = _divided(in_step, [rows[i].n_learning for i in layers])
        for i, share in zip(layers, shares, strict=True):
            costs[i] = share
    return tuple(costs)


def _parts(
    rows: Sequence[LayerTimes], times: Mapping[str, Sequence[float]], loss: float
) -> tuple[Parts, ...] | None:
    """Parts of all layers; None if none of them communicates.

    Args:
        rows: times alone, with the loss at the end of the last F.
        times: of ``f``, ``b`` and ``w`` of each layer in a step.
        loss: time of the loss, on top of the last F.
    """
    if all(len(lengths) == 1 for x in rows for lengths in x.parts.values()):
        return None
    losses = [0.0] * (len(rows) - 1) + [loss]
    each = zip(rows, times["f"], times["b"], times["w"], losses, strict=True)
    return tuple(
        Parts(
            _fitted(x.parts["F"], f, at_end),
            _fitted(x.parts["B"], b),
            ((Lane.COMPUTE, w),),
        )
        for x, f, b, w, at_end in each
    )


def _fitted(lengths: Sequence[float], time: float, loss: float = 0.0) -> PartTimes:
    """Scale computing parts so that a pass takes a time, without the loss."""
    fitted = list(lengths)
    if len(fitted) % 2:
        fitted[-1] = max(0.0, fitted[-1] - loss)
    on_network = min(sum(fitted[1::2]), time)
    fitted[1::2] = _divided(on_network, fitted[1::2])
    fitted[::2] = _divided(time - on_network, fitted[::2])
    return merged(zip(cycle((Lane.COMPUTE, Lane.NETWORK)), fitted, strict=False))
