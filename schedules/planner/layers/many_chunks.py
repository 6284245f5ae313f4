"""Balance of any placement: all splits if they are few, else moves of layers.

A move takes one layer from a chunk and gives one to another; the chunks between them
shift by a layer. Moves go on while the largest load falls, or at the same largest load
the sum of the squared loads of stages, then of chunks. Such a split is proved best only
where it meets a lower bound.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, pairwise

from zbpp.schedules.planner.layers.loads import Loads, even_split, roomy

__all__ = ["all_splits", "descend", "is_few", "moved", "start_of", "try_all"]

_FEW = 30_000
_ROUNDING = 1e-12  # relative


def is_few(loads: Loads) -> bool:
    """True if all splits can be tried."""
    return math.comb(loads.n_layers - 1, loads.placement.n_chunks - 1) <= _FEW


def all_splits(n_layers: int, n_chunks: int) -> Iterator[tuple[int, ...]]:
    """Every way to deal layers, at least one a chunk.

    >>> list(all_splits(4, 2))
    [(1, 3), (2, 2), (3, 1)]
    """
    for cuts in combinations(range(1, n_layers), n_chunks - 1):
        yield tuple(end - first for first, end in pairwise((0, *cuts, n_layers)))


def try_all(loads: Loads) -> tuple[int, ...] | None:
    """Split for the least largest load, then for level ones; None if none fits."""
    splits = all_splits(loads.n_layers, loads.placement.n_chunks)
    fitting = (split for split in splits if loads.fits(split))
    return min(fitting, key=lambda split: _figures(loads, split), default=None)


def start_of(loads: Loads) -> tuple[int, ...]:
    """A first split: cuts where the loads so far come to even shares of all."""
    n_layers, n_chunks = loads.n_layers, loads.placement.n_chunks
    total = loads.time[-1]
    if total == 0:
        return even_split(n_layers, n_chunks)
    split: list[int] = []
    first = 0
    for chunk in range(1, n_chunks):
        last = n_layers - (n_chunks - chunk)
        share = total * chunk / n_chunks
        end = min(range(first + 1, last + 1), key=lambda e: abs(loads.time[e] - share))
        split.append(end - first)
        first = end
    return (*split, n_layers - first)


def moved(split: Sequence[int], source: int, target: int) -> tuple[int, ...] | None:
    """One layer fewer in a chunk, one more in another; None if it has only one.

    >>> moved((3, 2, 2), 0, 2)
    (2, 2, 3)
    """
    if split[source] < 2 or source == target:
        return None
    after = list(split)
    after[source] -= 1
    after[target] += 1
    return tuple(after)


def descend(
    loads: Loads, split: tuple[int, ...], *, most: float = math.inf
) -> tuple[int, ...]:
    """Move layers while that is better; no load may come above ``most``.

    A split that does not fit the memory is first made to, if moves can.
    """
    chunks = range(len(split))
    best = _figures(loads, split)
    while True:
        found = split
        for source in chunks:
            for target in chunks:
                other = moved(split, source, target)
                if other is None:
                    continue
                figures = _figures(loads, other)
                if figures[1] <= most and _is_below(figures, best):
                    best, found = figures, other
        if found == split:
            return split
        split = found


def _figures(loads: Loads, split: Sequence[int]) -> tuple[float, float, float, float]:
    """Memory over the limits, largest load, squares of loads of stages, of chunks."""
    busy, held = loads.by_stage(split)
    over = sum(
        max(0.0, one - roomy(limit))
        for one, limit in zip(held, loads.limit, strict=True)
    )
    ends = accumulate(split, initial=0)
    chunks = [loads.busy(*ends_of_one) for ends_of_one in pairwise(ends)]
    return over, max(busy), _squares(busy), _squares(chunks)


def _squares(values: Sequence[float]) -> float:
    return math.fsum(value * value for value in values)


def _is_below(one: Sequence[float], other: Sequence[float]) -> bool:
    for mine, theirs in zip(one, other, strict=True):
        if abs(mine - theirs) > _ROUNDING * max(abs(mine), abs(theirs)):
            return mine < theirs
    return False
