"""`make_plan`: one function from a request to a plan; `plan` is its short form.

Orders that are there already, a schedule, a plan, or a file of one, are planned as a
mode whose hand-made order they are. It depends on no times, so it is held against the
request: does it fit the memory, is what it splits to be split?
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from zbpp.core import RequestError, Schedule, a_kind, parse_schedule
from zbpp.core.columns import PerRow
from zbpp.core.files import read
from zbpp.planning.answer import Plan, is_plan_text, parse_plan
from zbpp.planning.candidates import best_plan, within_limit
from zbpp.planning.modes import MODES, Mode, canonical, is_file
from zbpp.planning.request import CostsLike, MemoryLimit, PlanRequest, costs_like
from zbpp.schedules.planner.budget import parse_effort


def plan(
    mode: str,
    *,
    n_stages: int | None = None,
    n_microbatches: int | None = None,
    costs: CostsLike | None = None,
    memory_limit: MemoryLimit | None = None,
    effort: str = "default",
    chunks_per_stage: int | None = None,
) -> Schedule:
    """Plan by the name of a mode, or read a schedule or plan file; see `PlanRequest`.

    Raises:
        RequestError: the mode is unknown, the file is invalid or does not agree, or
            the schedule does not fit the memory limit.
    """
    request = PlanRequest(
        schedule=mode,
        n_stages=n_stages,
        n_microbatches=n_microbatches,
        costs=costs_like(costs),
        memory_limit=cast(Any, memory_limit),
        effort=effort,
        chunks_per_stage=chunks_per_stage,
    )
    return make_plan(request).schedule


def make_plan(request: PlanRequest) -> Plan:
    """Answer a request: search, read or take orders, and say what they were made for.

    Raises:
        LimitError: nothing fits the memory limit; it names the smallest that works.
        RequestError: the mode is unknown, a file is invalid or does not agree, sizes
            are missing, or costs, split and recompute do not fit the request.
    """
    if not isinstance(request, PlanRequest):
        raise RequestError(
            f"make_plan takes a PlanRequest, not {a_kind(request)}; give "
            "zbpp.PlanRequest(schedule=.., n_stages=.., n_microbatches=..), or call "
            "zbpp.plan(mode, ..)"
        )
    parse_effort(request.effort)
    has_costs = request.costs is not None
    orders = given_orders(request)
    if isinstance(orders, Plan) and not has_costs and request.recompute is None:
        return _under_limit(orders, request.memory_limit)
    if orders is None:
        mode = MODES[canonical(str(request.schedule))]
    else:
        mode, request = _as_mode(_schedule_of(orders), request)
    plan = best_plan(mode, request)
    return plan if has_costs else replace(plan, has_costs=False)


def read_plan(path: str | Path) -> Plan:
    """Read a plan file, or a schedule file as a plan without costs.

    Raises:
        RequestError: the file cannot be read or holds no valid plan or schedule.
    """
    return make_plan(PlanRequest(schedule=_read(str(path))))


def given_orders(request: PlanRequest) -> Schedule | Plan | None:
    """The schedule or plan of a request, or in its file; None: it has a mode."""
    source = request.schedule
    if isinstance(source, str | Path):
        path = str(source)
        if not is_file(path):
            return None
        orders = _read(path)
    else:
        path, orders = "the schedule", source
    schedule = _schedule_of(orders)
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


def _schedule_of(orders: Schedule | Plan) -> Schedule:
    return orders.schedule if isinstance(orders, Plan) else orders


def _read(path: str) -> Schedule | Plan:
    text = read(path)
    if is_plan_text(text):
        return parse_plan(text, source=path)
    return parse_schedule(text, source=path)


def _as_mode(schedule: Schedule, request: PlanRequest) -> tuple[Mode, PlanRequest]:
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


def _under_limit(plan: Plan, limit: PerRow | None) -> Plan:
    """Take a plan as it is, under another limit if there is one."""
    if limit is None:
        return plan
    costs = plan.costs.with_limit(limit)
    return replace(plan, schedule=within_limit(plan.schedule, costs), costs=costs)
