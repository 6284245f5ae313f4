"""Layers to chunks, so that the busiest stage has the least to do.

The load of a stage is the time that it is busy in a step, whatever the order:

    sum over its layers of  m (f + b + w) + optimizer        m micro-batches
                            m (2 f + b + w) + optimizer      a recomputed layer
    and over its chunks of  m (pass_f + pass_b + pass_w)     on top of the layers'
    the last layer's f includes the loss; of passes in parts, those that compute count

Its memory is at least what is there all the time, and what the forwards leave of the
micro-batches that a chunk has in flight, one or more.

One chunk a stage and V's are split by dynamic programming: no split has a lower load.
Other placements begin with chunks of equal loads; then layers move while that helps.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, permutations
from typing import Any, NamedTuple

import numpy as np

from zbpp.core import (
    LayerCosts,
    LimitError,
    PassKind,
    Placement,
    even_split,
)
from zbpp.core.columns import spread
from zbpp.schedules.planner.problem import ROUNDING

_WIDER = 1.25  # the next load that is tried, if no split has a lower one
_CHUNK_SHARE = 1e-6  # of the squares of chunks: they decide between equal stages


@dataclass(frozen=True)
class Loads:
    """Sums over the layers 0..i-1, for i from 0 to L, and limits.

    ``time`` is load; ``fixed`` memory is always there, and forwards leave ``left`` on a
    micro-batch. ``in_flight`` micro-batches of each chunk must fit in the ``limit`` of
    each stage. A chunk has an ``overhead`` of load on top of its layers'.
    """

    time: Any
    fixed: Any
    left: Any
    in_flight: Any
    limit: Any
    placement: Placement
    overhead: float = 0.0

    @classmethod
    def of(
        cls,
        layers: LayerCosts,
        placement: Placement,
        n_microbatches: int,
        *,
        recompute: Collection[int] = (),
        in_flight: Sequence[float] | None = None,
    ) -> "Loads":
        """Weigh the layers; the arguments are those of `balance`."""
        even_split(layers.n_layers, placement.n_chunks)  # refuses too few layers
        again = np.isin(np.arange(layers.n_layers), list(recompute))
        kinds = PassKind.F, PassKind.B, PassKind.W
        f, b, w = (np.array(layers.computing(kind)) for kind in kinds)
        passes = f + again * np.array(layers.of("f")) + b + w
        time = n_microbatches * passes + np.array(layers.of("optimizer"), float)
        time[-1] += n_microbatches * layers.loss
        overhead = layers.pass_f + layers.pass_b + layers.pass_w
        return cls(
            time=_sums(time),
            fixed=_sums(layers.fixed(n_microbatches)),
            left=_sums(np.where(again, layers.of("m_r"), layers.of("m_b"))),
            in_flight=np.array(in_flight or (1.0,) * placement.n_chunks),
            limit=np.array(spread(layers, "memory_limit", placement, math.inf)),
            placement=placement,
            overhead=n_microbatches * overhead,
        )

    @property
    def total(self) -> float:
        """Load of all stages together."""
        return float(self.time[-1] + self.placement.n_chunks * self.overhead)

    def least(self) -> float:
        """Lower bound of the largest load: the mean, and the heaviest stage's layers.

        Every chunk has a layer, so a stage has as many as it has chunks.
        """
        each = sorted((np.diff(self.time) + self.overhead).tolist())
        fewest = min(map(len, self.placement.chunks_of))
        heaviest = each[-1] + sum(each[: fewest - 1])
        return float(max(self.total / self.placement.n_stages, heaviest))

    def by_chunk(self, split: Sequence[int]) -> tuple[Any, Any]:
        """Load and memory of each chunk."""
        ends = [0, *accumulate(split)]
        left = self.in_flight * np.diff(self.left[ends])
        return (
            np.diff(self.time[ends]) + self.overhead,
            np.diff(self.fixed[ends]) + left,
        )

    def by_stage(self, split: Sequence[int]) -> tuple[Any, Any]:
        """Load and memory of each stage."""
        stage_of = self.placement.stage_of
        load, memory = (np.bincount(stage_of, of) for of in self.by_chunk(split))
        return load, memory

    def largest(self, split: Sequence[int]) -> float:
        """Load of the busiest stage: no schedule of the split takes a shorter step."""
        return float(self.by_stage(split)[0].max())


class Balance(NamedTuple):
    """A split, the load of its busiest stage in a step, and a lower bound of loads."""

    split: tuple[int, ...]
    load: float
    bound: float


@lru_cache(maxsize=256)  # modes of one placement ask for the same balance
def balance(
    layers: LayerCosts,
    placement: Placement,
    n_microbatches: int,
    *,
    recompute: Collection[int] = (),
    in_flight: tuple[float, ...] | None = None,
) -> Balance:
    """Split the layers for the least largest load, within the memory limits.

    Args:
        layers: times and memories; without a limit, memory is no constraint.
        placement: chunk to stage.
        n_microbatches: in a step.
        recompute: layers that are recomputed, as a tuple or a frozenset.
        in_flight: micro-batches that each chunk must have room for; None: 1, which
            any schedule needs.

    Raises:
        LimitError: no split fits the memory limits.
        RequestError: there are fewer layers than chunks.
    """
    loads = Loads.of(
        layers, placement, n_microbatches, recompute=recompute, in_flight=in_flight
    )
    split = _split(loads)
    if split is None:
        raise _does_not_fit(loads)
    load = loads.largest(split)
    return Balance(split, load, load if _is_exact(placement) else loads.least())


def moved(split: Sequence[int], source: int, target: int) -> tuple[int, ...] | None:
    """One layer fewer in a chunk, one more in another; None if it has only one.

    The chunks between the two shift by a layer.

    >>> moved((3, 2, 2), 0, 2)
    (2, 2, 3)
    """
    if split[source] < 2 or source == target:
        return None
    after = list(split)
    after[source] -= 1
    after[target] += 1
    return tuple(after)


def _is_exact(placement: Placement) -> bool:
    """True for one chunk a stage, and a V."""
    p = placement.n_stages
    first, second = placement.stage_of[:p], placement.stage_of[p:]
    return len(set(first)) == p and second in ((), first[::-1])


def _split(loads: Loads) -> tuple[int, ...] | None:
    """The split with the least largest load; None if none fits the memory."""
    if not _is_exact(loads.placement):
        n_chunks = loads.placement.n_chunks
        free = np.full(n_chunks, math.inf)
        chunks = replace(loads, placement=Placement.single(n_chunks), limit=free)
        start = _split(chunks)
        assert start is not None
        return _descend(loads, start)
    most, best = loads.least(), None
    while best is None and most < _WIDER * loads.total:
        best = _stage_by_stage(loads, most)
        most *= _WIDER
    split = best
    while split is not None:
        best, most = split, loads.largest(split) * (1 - 2 * ROUNDING)
        split = _stage_by_stage(loads, most)
    return best


def _stage_by_stage(loads: Loads, most: float) -> tuple[int, ...] | None:
    """The split of the least squares of loads, none above ``most``; None if none fits.

    Stages take layers in turn, a from the front, and of a V also b from the back:
    ``best[i, j]`` is the least where i and j layers are taken.
    """
    n, p = len(loads.time) - 1, loads.placement.n_stages
    is_wave = loads.placement.n_chunks > p
    best = np.full((n + 1, n + 1 if is_wave else 1), math.inf)
    best[0, 0] = 0
    choices = []
    for stage in range(p):
        after = np.full_like(best, math.inf)
        choice = np.zeros((2, *best.shape), int)
        limit = loads.limit[loads.placement.stage_of[stage]] * (1 + ROUNDING)
        for a in range(1, n + 1):
            front, front_memory = _ranges(loads, stage, a)
            if front.min() > most:
                break
            for b in range(1, n - a + 1) if is_wave else (0,):
                back, back_memory = np.zeros(1), np.zeros(1)
                if is_wave:
                    of_back = _ranges(loads, 2 * p - 1 - stage, b)
                    back, back_memory = (of[::-1] for of in of_back)
                load = front[:, None] + back
                if load.min() > most * (1 + ROUNDING):
                    break
                chunks = front[:, None] ** 2 + back**2
                value = best[: n + 1 - a, : best.shape[1] - b] + load**2
                value = value + _CHUNK_SHARE * chunks
                memory = front_memory[:, None] + back_memory
                value[(memory > limit) | (load > most * (1 + ROUNDING))] = math.inf
                better = value < after[a:, b:]
                after[a:, b:][better] = value[better]
                choice[0, a:, b:][better] = a
                choice[1, a:, b:][better] = b
        best = after
        choices.append(choice)
    ends = [(i, n - i) for i in range(n + 1)] if is_wave else [(n, 0)]
    i, j = min(ends, key=lambda end: best[end])
    if best[i, j] == math.inf:
        return None
    fronts, backs = [], []
    for choice in reversed(choices):
        a, b = choice[:, i, j].tolist()
        fronts.append(a)
        backs.append(b)
        i, j = i - a, j - b
    return (*reversed(fronts), *(backs if is_wave else ()))


def _ranges(loads: Loads, chunk: int, size: int) -> tuple[Any, Any]:
    """Load and memory of a chunk of so many layers, by the first of them."""
    time, fixed, left = (
        sums[size:] - sums[:-size] for sums in (loads.time, loads.fixed, loads.left)
    )
    return time + loads.overhead, fixed + loads.in_flight[chunk] * left


def _descend(loads: Loads, split: tuple[int, ...]) -> tuple[int, ...] | None:
    """Move layers, the best move first, while that is better; None: it does not fit.

    A split that does not fit the memory is first made to, if moves can. The loads of
    chunks decide last: moves between stages of equal loads lead out of many minima.
    """
    best = _figures(loads, split)
    while True:
        before = split
        for source, target in permutations(range(len(split)), 2):
            neighbour = moved(before, source, target)
            if neighbour is None:
                continue
            figures = _figures(loads, neighbour)
            if is_below(figures, best):
                best, split = figures, neighbour
        if split == before:
            return None if best[0] else split


def _figures(loads: Loads, split: Sequence[int]) -> tuple[float, ...]:
    """Memory over the limits, largest load, squares of loads of stages, of chunks."""
    load, memory = loads.by_stage(split)
    over = np.maximum(0.0, memory - loads.limit * (1 + ROUNDING))
    chunks = loads.by_chunk(split)[0]
    # fsum: sums of numpy and BLAS differ between machines, and plans must not
    squares, of_chunks = math.fsum(load * load), math.fsum(chunks * chunks)
    return math.fsum(over), float(load.max()), squares, of_chunks


def is_below(figures: Iterable[float], others: Iterable[float]) -> bool:
    """Compare figure by figure, but for rounding; a tie in all of them is not below.

    Figures of iterators are made one by one: none more than the comparison needs.
    """
    for figure, other in zip(figures, others, strict=True):
        if abs(figure - other) > ROUNDING * max(figure, other):
            return figure < other
    return False


def _does_not_fit(loads: Loads) -> LimitError:
    """No split fits; the smallest limit for all stages is that of the best balance.

    Memory as load, where all chunks keep as many micro-batches as the one with most:
    with other numbers, that is an upper bound.
    """
    amounts = loads.fixed + loads.in_flight.max() * loads.left
    free = np.full(loads.placement.n_stages, math.inf)
    memory = replace(loads, time=amounts, limit=free, overhead=0.0)
    split = _split(memory)
    assert split is not None
    return LimitError(
        f"no split of {len(amounts) - 1} layers to {loads.placement.n_chunks} chunks "
        f"fits the memory of {loads.placement.n_stages} stages",
        smallest=memory.largest(split),
    )


def _sums(values: Any) -> Any:
    return np.concatenate(([0.0], np.cumsum(values)))
