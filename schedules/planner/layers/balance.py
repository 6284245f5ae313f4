"""Layers to chunks, so that the busiest stage has the least to do.

=====================  ===========================================  ===============
chunks a stage         method                                       proved least
=====================  ===========================================  ===============
1                      `one_chunk`: dynamic programming             always
2, V or interleaved    `two_chunks`: the same, with bisection       always, to 1e-9
others                 `many_chunks`: all splits, if 30,000 at most  always
                       else moves of layers                         at a lower bound
=====================  ===========================================  ===============

"Others" are three chunks a stage and more, and placements of no pattern. Among splits
with the least largest load, those with level loads are preferred: exactly for one
chunk a stage, by moves of layers else.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

from zbpp.core import LayerCosts, LimitError, Placement
from zbpp.schedules.planner.layers.loads import Loads
from zbpp.schedules.planner.layers.many_chunks import (
    descend,
    is_few,
    start_of,
    try_all,
)
from zbpp.schedules.planner.layers.one_chunk import balance_one_chunk
from zbpp.schedules.planner.layers.two_chunks import TwoChunks, is_two_chunks

__all__ = ["Balance", "balance"]

_CLOSE = 1e-9  # relative


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


@lru_cache(maxsize=256)  # modes of one placement ask for the same balance
def _balance(loads: Loads) -> Balance:
    placement = loads.placement
    if placement.n_chunks == placement.n_stages:
        found, is_proved = balance_one_chunk(loads), True
    elif is_two_chunks(placement):
        found, is_proved = _bisect(loads), True
    elif is_few(loads):
        found, is_proved = try_all(loads), True
    else:
        found, is_proved = descend(loads, start_of(loads)), False
    if found is None or not loads.fits(found):
        raise _does_not_fit(loads)
    load = max(loads.by_stage(found)[0])
    return Balance(found, load, is_proved or load <= loads.least * (1 + _CLOSE))


def _bisect(loads: Loads) -> tuple[int, ...] | None:
    chunks = TwoChunks(loads)
    found = descend(loads, start_of(loads))
    if not loads.fits(found):
        first = chunks.split(loads.total)
        if first is None:
            return None
        found = descend(loads, first)
    low, high = loads.least, max(loads.by_stage(found)[0])
    trial = low * (1 + _CLOSE)  # often there is a split at the bound
    while high > low * (1 + _CLOSE):
        split = chunks.split(trial)
        if split is None:
            low = trial
        else:
            found = split
            high = max(loads.by_stage(found)[0])
        trial = (low + high) / 2
    return descend(loads, found, most=high * (1 + 1e-12))


def _does_not_fit(loads: Loads) -> LimitError:
    """No split fits; the smallest limit for all stages is that of the best balance."""
    least = _least_memory(loads)
    return LimitError(
        f"no split of {loads.n_layers} layers to {loads.placement.n_chunks} chunks "
        f"fits the memory of {loads.placement.n_stages} stages",
        smallest=least,
    )


def _least_memory(loads: Loads) -> float:
    """The least largest memory of a stage, if all chunks hold as many micro-batches.

    With other numbers of micro-batches, the largest of them counts: an upper bound.
    """
    most = max(loads.in_flight)
    pairs = zip(loads.fixed, loads.left, strict=True)
    memory = tuple(fixed + most * left for fixed, left in pairs)
    nothing = (0.0,) * len(memory)
    free = Loads(
        time=memory,
        fixed=nothing,
        left=nothing,
        in_flight=loads.in_flight,
        limit=(float("inf"),) * loads.placement.n_stages,
        placement=loads.placement,
    )
    return _balance(free).load
