"""Times below which no schedule can go; a plan is judged by its gap to them.

Each bound is on the largest span, holds for any placement, and stands with its proof in
its docstring; `lower_bound` takes the highest. Read `paths` first:

    paths           what all share: the way of a micro-batch if nothing waits, memory as
                    the proofs see it, and one stage with its chunks
    first_chunk     work, bottleneck, front_and_tail, cycle, memory_area: of the work of
                    a stage, or of its first chunk
    all_chunks      ramp, admission_rounds, memory_slots: of all chunks of a stage
    on_lanes        those of passes in parts, which overlap

Notation: on a stage, F, B and W are sums over its chunks; the loop of a chunk is the
time from the start of its F to the end of its B on one micro-batch if nothing waits:
all F and B of later chunks, and messages, between. Until it is through its loop, a
micro-batch holds the memory m_b of that chunk.

Every bound is tested against all planners on random costs.
"""

from zbpp.core.bounds.all_chunks import admission_rounds, memory_slots, ramp
from zbpp.core.bounds.first_chunk import (
    bottleneck,
    cycle,
    front_and_tail,
    memory_area,
    work,
)
from zbpp.core.bounds.on_lanes import bounds_on_lanes
from zbpp.core.bounds.paths import stages_of
from zbpp.core.costs.chunks import ChunkCosts
from zbpp.core.costs.table import Costs
from zbpp.core.placement import Placement

__all__ = ["lower_bound", "lower_bound_on", "lower_bounds"]

_UNIT = Costs()
_BOUNDS = {  # by the names that `zbpp show --json` has always given
    "work": work,
    "bottleneck": bottleneck,
    "front and tail": front_and_tail,
    "cycle": cycle,
    "area": memory_area,
    "fill": ramp,
    "turns": admission_rounds,
    "slots": memory_slots,
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
    its backward, B stands for BW, W takes no time and keeps nothing
    (`ChunkCosts.joined`): the proofs hold as they stand.

    >>> lower_bounds(Placement.single(4), 8)["work"]
    24.0

    Raises:
        RequestError: the costs do not fit the placement.
    """
    return _all_bounds(costs.on(placement).without_pairs(), n_microbatches)


def lower_bound_on(costs: ChunkCosts, n_microbatches: int) -> float:
    """Return the best bound of schedules without pairs, for costs that are joined."""
    return max(_all_bounds(costs, n_microbatches).values())


def _all_bounds(costs: ChunkCosts, n_microbatches: int) -> dict[str, float]:
    if costs.parts:
        return bounds_on_lanes(costs, n_microbatches)
    stages = stages_of(costs, n_microbatches)
    return {name: max(map(bound, stages)) for name, bound in _BOUNDS.items()}
