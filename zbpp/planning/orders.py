"""Orders that are there already: of a hand-made mode, a schedule, or a file.

They depend on no times, so they are held against a request: do they fit its memory, is
what they split to be split? What of them is recomputed may be said anew.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from zbpp.core import (
    Costs,
    LayerCosts,
    MemoryModel,
    Pass,
    PassKind,
    Recompute,
    RequestError,
    Schedule,
    parse_schedule,
    peaks,
    recomputed,
)
from zbpp.core.files.json_text import read
from zbpp.planning.answer import Plan, is_plan_text, parse_plan, recomputed_of
from zbpp.planning.modes import is_file
from zbpp.planning.request import PlanRequest, SplitRule
from zbpp.schedules import (
    Recomputing,
    even_split,
    is_torch_csv,
    plan_recompute,
    read_torch_csv,
)
from zbpp.schedules.planner.layers.trials import recompute_by_chunk
from zbpp.schedules.planner.limits import check_limits

__all__ = ["given_orders", "named_parts", "plan_of_orders", "within_limit"]

_R = TypeVar("_R", bound=Recomputing)


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
    for name, held, wanted in (
        ("n_stages", schedule.n_stages, request.n_stages),
        ("n_microbatches", schedule.n_microbatches, request.n_microbatches),
        (
            "chunks_per_stage",
            schedule.placement.n_chunks // schedule.n_stages,
            request.chunks_per_stage,
        ),
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


def plan_of_orders(orders: Schedule | Plan, request: PlanRequest) -> Plan:
    """Hold orders against the costs and the memory of a request.

    A plan brings its own, where the request has none.

    Raises:
        LimitError: they need more memory.
        RequestError: they do not fit the costs, or nothing is left to be chosen.
    """
    if isinstance(request.costs, LayerCosts):
        schedule = orders.schedule if isinstance(orders, Plan) else orders
        return _split_for(schedule, request.costs, request)
    if isinstance(orders, Plan):
        if request.costs is None and request.recompute is None:
            return _again(orders, request)
        orders = orders.schedule
    schedule, memory = orders, request.memory or MemoryModel()
    costs = request.costs or Costs()
    if request.recompute is not None:
        rule = request.split if callable(request.split) else None
        schedule = _recomputing(schedule, request.recompute, rule)
    is_told = schedule.split is not None or all(
        isinstance(which, bool) for which in schedule.recompute or ()
    )
    if is_told or request.costs is not None or memory.limit is not None:
        costs, memory = recomputed(costs, memory, schedule)
    schedule = within_limit(schedule, costs, memory)
    return Plan(
        schedule,
        costs,
        memory,
        schedule.name,
        has_costs=request.costs is not None,
        split=schedule.split,
    )


def _again(plan: Plan, request: PlanRequest) -> Plan:
    """Take a plan as it is, under the limit of the request if it has one."""
    limit = None if request.memory is None else request.memory.limit
    memory = plan.memory if limit is None else replace(plan.memory, limit=limit)
    return replace(
        plan, schedule=within_limit(plan.schedule, plan.costs, memory), memory=memory
    )


def within_limit(schedule: Schedule, costs: Costs, memory: MemoryModel) -> Schedule:
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


def _split_for(schedule: Schedule, layers: LayerCosts, request: PlanRequest) -> Plan:
    """Split the layers for the orders of a schedule, unless it has a split."""
    placement, split, recompute = schedule.placement, request.split, request.recompute
    assert not callable(split), "costs of layers need no rule"
    if split is None and schedule.split is not None:
        split = schedule.split
        if sum(split) != layers.n_layers:
            raise RequestError(
                f"the schedule's split {list(split)} is for {sum(split)} layers, but "
                f"the costs are for {layers.n_layers}; plan again, or give another "
                "split"
            )
    if recompute is None and schedule.recompute is not None:
        if split is None or isinstance(split, str):
            split = even_split(layers.n_layers, placement.n_chunks)
        recompute = recomputed_of(schedule, split)

    def planner(costs: Costs, memory: MemoryModel, effort: str) -> Schedule:
        return within_limit(schedule, costs, memory)

    found = plan_recompute(
        planner,
        layers,
        placement,
        schedule.n_microbatches,
        recompute=() if recompute is None else recompute,
        split=split,
        effort=request.effort,
    )
    return Plan.of_layers(found, schedule.name)


def _recomputing(
    schedule: Schedule, recompute: Recomputing, rule: SplitRule | None
) -> Schedule:
    """The same orders, with other parts that are recomputed.

    Raises:
        RequestError: there is no such chunk or layer, or it is to be planned.
    """
    if recompute == "auto":
        raise RequestError(
            f"recompute auto plans anew, but the orders of {schedule.name} are given; "
            "give a mode, or plan a file with zbpp plan --recompute auto"
        )
    placement = schedule.placement
    split: Sequence[int] = (1,) * placement.n_chunks
    if rule is not None:
        split = schedule.split or rule(placement)
    which: tuple[Recompute, ...] | None
    if isinstance(recompute, str):
        which = (True,) * placement.n_chunks if recompute == "all" else None
    else:
        which = recompute_by_chunk(split, named_parts(recompute, sum(split), rule))
    known = schedule.split if rule is None else tuple(split)
    return replace(schedule, memory=None, recompute=which, split=known)


def named_parts(recompute: _R, n: int, rule: SplitRule | None) -> _R:
    """Return what names chunks, or layers, that there are.

    Raises:
        RequestError: it names another.
    """
    what = "chunk" if rule is None else "layer"
    for part in () if isinstance(recompute, str) else recompute:
        if not 0 <= part < n:
            raise RequestError(
                f"{what} {part} shall be recomputed; the {what}s are 0 to {n - 1}"
            )
    return recompute
