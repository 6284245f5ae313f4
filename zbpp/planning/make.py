"""`make_plan`: one function from a request to a plan; `plan` is its short form.

Known orders (a schedule, a plan, or the file of either) are treated as the hand-made
order of a mode. They depend on no times, so they are checked against the request: do
they fit the memory, may each stage split its backward where they do?

A pipeline has a number of processes, and layers that it assigns to chunks even without
their costs: `plan_pipeline`.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from zbpp.core import (
    Check,
    LayerCosts,
    PassKind,
    RequestError,
    Schedule,
    a_kind,
)
from zbpp.core.columns import PerRow
from zbpp.core.files import object_of, read, schedule_of
from zbpp.planning.answer import FORMAT, Plan, check_fits, plan_of
from zbpp.planning.candidates import best_plan
from zbpp.planning.modes import MODES, Mode, canonical, is_auto, is_file
from zbpp.planning.request import (
    CostsLike,
    MemoryLimit,
    PlanRequest,
    costs_like,
    split_of,
)
from zbpp.schedules import post_validated
from zbpp.schedules.planner.problem import parse_effort

_log = logging.getLogger("zbpp")


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
    """Answer a request: search for orders, or take those of the request or a file.

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
        RequestError: the file cannot be read or contains no valid plan or schedule.
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
    for name, actual, wanted in (
        ("n_stages", schedule.n_stages, request.n_stages),
        ("n_microbatches", schedule.n_microbatches, request.n_microbatches),
        ("chunks_per_stage", chunks, request.chunks_per_stage),
    ):
        if wanted is not None and wanted != actual:
            raise RequestError(
                f"{path}: {name} is {actual}, but {wanted} is asked for; "
                "plan again, or leave it out"
            )
    return orders


def _schedule_of(orders: Schedule | Plan) -> Schedule:
    return orders.schedule if isinstance(orders, Plan) else orders


def _read(path: str) -> Schedule | Plan:
    data = object_of(read(path), path)
    if data.get("format") == FORMAT:
        return plan_of(data, source=path)
    return schedule_of(data, source=path)


def _as_mode(schedule: Schedule, request: PlanRequest) -> tuple[Mode, PlanRequest]:
    """A mode with a schedule as its hand-made order, and the request for it."""
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
    check_fits(plan.schedule, costs.on(plan.schedule.placement))
    return replace(plan, costs=costs)


# ---- Requests of pipelines.


def plan_pipeline(request: PlanRequest, *, n_layers: int, n_ranks: int) -> Plan:
    """Plan for the layers of a model; without costs of them, choose orders alone.

    Args:
        request: of the caller. Without a number of stages there are as many as the
            schedule has, or one a process. Without a split it is that of the schedule;
            if it has none, balanced with costs of layers, and even without.
        n_layers: layers of the model.
        n_ranks: processes of the pipeline; a single process may run all stages.
    """
    split, costs = request.split, request.costs
    n_stages = _count_stages(request.n_stages, n_ranks)
    request = replace(request, n_stages=n_stages)
    orders = given_orders(request)
    if orders is None:
        request = replace(request, n_stages=n_stages or n_ranks)
    else:
        request = replace(request, schedule=orders)
    if isinstance(costs, LayerCosts):
        if costs.n_layers != n_layers:
            raise RequestError(
                f"there are costs of {costs.n_layers} layers, but the model has "
                f"{n_layers}; measure this model"
            )
        if is_auto(request.schedule):
            request = replace(request, effort="fast")
            if request.recompute is None and None not in (
                costs.memory_limit,
                costs.m_r,
            ):
                request = replace(request, recompute="auto")
        split = None
    elif orders is None:
        request = replace(request, n_layers=n_layers)
    else:
        schedule = _schedule_of(orders)
        split = split_of(schedule, split, n_layers)
        names_layers = schedule.split is not None or bool(schedule.recompute)
        if names_layers and schedule.split != split:
            # the layers that it recomputes are then known as a share of their chunk
            orders = replace(schedule, split=split)
        request = replace(request, schedule=orders, split=split, n_layers=n_layers)
    plan = make_plan(request)
    if plan.line:
        _log.info(plan.line)
    split = split_of(plan.schedule, split, n_layers)
    return replace(plan, schedule=replace(plan.schedule, split=split))


def _count_stages(n_stages: int | None, n_ranks: int) -> int | None:
    """Number of stages: that of the processes, if several; else that of the request."""
    if n_ranks == 1:
        return n_stages
    if n_stages not in (None, n_ranks):
        n_replicas, n_left = divmod(n_ranks, n_stages or 1)
        replicas = f"mesh=zbpp.mesh(stages={n_stages}, data_parallel={n_replicas})"
        raise RequestError(
            f"{n_ranks} processes cannot run {n_stages} stages; start one process a "
            f"stage{'' if n_left else f', or run replicas: {replicas}'}"
        )
    return n_ranks


def choose_validation(
    schedule: Schedule, wanted: bool | None, *, steps: bool = True
) -> Schedule:
    """Give a schedule its V's, or take them out.

    Args:
        schedule: with or without V's.
        wanted: None: yes for schedules that split the backward or have V's already,
            if there are stages to wait for. Others have bubbles enough for a barrier.
        steps: there is an optimizer.
    """
    if wanted and not steps:
        raise RequestError(
            "post_validation is on, but optimizer is None: there is no step to "
            "validate; give an optimizer, or leave post_validation out"
        )
    if wanted is None:
        asked = schedule.runs(PassKind.W) or schedule.is_post_validated
        wanted = steps and schedule.n_stages > 1 and asked
    return post_validated(schedule) if wanted else schedule.without(Check)
