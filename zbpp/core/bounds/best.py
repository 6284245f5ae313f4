"""All bounds together, and the best of them."""

from zbpp.core.bounds.area import area
from zbpp.core.bounds.bottleneck import bottleneck
from zbpp.core.bounds.cycle import cycle
from zbpp.core.bounds.fill import fill
from zbpp.core.bounds.front_tail import front_tail
from zbpp.core.bounds.relaxed import relaxed
from zbpp.core.bounds.slots import slots
from zbpp.core.bounds.stage import stages as all_chunks
from zbpp.core.bounds.turns import turns
from zbpp.core.bounds.ways import Ways
from zbpp.core.bounds.work import work
from zbpp.core.costs import ChunkMemory, Costs, MemoryModel, PassTimes
from zbpp.core.placement import Placement

__all__ = ["lower_bound", "lower_bound_on", "lower_bounds"]

_UNIT = Costs()
_FIRST_CHUNK = {
    "work": work,
    "bottleneck": bottleneck,
    "front and tail": front_tail,
    "cycle": cycle,
    "area": area,
}
_ALL_CHUNKS = {"fill": fill, "turns": turns, "slots": slots}


def lower_bound(
    placement: Placement,
    n_microbatches: int,
    costs: Costs = _UNIT,
    memory: MemoryModel | None = None,
) -> float:
    """Return the best of `lower_bounds`."""
    return max(lower_bounds(placement, n_microbatches, costs, memory).values())


def lower_bounds(
    placement: Placement,
    n_microbatches: int,
    costs: Costs = _UNIT,
    memory: MemoryModel | None = None,
) -> dict[str, float]:
    """Bound the largest span of every schedule of a placement, one entry per proof.

    Without a memory model, or without a limit in it, memory is no constraint. On a
    stage that cannot split its backward, B stands for BW, W takes no time and keeps
    nothing (`PassTimes`, `MemoryModel.on`): the proofs hold as they stand.

    >>> lower_bounds(Placement.single(4), 8)["work"]
    24.0

    Raises:
        RequestError: costs or memory do not fit the placement.
    """
    times = costs.on(placement)
    held = (memory or MemoryModel()).on(placement, times.splits)
    return _all_bounds(times, held, n_microbatches)


def lower_bound_on(times: PassTimes, memory: ChunkMemory, n_microbatches: int) -> float:
    """Return the best bound for times and memory that are on their placement."""
    return max(_all_bounds(times, memory, n_microbatches).values())


def _all_bounds(
    times: PassTimes, memory: ChunkMemory, n_microbatches: int
) -> dict[str, float]:
    whole = memory.above_fixed()
    memory = relaxed(memory, times.placement)
    ways = Ways(times, memory, whole, n_microbatches)
    stages = range(times.placement.n_stages)
    views = list(all_chunks(times, memory, whole, n_microbatches))
    return {
        name: max(bound(ways, stage) for stage in stages)
        for name, bound in _FIRST_CHUNK.items()
    } | {name: max(map(bound, views)) for name, bound in _ALL_CHUNKS.items()}
