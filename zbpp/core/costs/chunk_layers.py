"""Costs of chunks, dealt to their layers.

The layers of a chunk are taken to be equal, as nothing else is known of them: each has
an equal share of its times and of what its passes leave. Above that, a pass needs as
much in one layer as it does in the chunk (temporaries come one after the other).
"""

from collections.abc import Sequence
from itertools import chain, repeat
from operator import add

from zbpp.core.costs.dealing import PerChunk, per_chunk
from zbpp.core.costs.layers import LayerCosts
from zbpp.core.costs.links import edge_delays
from zbpp.core.costs.memory_model import MemoryModel
from zbpp.core.costs.times import Costs
from zbpp.core.errors import RequestError
from zbpp.core.placement import Placement

__all__ = ["chunk_layers"]


def chunk_layers(
    costs: Costs,
    memory: MemoryModel,
    placement: Placement,
    split: Sequence[int] | None = None,
) -> LayerCosts:
    """Costs of layers that give those of the chunks again, on this placement.

    Args:
        costs: of the chunks; what F and B gather is a part of their layers' f and b.
        memory: likewise; ``peak_bw`` follows from the other peaks.
        placement: chunk to stage.
        split: layers of each chunk; None: one each.

    Raises:
        RequestError: lists of a wrong length, or a stage that cannot split its
            backward.
    """
    if costs.splits is not None and not all(costs.splits):
        raise RequestError(
            f"stage {costs.splits.index(False)} cannot split its backward (splits of "
            "the costs), and a part that is recomputed must be; leave one of them out"
        )
    counts = [1] * placement.n_chunks if split is None else list(split)

    def dealt(name: str, value: float | tuple[float, ...]) -> tuple[float, ...]:
        each = zip(per_chunk(name, value, placement), counts, strict=True)
        return tuple(chain.from_iterable(repeat(one / n, n) for one, n in each))

    gathers = dealt("all_gather", costs.all_gather)
    f, b = dealt("f", costs.f), dealt("b", costs.b)
    if costs.gathers:
        f, b = (tuple(map(add, times, gathers)) for times in (f, b))
        gathers = (0.0,) * len(gathers)
    held = memory.on(placement)
    m_b, m_w = dealt("m_b", memory.m_b), dealt("m_w", memory.m_w)
    more = {
        "peak_f": [p - b for p, b in zip(held.peak_f, held.m_b, strict=True)],
        "peak_b": [
            p - max(0.0, w - b)
            for p, w, b in zip(held.peak_b, held.m_w, held.m_b, strict=True)
        ],
        "peak_w": list(held.peak_w),
    }
    least = {
        "peak_f": m_b,
        "peak_b": tuple(max(0.0, w - b) for w, b in zip(m_w, m_b, strict=True)),
        "peak_w": (0.0,) * sum(counts),
    }
    peaks = {
        name: tuple(
            low + high
            for low, high in zip(
                least[name],
                chain.from_iterable(map(repeat, more[name], counts)),
                strict=True,
            )
        )
        for name in more
    }
    inside = [[0.0] * (n - 1) for n in counts]

    def at_cuts(name: str, value: float | tuple[float, ...]) -> PerChunk:
        edges = [[one] for one in edge_delays(value, placement, name=name)]
        pairs = zip(inside, [*edges, []], strict=True)
        return tuple(x for pair in pairs for x in chain(*pair)) or 0.0

    return LayerCosts(
        n_layers=sum(counts),
        f=f,
        b=b,
        w=dealt("w", costs.w),
        optimizer=dealt("optimizer", costs.optimizer),
        m_b=m_b,
        m_w=m_w,
        m_fixed=dealt("m_fixed", memory.m_fixed),
        peak_f=peaks["peak_f"],
        peak_b=peaks["peak_b"],
        peak_w=peaks["peak_w"],
        peak_o=dealt("peak_o", memory.peak_o),
        m_r=None if memory.m_r is None else dealt("m_r", memory.m_r),
        comm=at_cuts("comm", costs.comm),
        send_occupies=at_cuts("send_occupies", costs.send_occupies),
        loss=costs.loss,
        reduction=costs.reduction,
        validation=costs.validation,
        limit=memory.limit,
        memory_unit=memory.memory_unit,
        all_gather=gathers,
        reduce_scatter=dealt("reduce_scatter", costs.reduce_scatter),
    )
