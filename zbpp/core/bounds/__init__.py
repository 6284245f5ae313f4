"""Times below which no schedule can go; a plan is judged by its gap to them.

Each bound is on the largest span, holds for any placement, and stands with its proof in
its docstring; `lower_bound` takes the highest. Read `stage` first:

    stage     the way of a micro-batch if nothing waits, memory as the proofs see it,
              and one stage with its chunks
    proofs    ramp: all work, and what a stage waits at first and at last
              rounds, slots: few micro-batches fit in memory at a time
    on_lanes  those of passes in parts, which overlap

Notation: on a stage, F, B and W are sums over its chunks; the loop of a chunk is the
time from the start of its F to the end of its B on one micro-batch if nothing waits:
all F and B of later chunks, and messages, between. Until it is through its loop, a
micro-batch holds the memory m_b of that chunk.

Every bound is tested against all planners on random costs.
"""

from collections.abc import Callable
from operator import attrgetter

from zbpp.core.bounds.on_lanes import bounds_on_lanes
from zbpp.core.bounds.proofs import ramp, rounds, slots
from zbpp.core.bounds.stage import Stage, stages_of
from zbpp.core.costs import ChunkCosts, Costs
from zbpp.core.placement import Placement

_UNIT = Costs()
_BOUNDS: dict[str, Callable[[Stage], float]] = {
    "work": attrgetter("work"),
    "ramp": ramp,
    "rounds": rounds,
    "slots": slots,
}


def lower_bound(
    placement: Placement, n_microbatches: int, costs: Costs = _UNIT
) -> float:
    """Return the best of `lower_bounds`."""
    return max(lower_bounds(placement, n_microbatches, costs).values())


def lower_bounds(
    placement: Placement, n_microbatches: int, costs: Costs = _UNIT
) -> dict[str, float]:
    """Bound the largest span of every schedule of a placement, one entry per proof.

    Without a limit in the costs memory is no constraint. On a stage that cannot split
    its backward, B stands for BW, W takes no time and keeps nothing: the proofs hold
    as they stand.

    >>> lower_bounds(Placement.single(4), 8)["work"]
    24.0

    Raises:
        RequestError: the costs do not fit the placement.
    """
    return _all_bounds(costs.on(placement).without_pairs(), n_microbatches)


def lower_bound_on(costs: ChunkCosts, n_microbatches: int) -> float:
    """Return the best bound of schedules without pairs, for costs on a placement."""
    return max(_all_bounds(costs, n_microbatches).values())


def _all_bounds(costs: ChunkCosts, n_microbatches: int) -> dict[str, float]:
    if costs.parts:
        return bounds_on_lanes(costs.above_fixed(), n_microbatches)
    stages = stages_of(costs.above_fixed(), n_microbatches)
    return {name: max(map(bound, stages)) for name, bound in _BOUNDS.items()}
