"""Requests of pipelines, and what a pipeline makes of the answer.

A pipeline has a number of processes, and layers that it deals to chunks even where
nothing is known of their costs.
"""

import logging
from dataclasses import replace

from zbpp.core import (
    LayerCosts,
    PassKind,
    RequestError,
    Schedule,
)
from zbpp.planning.answer import Plan
from zbpp.planning.make import given_orders, make_plan
from zbpp.planning.modes import is_auto
from zbpp.planning.request import PlanRequest, Split, split_on
from zbpp.schedules import post_validated, without_checks

_log = logging.getLogger("zbpp")


def plan_pipeline(request: PlanRequest, *, n_layers: int, n_ranks: int) -> Plan:
    """Plan for the layers of a model; without costs of them, choose orders alone.

    Args:
        request: of the caller. Without a number of stages there are as many as the
            schedule has, or one a process. Without a split it is that of the schedule;
            if it has none, balanced with costs of layers, and even without.
        n_layers: layers of the model.
        n_ranks: processes of the pipeline; one alone may hold any number of stages.
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
        plan = make_plan(request)
        if plan.line:
            _log.info(plan.line)
        return plan
    if orders is None:
        plan = make_plan(replace(request, n_layers=n_layers))
        if plan.line:
            _log.info(plan.line)
        return replace(plan, split=split_of(plan.schedule, split, n_layers))
    schedule = orders.schedule if isinstance(orders, Plan) else orders
    chosen = split_of(schedule, split, n_layers)
    names_layers = schedule.split is not None or bool(schedule.recompute)
    fits = len(chosen) == schedule.placement.n_chunks
    if names_layers and fits and schedule.split != chosen:
        # the layers that it recomputes are then known as a share of their chunk
        orders = replace(schedule, split=chosen)
    plan = make_plan(replace(request, schedule=orders, split=chosen, n_layers=n_layers))
    return replace(plan, split=chosen)


def _count_stages(n_stages: int | None, n_ranks: int) -> int | None:
    """Number of stages: one a process, if there are several; else what is asked for."""
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


def split_of(schedule: Schedule, split: Split, n_layers: int) -> tuple[int, ...]:
    """Layers of each chunk of a schedule, where there are no costs per layer."""
    if split is not None or schedule.split is None:
        return split_on(split, n_layers, schedule.placement)
    if sum(schedule.split) != n_layers:
        raise RequestError(
            f"the schedule's split {list(schedule.split)} is for {sum(schedule.split)} "
            f"layers, but the model has {n_layers}; plan again, or give the split"
        )
    return schedule.split


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
    return post_validated(schedule) if wanted else without_checks(schedule)
