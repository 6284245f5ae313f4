"""Layers to chunks, so that the busiest stage has the least to do.

The load of a stage is the time that it is busy in a step, whatever the order:

    sum over its layers of  m (f + b + w) + optimizer        m micro-batches
                            m (2 f + b + w) + optimizer      a recomputed layer
    and over its chunks of  m (pass_f + pass_b + pass_w)     on top of the layers'
    the last layer's f holds the loss; of passes in parts, those that compute count

Its memory is at least what is there all the time, and what the forwards leave of the
micro-batches that a chunk has in flight, one or more.

======================================  =============================  ===============
placement                               method                         proved least
======================================  =============================  ===============
one chunk a stage; V; two interleaved   `_StageByStage`, by bisection  always, to 1e-9
others                                  all splits, if few; else       always
                                        `_descend`: moves of layers    at a lower bound
======================================  =============================  ===============
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, combinations, pairwise

from zbpp.core import LayerCosts, LimitError, PassKind, Placement, RequestError
from zbpp.core.costs.columns import per_stage
from zbpp.schedules.planner.figures import is_below

__all__ = ["Balance", "Loads", "balance", "even_split", "moved"]

_CLOSE = 1e-9  # relative
_MOST_LISTED = 30_000  # splits: .5 s


@dataclass(frozen=True)
class Loads:
    """Sums of the layers before each layer, and limits; L layers, C chunks, p stages.

    Args:
        time: load of the layers 0..i-1, for i from 0 to L.
        fixed: memory of these layers that is there all the time.
        left: memory that their forwards leave on a micro-batch.
        in_flight: micro-batches of each chunk that must fit, C entries.
        limit: memory of each stage, p entries, inf where there is none.
        placement: chunk to stage.
        chunk_overhead: load of a chunk on top of its layers'.
    """

    time: tuple[float, ...]
    fixed: tuple[float, ...]
    left: tuple[float, ...]
    in_flight: tuple[float, ...]
    limit: tuple[float, ...]
    placement: Placement
    chunk_overhead: float = 0.0

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
        """Weigh the layers; the arguments are those of `balance`.

        Raises:
            RequestError: fewer layers than chunks, or a wrong number of limits.
        """
        _check_enough(layers.n_layers, placement.n_chunks)
        passes = map(layers.computing, (PassKind.F, PassKind.B, PassKind.W))
        rows = zip(*passes, layers.of("f"), layers.of("optimizer"), strict=True)
        again = set(recompute)
        times = [
            n_microbatches * (f + (i in again) * whole_f + b + w) + optimizer
            for i, (f, b, w, whole_f, optimizer) in enumerate(rows)
        ]
        times[-1] += n_microbatches * layers.loss
        m_b, m_r = layers.of("m_b"), layers.of("m_r")
        left = [m_r[i] if i in again else m_b[i] for i in range(layers.n_layers)]
        overhead = layers.pass_f + layers.pass_b + layers.pass_w
        return cls(
            time=_sums(times),
            fixed=_sums(layers.of("m_fixed")),
            left=_sums(left),
            in_flight=tuple(in_flight or (1.0,) * placement.n_chunks),
            limit=per_stage(
                "memory_limit", layers.memory_limit, placement, default=math.inf
            ),
            placement=placement,
            chunk_overhead=n_microbatches * overhead,
        )

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.time) - 1

    @property
    def total(self) -> float:
        """Load of all stages together."""
        return self.time[-1] + self.placement.n_chunks * self.chunk_overhead

    def busy(self, first: int, end: int) -> float:
        """Load of a chunk of the layers first..end-1."""
        return self.time[end] - self.time[first] + self.chunk_overhead

    def held(self, chunk: int, first: int, end: int) -> float:
        """Memory of a chunk of these layers."""
        left = self.left[end] - self.left[first]
        return self.fixed[end] - self.fixed[first] + self.in_flight[chunk] * left

    def by_stage(self, split: Sequence[int]) -> tuple[list[float], list[float]]:
        """Load and memory of each stage."""
        ends = list(accumulate(split, initial=0))
        busy = [0.0] * self.placement.n_stages
        held = [0.0] * self.placement.n_stages
        for chunk, stage in enumerate(self.placement.stage_of):
            busy[stage] += self.busy(ends[chunk], ends[chunk + 1])
            held[stage] += self.held(chunk, ends[chunk], ends[chunk + 1])
        return busy, held

    def largest(self, split: Sequence[int]) -> float:
        """Load of the busiest stage: no schedule of the split takes a shorter step."""
        return max(self.by_stage(split)[0])

    def fits(self, split: Sequence[int]) -> bool:
        """True if no stage exceeds its limit."""
        pairs = zip(self.by_stage(split)[1], self.limit, strict=True)
        return all(held <= _with_margin(limit) for held, limit in pairs)

    @property
    def least(self) -> float:
        """Lower bound of the largest load: the mean, and the heaviest stage's layers.

        Every chunk has a layer, so a stage has as many as it has chunks.
        """
        each = sorted(self.busy(i, i + 1) for i in range(self.n_layers))
        fewest = min(map(len, self.placement.chunks_of))
        heaviest = each[-1] + sum(each[: fewest - 1])
        return max(self.total / self.placement.n_stages, heaviest)


@dataclass(frozen=True)
class Balance:
    """A split, the load of its busiest stage in a step, and if none has a lower one."""

    split: tuple[int, ...]
    load: float
    is_proved: bool


def balance(
    layers: LayerCosts,
    placement: Placement,
    n_microbatches: int,
    *,
    recompute: Collection[int] = (),
    in_flight: Sequence[float] | None = None,
) -> Balance:
    """Split the layers for the least largest load, within the memory limits.

    Args:
        layers: times and memories; without a limit, memory is no constraint.
        placement: chunk to stage.
        n_microbatches: in a step.
        recompute: layers that are recomputed.
        in_flight: micro-batches that each chunk must have room for; None: 1, which
            any schedule needs.

    Raises:
        LimitError: no split fits the memory limits.
        RequestError: there are fewer layers than chunks.
    """
    loads = Loads.of(
        layers,
        placement,
        n_microbatches,
        recompute=recompute,
        in_flight=in_flight,
    )
    return _balance(loads)


def even_split(n_layers: int, n_chunks: int) -> tuple[int, ...]:
    """Deal layers by their number; the first chunks get one more.

    >>> even_split(7, 3)
    (3, 2, 2)

    Raises:
        RequestError: fewer layers than chunks.
    """
    _check_enough(n_layers, n_chunks)
    base, more = divmod(n_layers, n_chunks)
    return tuple(base + (chunk < more) for chunk in range(n_chunks))


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


@lru_cache(maxsize=256)  # modes of one placement ask for the same balance
def _balance(loads: Loads) -> Balance:
    n_chunks = loads.placement.n_chunks
    if _StageByStage.knows(loads.placement):
        split, is_proved = _least(loads), True
    elif math.comb(loads.n_layers - 1, n_chunks - 1) <= _MOST_LISTED:
        splits = filter(loads.fits, _all_splits(loads.n_layers, n_chunks))
        split = min(splits, key=lambda split: _figures(loads, split), default=None)
        is_proved = True
    else:
        split, is_proved = _descend(loads, _level_chunks(loads)), False
    if split is None or not loads.fits(split):
        raise _does_not_fit(loads)
    load = loads.largest(split)
    return Balance(split, load, is_proved or load <= loads.least * (1 + _CLOSE))


def _least(loads: Loads) -> tuple[int, ...] | None:
    """The split with the least largest load; None if none fits the memory.

    Bisection, and after each step a look just below the best split: where layers are
    alike, nothing lies between that and much lower loads, and one search proves it.
    """
    search = _StageByStage(loads)
    low, best = loads.least, search.within(loads.least * (1 + _CLOSE))
    if best is None:
        best = search.within(loads.total)
    while best is not None and loads.largest(best) > low * (1 + _CLOSE):
        high = loads.largest(best)
        middle = search.within((low + high) / 2)
        if middle is None:
            low = (low + high) / 2
        else:
            best = middle
        lower = search.within(loads.largest(best) * (1 - _CLOSE))
        if lower is None:
            break
        best = lower
    return best


class _StageByStage:
    """Is there a split in which no stage has more than some load?

    Stages take their one or two chunks in turn, from that of chunk 0 on. What is left
    of the layers is then told by two numbers, i and j:

        one chunk     0 1 2           [0, i) are taken, j = L; at the end i = j
        V             0 1 2 2 1 0     [0, i) and [j, L) are taken; at the end i = j
        interleaved   0 1 2 0 1 2     [0, i) and [k, j) are taken, for some k where the
                                      second round begins; at the end i = k, j = L

    A depth-first search tries those chunks of a stage first that come nearest to an
    even share of what is left, and no (i, j) twice. No stage may have so little that
    the rest is too much for the stages to come: that leaves few choices where the load
    asked for is near the mean.
    """

    def __init__(self, loads: Loads) -> None:
        placement = loads.placement
        self._loads = loads
        self._p = placement.n_stages
        self._n_rounds = placement.n_chunks // self._p
        first, second = placement.stage_of[: self._p], placement.stage_of[self._p :]
        self._stages = first
        self._is_interleaved = second == first and self._p > 1

    @staticmethod
    def knows(placement: Placement) -> bool:
        """True for one chunk a stage, a V, and two interleaved rounds."""
        p, stage_of = placement.n_stages, placement.stage_of
        first, second = stage_of[:p], stage_of[p:]
        return len(set(first)) == p and second in ((), first, first[::-1])

    def within(self, most: float) -> tuple[int, ...] | None:
        """A split in which no stage's load is above ``most``; None if there is none."""
        n_layers = self._loads.n_layers
        starts = [n_layers]
        if self._is_interleaved:
            starts = list(range(self._p, n_layers - self._p + 1))
            starts.sort(key=lambda k: abs(k - n_layers / 2))
        splits = (self._from(k, most) for k in starts)
        return next((split for split in splits if split is not None), None)

    def _from(self, k: int, most: float) -> tuple[int, ...] | None:
        """Search with a second round that begins at layer k."""
        tried: set[tuple[int, int, int]] = set()
        path = [(0, k)]
        untried = [self._choices(0, 0, k, k, most)]
        while untried:
            state = next(untried[-1], None)
            n_done = len(untried)
            if state is None:
                untried.pop()
                path.pop()
            elif n_done == self._p:
                return self._split([*path, state])
            elif (n_done, *state) not in tried:
                tried.add((n_done, *state))
                path.append(state)
                untried.append(self._choices(n_done, *state, k, most))
        return None

    def _split(self, path: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        first = [after[0] - before[0] for before, after in pairwise(path)]
        second = [abs(after[1] - before[1]) for before, after in pairwise(path)]
        if self._n_rounds == 1:
            return tuple(first)
        return (*first, *(second if self._is_interleaved else reversed(second)))

    def _choices(
        self, stage: int, i: int, j: int, k: int, most: float
    ) -> Iterator[tuple[int, int]]:
        """States after a stage, those near an even share of the rest first."""
        time, n_left = self._loads.time, self._p - 1 - stage
        rest = time[j] - time[i]
        if self._is_interleaved:
            rest = time[k] - time[i] + time[-1] - time[j]
        share = rest / (n_left + 1)
        most -= self._n_rounds * self._loads.chunk_overhead
        least = rest - n_left * most

        def distance(state: tuple[int, int]) -> tuple[float, float]:
            first, second = time[state[0]] - time[i], abs(time[state[1]] - time[j])
            return abs(first + second - share), abs(first - second)

        states = self._loaded(stage, i, j, k, (least, most))
        return iter(sorted(states, key=distance))

    def _loaded(
        self, stage: int, i: int, j: int, k: int, bounds: tuple[float, float]
    ) -> Iterator[tuple[int, int]]:
        """States after a stage whose load is between the bounds, and that fits."""
        loads, time, n_left = self._loads, self._loads.time, self._p - 1 - stage
        least, most = bounds
        limit = _with_margin(loads.limit[self._stages[stage]])
        for end in range(i + 1, (k if self._is_interleaved else j) - n_left + 1):
            load, space = time[end] - time[i], limit - loads.held(stage, i, end)
            if load > most or space < 0:
                break
            for after in self._seconds(end, j, n_left):
                both = load + abs(time[j] - time[after])
                if both > most:
                    break
                if n_left == 0:
                    is_enough = (end, after) == (k, loads.n_layers) or end == after
                else:
                    is_enough = both >= least
                if is_enough and self._held(stage, j, after) <= space:
                    yield end, after

    def _seconds(self, end: int, j: int, n_left: int) -> range:
        """Where the second chunk of a stage may end, one more layer each."""
        if self._n_rounds == 1:
            return range(j, j + 1)
        if self._is_interleaved:
            return range(j + 1, self._loads.n_layers - n_left + 1)
        return range(j - 1, end + 2 * n_left - 1, -1)

    def _held(self, stage: int, j: int, after: int) -> float:
        """Memory of the second chunk of a stage."""
        if self._n_rounds == 1:
            return 0.0
        chunk = stage + self._p if self._is_interleaved else 2 * self._p - 1 - stage
        return self._loads.held(chunk, min(j, after), max(j, after))


def _level_chunks(loads: Loads) -> tuple[int, ...]:
    """Chunks of level loads: the least split for as many stages, without limits."""
    n_chunks = loads.placement.n_chunks
    placement, limit = Placement.single(n_chunks), (math.inf,) * n_chunks
    split = _least(replace(loads, placement=placement, limit=limit))
    assert split is not None
    return split


def _all_splits(n_layers: int, n_chunks: int) -> Iterator[tuple[int, ...]]:
    """Every way to deal layers, at least one a chunk."""
    for cuts in combinations(range(1, n_layers), n_chunks - 1):
        yield tuple(end - first for first, end in pairwise((0, *cuts, n_layers)))


def _descend(loads: Loads, split: tuple[int, ...]) -> tuple[int, ...]:
    """Move layers, the best move first, while that is better.

    A split that does not fit the memory is first made to, if moves can. The loads of
    chunks decide last: moves between stages of equal loads lead out of many minima.
    """
    chunks = range(len(split))
    best = _figures(loads, split)
    while True:
        before = split
        for source in chunks:
            for target in chunks:
                neighbour = moved(before, source, target)
                if neighbour is None:
                    continue
                figures = _figures(loads, neighbour)
                if is_below(figures, best):
                    best, split = figures, neighbour
        if split == before:
            return split


def _figures(loads: Loads, split: Sequence[int]) -> tuple[float, float, float, float]:
    """Memory over the limits, largest load, squares of loads of stages, of chunks."""
    busy, held = loads.by_stage(split)
    pairs = zip(held, loads.limit, strict=True)
    over = sum(max(0.0, memory - _with_margin(limit)) for memory, limit in pairs)
    ends = accumulate(split, initial=0)
    chunks = [loads.busy(first, end) for first, end in pairwise(ends)]
    return over, max(busy), _squares(busy), _squares(chunks)


def _squares(values: Sequence[float]) -> float:
    return math.fsum(value * value for value in values)


def _does_not_fit(loads: Loads) -> LimitError:
    """No split fits; the smallest limit for all stages is that of the best balance.

    It is that of chunks that all hold as many micro-batches as the one that holds
    most: with other numbers, an upper bound.
    """
    most = max(loads.in_flight)
    pairs = zip(loads.fixed, loads.left, strict=True)
    memory = tuple(fixed + most * left for fixed, left in pairs)
    nothing = (0.0,) * len(memory)
    unlimited = Loads(
        time=memory,
        fixed=nothing,
        left=nothing,
        in_flight=loads.in_flight,
        limit=(math.inf,) * loads.placement.n_stages,
        placement=loads.placement,
    )
    return LimitError(
        f"no split of {loads.n_layers} layers to {loads.placement.n_chunks} chunks "
        f"fits the memory of {loads.placement.n_stages} stages",
        smallest=_balance(unlimited).load,
    )


def _with_margin(limit: float) -> float:
    """A limit with room for rounding, as the schedule's own check has."""
    return limit * (1 + 1e-9)


def _check_enough(n_layers: int, n_chunks: int) -> None:
    """Refuse more chunks than layers."""
    if n_layers < n_chunks:
        raise RequestError(
            f"{n_layers} layers cannot fill {n_chunks} chunks, one each at least; use "
            "fewer stages, or a mode with fewer chunks a stage"
        )


def _sums(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(accumulate(values, initial=0.0))
