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

from typing import Unpack

from zbpp.core import Schedule
from zbpp.schedules.planner.request import Request, listed_chunks, models
from zbpp.schedules.planner.search.plan import plan_wave

__all__ = ["plan_v_half", "plan_v_min", "plan_zbv", "plan_zbvpp"]


def plan_zbv(**request: Unpack[Request]) -> Schedule:
    """Plan two chunks a stage under the limit; without one, under p M_B."""
    return plan_wave(**request, name="ZBV", default_limit=request["n_stages"])


def plan_zbvpp(
    *, chunks_per_stage: int | None = None, **request: Unpack[Request]
) -> Schedule:
    """Plan a wave of any number of chunks under the limit; without one, under p M_B.

    Without a number, of as many chunks a stage as the lists are for, or 2.
    """
    p = request["n_stages"]
    if chunks_per_stage is None:
        chunks_per_stage = listed_chunks(*models(request), p) or 2
    return plan_wave(
        **request, chunks_per_stage=chunks_per_stage, name="ZBVPP", default_limit=p
    )


def plan_v_half(**request: Unpack[Request]) -> Schedule:
    """Plan two chunks a stage under (p+2)//2 M_B, or a lower limit."""
    return plan_wave(**request, name="VHalf", memory_cap=(request["n_stages"] + 2) // 2)


def plan_v_min(**request: Unpack[Request]) -> Schedule:
    """Plan two chunks a stage under (p+4)//3 M_B, or a lower limit."""
    return plan_wave(**request, name="VMin", memory_cap=(request["n_stages"] + 4) // 3)
