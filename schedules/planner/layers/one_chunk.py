"""Exact balance of one chunk a stage: dynamic programming over chunks and cuts.

    least[c][e] = min over e' < e of max(least[c-1][e'], load of the layers e'..e-1)

where the layers e'..e-1 fit the stage of chunk c. Of the splits with the least largest
load, a second pass takes the one with the least sum of squared loads: the others are
level too. O(C L^2) for C chunks of L layers.
"""

import math
from collections.abc import Callable

from zbpp.schedules.planner.layers.loads import Loads, roomy

__all__ = ["balance_one_chunk"]

_ROUNDING = 1e-12  # relative


def balance_one_chunk(loads: Loads) -> tuple[int, ...] | None:
    """Split for the least largest load; None if no split fits the memory."""
    found = _best(loads, math.inf, max)
    if found is None:
        return None
    most = max(loads.by_stage(found)[0])
    level = _best(loads, most * (1 + _ROUNDING), _add_square)
    return level or found


def _add_square(so_far: float, load: float) -> float:
    return so_far + load * load


def _best(
    loads: Loads, most: float, join: Callable[[float, float], float]
) -> tuple[int, ...] | None:
    """Least joined cost of all chunks, none with a load above ``most``."""
    n_layers, n_chunks = loads.n_layers, loads.placement.n_chunks
    least = {0: 0.0}
    origins: list[dict[int, int]] = []
    for chunk, stage in enumerate(loads.placement.stage_of):
        limit = roomy(loads.limit[stage])
        after: dict[int, float] = {}
        origin: dict[int, int] = {}
        last = n_layers - (n_chunks - 1 - chunk)
        for first, so_far in least.items():
            for end in range(first + 1, last + 1):
                load = loads.busy(first, end)
                if load > most or loads.held(chunk, first, end) > limit:
                    break
                cost = join(so_far, load)
                if cost < after.get(end, math.inf):
                    after[end], origin[end] = cost, first
        least = after
        origins.append(origin)
    if n_layers not in least:
        return None
    split: list[int] = []
    end = n_layers
    for origin in reversed(origins):
        split.append(end - origin[end])
        end = origin[end]
    return tuple(reversed(split))
