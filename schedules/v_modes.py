"""The modes that plan waves, each under the memory that its name promises.

======  ====================  ============================================
mode    memory, in M_B        source
======  ====================  ============================================
ZBV     p, or the limit       Qi et al., arXiv 2401.10241, section 6
ZBVPP   p, or the limit       the same with any number of chunks per stage
VHalf   (p+2)//2, or less     Qi et al., arXiv 2405.15362
VMin    (p+4)//3, or less     the same
======  ====================  ============================================
"""

from zbpp.core import Costs, MemoryModel, Schedule
from zbpp.schedules.wave import plan_wave

__all__ = ["plan_v_half", "plan_v_min", "plan_zbv", "plan_zbvpp"]

_UNIT = Costs()
_NO_LIMIT = MemoryModel()


def plan_zbv(
    *,
    n_stages: int,
    n_microbatches: int,
    costs: Costs = _UNIT,
    memory: MemoryModel = _NO_LIMIT,
    effort: str = "default",
) -> Schedule:
    """Plan two chunks a stage under the limit; without one, under p M_B.

    Raises:
        RequestError: as `plan_wave`.
    """
    return plan_zbvpp(
        n_stages=n_stages,
        n_microbatches=n_microbatches,
        costs=costs,
        memory=memory,
        effort=effort,
        name="ZBV",
    )


def plan_zbvpp(
    *,
    n_stages: int,
    n_microbatches: int,
    costs: Costs = _UNIT,
    memory: MemoryModel = _NO_LIMIT,
    effort: str = "default",
    chunks_per_stage: int = 2,
    name: str = "ZBVPP",
) -> Schedule:
    """Plan a wave under the limit; without one, under p M_B.

    Raises:
        RequestError: as `plan_wave`.
    """
    return plan_wave(
        n_stages=n_stages,
        n_microbatches=n_microbatches,
        chunks_per_stage=chunks_per_stage,
        costs=costs,
        memory=memory,
        effort=effort,
        name=name,
        most=float(n_stages) if memory.limit is None else float("inf"),
    )


def plan_v_half(
    *,
    n_stages: int,
    n_microbatches: int,
    costs: Costs = _UNIT,
    memory: MemoryModel = _NO_LIMIT,
    effort: str = "default",
) -> Schedule:
    """Plan two chunks a stage under (p+2)//2 M_B, or a lower limit.

    Raises:
        RequestError: as `plan_wave`.
    """
    return plan_wave(
        n_stages=n_stages,
        n_microbatches=n_microbatches,
        costs=costs,
        memory=memory,
        effort=effort,
        name="VHalf",
        most=(n_stages + 2) // 2,
    )


def plan_v_min(
    *,
    n_stages: int,
    n_microbatches: int,
    costs: Costs = _UNIT,
    memory: MemoryModel = _NO_LIMIT,
    effort: str = "default",
) -> Schedule:
    """Plan two chunks a stage under (p+4)//3 M_B, or a lower limit.

    Raises:
        RequestError: as `plan_wave`.
    """
    return plan_wave(
        n_stages=n_stages,
        n_microbatches=n_microbatches,
        costs=costs,
        memory=memory,
        effort=effort,
        name="VMin",
        most=(n_stages + 4) // 3,
    )
