"""Layers of unequal work, and the least step of all their splits."""

from collections.abc import Iterator

from zbpp.core import LayerCosts, Placement, lower_bound
from zbpp.schedules.planner.layers.balance import Loads

__all__ = ["TIMES", "least_of_one_chunk", "llama", "unequal"]

HEAD = 2.4  # layers' work, of Llama 8B's
TIMES = {  # F, B, W and message of a stage of 4 layers; arXiv 2401.10241, table 9
    "F = B = W": (4.0, 4.0, 4.0, 0.0, 0.5),
    "28.3B": (10.408, 10.204, 7.703, 0.408, 0.432432),
}


def unequal(n_layers: int, heavy: int, unit: float = 1.0) -> LayerCosts:
    """Embedding half a layer's work, head three, one layer twice; F = B = W."""
    work = [0.5, *[1.0] * (n_layers - 2), 3.0]
    work[heavy] *= 2
    times = tuple(unit * one for one in work)
    return LayerCosts(n_layers=n_layers, f=times, b=times, w=times)


def llama(times: str, n_stages: int) -> LayerCosts:
    """32 layers; the head is in the last one. Memory p M_B, of 32 / p layers each."""
    *passes, message, share = TIMES[times]
    of_layer = [(one / 4,) * 31 + (one / 4 * (1 + HEAD),) for one in passes]
    return LayerCosts(
        32,
        *of_layer,
        comm=message,
        m_b=1.0,
        m_w=share,
        memory_limit=32.0,
    )


def least_of_one_chunk(layers: LayerCosts, p: int, m: int, below: float) -> float:
    """Least lower bound of the step over all splits of one chunk a stage.

    A split whose busiest stage takes ``below`` or longer is left out.
    """
    placement, least = Placement.single(p), below
    loads = Loads.of(layers, placement, m)

    def cuts(end: int, n_chunks: int) -> Iterator[tuple[int, ...]]:
        if n_chunks == 0:
            yield from [()] if end == 0 else []
            return
        for first in range(n_chunks - 1, end):
            if loads.busy(first, end) < below:
                yield from ((*own, end - first) for own in cuts(first, n_chunks - 1))

    for split in cuts(layers.n_layers, p):
        bound = lower_bound(placement, m, layers.on(placement, split))
        least = min(least, max(bound, *loads.by_stage(split)[0]))
    return least
