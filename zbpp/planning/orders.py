"""Orders that are there already: a schedule, a plan, or a file of one.

They are planned as a mode whose hand-made order they are; it depends on no times, so it
is held against a request: does it fit the memory, is what it splits to be split?
"""

from dataclasses import replace
from pathlib import Path

from zbpp.core import (
    Costs,
    PassKind,
    RequestError,
    Schedule,
    parse_schedule,
    passes_in,
    peaks,
)
from zbpp.core.costs.columns import PerChunk
from zbpp.core.costs.units import with_limit
from zbpp.core.files.json_text import read
from zbpp.planning.answer import Plan, is_plan_text, parse_plan
from zbpp.planning.modes import JOINT_WORDS, Mode, is_file
from zbpp.planning.request import PlanRequest
from zbpp.schedules import is_torch_csv, read_torch_csv
from zbpp.schedules.planner.limits import check_limits

__all__ = ["as_mode", "given_orders", "under_limit", "within_limit"]


def given_orders(request: PlanRequest) -> Schedule | Plan | None:
    """Read the file, or take the schedule or plan, of a request; None: it has a mode.

    Raises:
        RequestError: the file is not valid, or its sizes are not those asked for.
    """
    source = request.schedule
    if isinstance(source, str | Path):
        path = str(source)
        if not is_file(path):
            return None
        orders = _read(path)
    else:
        path, orders = "the schedule", source
    schedule = orders.schedule if isinstance(orders, Plan) else orders
    chunks = schedule.placement.n_chunks // schedule.n_stages
    for name, held, wanted in (
        ("n_stages", schedule.n_stages, request.n_stages),
        ("n_microbatches", schedule.n_microbatches, request.n_microbatches),
        ("chunks_per_stage", chunks, request.chunks_per_stage),
    ):
        if wanted is not None and wanted != held:
            raise RequestError(
                f"{path}: {name} is {held}, but {wanted} is asked for; "
                "plan again, or leave it out"
            )
    return orders


def _read(path: str) -> Schedule | Plan:
    if is_torch_csv(path):
        return read_torch_csv(path)
    text = read(path)
    if is_plan_text(text):
        return parse_plan(text, source=path)
    return parse_schedule(text, source=path)


def as_mode(schedule: Schedule, request: PlanRequest) -> tuple[Mode, PlanRequest]:
    """The mode whose hand-made order a schedule is, and the request for it."""
    mode = Mode(
        name=schedule.name,
        summary="orders that are given",
        place=lambda *_: schedule.placement,
        chunks=1,
        order=lambda **_: schedule,
    )
    sized = replace(
        request,
        schedule=schedule,
        n_stages=schedule.n_stages,
        n_microbatches=schedule.n_microbatches,
        chunks_per_stage=None,
    )
    return mode, sized


def under_limit(plan: Plan, limit: PerChunk | None) -> Plan:
    """Take a plan as it is, under another limit if there is one.

    Raises:
        LimitError: it needs more memory.
        RequestError: the limit has another unit.
    """
    if limit is None:
        return plan
    costs = with_limit(plan.costs, limit)
    return replace(plan, schedule=within_limit(plan.schedule, costs), costs=costs)


def within_limit(schedule: Schedule, costs: Costs) -> Schedule:
    """Return a schedule that keeps the memory limit.

    Raises:
        LimitError: it needs more memory.
        RequestError: the costs do not fit the placement, or a backward is split that
            cannot be.
    """
    on_chunks = costs.on(schedule.placement)
    for stage, order in enumerate(schedule.orders):
        for job in () if on_chunks.splits[stage] else order:
            kinds = {part.kind for part in passes_in(job)}
            if not kinds.isdisjoint((PassKind.B, PassKind.W)):
                raise RequestError(
                    f"{schedule.name} runs {job}, but stage {stage} cannot split its "
                    f"backward (splits[{stage}] of the costs is false); plan again "
                    f"with these costs, or choose {JOINT_WORDS}"
                )
    if costs.limit is None:
        return schedule
    needs = peaks(schedule.orders, on_chunks)
    check_limits(schedule.name, needs, on_chunks, schedule.n_microbatches)
    return replace(schedule, costs=costs)
