"""ZB: the best order we find for one chunk a stage, under any times and any memory.

The same two stages and four micro-batches, F = B = W = 1, for three memory limits:

    limit 1  0 | F0 .  .  B0 W0 F1 .  .  B1 W1 F2 .  .  B2 W2 F3 .  .  B3 W3
             1 | .  F0 B0 W0 .  .  F1 B1 W1 .  .  F2 B2 W2 .  .  F3 B3 W3

    limit 2  0 | F0 F1 .  B0 W0 F2 B1 W1 F3 B2 W2 B3 W3
             1 | .  F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3

    limit 3  0 | F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3
             1 | .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

The orders of 1F1B, ZB-H1 and ZB-H2 are where the search begins: what is planned is
never worse than those of them that fit the memory. ZBH1 and ZBH2 promise a memory
(ZB-1p and ZB-2p are the paper's names of such plans: Qi et al., arXiv 2401.10241).
"""

import math

from zbpp.core import Costs, MemoryModel, Placement, Schedule
from zbpp.schedules.planner.request import check_sizes
from zbpp.schedules.planner.search.plan import plan_placement

__all__ = ["plan_zb"]

_UNIT = Costs()
_NO_LIMIT = MemoryModel()


def plan_zb(
    *,
    n_stages: int,
    n_microbatches: int,
    costs: Costs = _UNIT,
    memory: MemoryModel = _NO_LIMIT,
    effort: str = "default",
    name: str = "ZB",
    memory_cap: float = math.inf,
) -> Schedule:
    """Plan one chunk a stage under the memory limit; without one, under 2p M_B.

    Args:
        n_stages: stages, at least 1.
        n_microbatches: micro-batches in a step, at least 1.
        costs: see `plan_placement`, as the arguments below.
        memory: every limit must hold one micro-batch.
        effort: see `zbpp.schedules.planner.budget`.
        name: the mode, for people.
        memory_cap: a further limit on every stage, in M_B of that stage.

    Raises:
        LimitError: a limit holds no micro-batch; it names the smallest that works.
        RequestError: a number is invalid.
    """
    check_sizes(n_stages, n_microbatches)
    return plan_placement(
        placement=Placement.single(n_stages),
        n_microbatches=n_microbatches,
        costs=costs,
        memory=memory,
        effort=effort,
        name=name,
        memory_cap=memory_cap,
        default_limit=2 * n_stages,
    )
