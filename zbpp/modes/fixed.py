"""Orders that depend on no times: hand-made ones and files, held against a request."""

from dataclasses import replace
from typing import Protocol, Unpack

from zbpp.core import (
    Costs,
    MemoryModel,
    Pass,
    PassKind,
    RequestError,
    Schedule,
    peaks,
)
from zbpp.schedules import plan_vpp
from zbpp.schedules.planner.limits import check_limits
from zbpp.schedules.planner.request import (
    Planner,
    Request,
    check_sizes,
    listed_chunks,
    models,
)

__all__ = ["fixed", "kept", "plan_fixed_vpp"]


class HandMade(Protocol):
    """A planner whose orders depend on the size of the pipeline alone."""

    def __call__(self, *, n_stages: int, n_microbatches: int) -> Schedule: ...


def fixed(hand_made: HandMade) -> Planner:
    """Make a planner of a hand-made one: its order fits the memory, or is refused."""

    def plan_fixed(**request: Unpack[Request]) -> Schedule:
        sizes = request["n_stages"], request["n_microbatches"]
        check_sizes(*sizes)
        schedule = hand_made(n_stages=sizes[0], n_microbatches=sizes[1])
        return kept(schedule, *models(request))

    return plan_fixed


def plan_fixed_vpp(
    *, chunks_per_stage: int | None = None, **request: Unpack[Request]
) -> Schedule:
    """Plan VPP; without a number of chunks, of as many as are listed, or 2."""
    n_stages = request["n_stages"]
    if chunks_per_stage is None:
        chunks_per_stage = listed_chunks(*models(request), n_stages) or 2
    check_sizes(n_stages, request["n_microbatches"], chunks_per_stage)
    schedule = plan_vpp(
        n_stages=n_stages,
        n_microbatches=request["n_microbatches"],
        chunks_per_stage=chunks_per_stage,
    )
    return kept(schedule, *models(request))


def kept(schedule: Schedule, costs: Costs, memory: MemoryModel) -> Schedule:
    """Return a schedule that keeps the memory limit.

    Raises:
        LimitError: it needs more memory.
        RequestError: costs or memory do not fit the placement, or a backward is split
            that cannot be.
    """
    splits = costs.on(schedule.placement).splits
    model = memory.on(schedule.placement)
    for stage, order in enumerate(schedule.orders):
        for job in () if splits[stage] else order:
            if isinstance(job, Pass) and job.kind in (PassKind.B, PassKind.W):
                raise RequestError(
                    f"{schedule.name} runs {job}, but stage {stage} cannot split its "
                    f"backward (splits[{stage}] of the costs is false); plan again "
                    "with these costs, or choose 1F1B, FThenB or VPP"
                )
    if memory.limit is None:
        return schedule
    needs = peaks(schedule.orders, model)
    check_limits(schedule.name, needs, model, schedule.n_microbatches)
    return replace(schedule, memory=memory)
