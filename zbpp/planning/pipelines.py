"""What a pipeline is asked for, as a request; and what it makes of the answer.

A pipeline has a number of processes, and layers that it deals to chunks even where
nothing is known of their costs.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from zbpp.core import (
    Costs,
    LayerCosts,
    MemoryModel,
    PassKind,
    Placement,
    RequestError,
    Schedule,
    parse_memory,
    read_layers,
)
from zbpp.core.costs.limits import check_unit
from zbpp.planning.answer import Plan
from zbpp.planning.make import make_plan
from zbpp.planning.modes import is_auto, is_file
from zbpp.planning.orders import given_orders
from zbpp.planning.request import PlanRequest
from zbpp.schedules import (
    Recomputing,
    Split,
    even_split,
    post_validated,
    without_checks,
)

__all__ = [
    "LayersOf",
    "choose_validation",
    "memory_model",
    "plan_pipeline",
    "recomputed_layers",
    "split_of",
]

LayersOf = LayerCosts | str | Path
"""Costs per layer, or a file of them."""

_log = logging.getLogger("zbpp")


def plan_pipeline(
    schedule: str | Path | Schedule | Plan,
    *,
    layers: LayersOf | None,
    split: Split,
    n_layers: int,
    n_stages: int | None,
    n_ranks: int,
    n_microbatches: int | None,
    costs: Costs | None,
    memory: MemoryModel | None,
    recompute: Recomputing | None = None,
) -> Plan:
    """Plan for the layers of a model; without costs of them, choose orders alone.

    Args:
        schedule: as in `PlanRequest`.
        layers: costs per layer, or None.
        split: what was asked for; None: the schedule's; if it has none, balanced with
            costs per layer, and even without.
        n_layers: layers of the model.
        n_stages: what was asked for; None: as many as the schedule has, or one per
            process.
        n_ranks: processes of the pipeline; one alone may hold any number of stages.
        n_microbatches: what was asked for; None: what the schedule has.
        costs: of chunks; not with ``layers``.
        memory: of chunks; with ``layers``, its limit counts where they have none.
        recompute: layers whose graph B computes again; None: those of the schedule.

    Raises:
        RequestError: these do not fit together.
    """
    if layers is not None and costs is not None:
        raise RequestError(
            "costs and layers are both given; the costs of chunks follow from those of "
            "layers: leave costs out"
        )
    is_mode = not isinstance(schedule, Schedule | Plan) and not is_file(str(schedule))
    n_stages = _count_stages(n_stages, n_ranks)
    request = PlanRequest(
        schedule=schedule,
        n_stages=n_stages or n_ranks if is_mode else n_stages,
        n_microbatches=n_microbatches,
        costs=costs,
        memory=memory,
        recompute=recompute,
    )
    if layers is not None:
        plan = make_plan(
            replace(
                request,
                costs=_checked(layers, n_layers),
                split=split,
                effort="fast" if is_auto(schedule) else "default",
                by_mode=True,
            )
        )
        if plan.line:
            _log.info(plan.line)
        return plan
    if memory is not None:
        check_unit(memory)
    if is_mode:
        plan = make_plan(replace(request, split=partial(_split_on, split, n_layers)))
        return replace(plan, split=split_of(plan.schedule, split, n_layers))
    orders = given_orders(request)
    assert orders is not None
    schedule = orders.schedule if isinstance(orders, Plan) else orders
    chosen = split_of(schedule, split, n_layers)
    if schedule.split != chosen and (schedule.split or schedule.recompute):
        # the layers that it recomputes are then known as a share of their chunk
        orders = schedule = replace(schedule, split=_fitting(chosen, schedule))
    plan = make_plan(replace(request, schedule=orders, split=lambda _: chosen))
    return replace(plan, split=chosen)


def _fitting(split: tuple[int, ...], schedule: Schedule) -> tuple[int, ...] | None:
    """The split if it is for the chunks of the schedule; else the schedule's own."""
    return split if len(split) == schedule.placement.n_chunks else schedule.split


def _count_stages(n_stages: int | None, n_ranks: int) -> int | None:
    """Number of stages: one a process, if there are several; else what is asked for.

    Raises:
        RequestError: another number is asked for than there are processes.
    """
    if n_ranks == 1:
        return n_stages
    if n_stages not in (None, n_ranks):
        raise RequestError(
            f"{n_ranks} processes cannot run {n_stages} stages; start one process a "
            "stage"
        )
    return n_ranks


def _checked(layers: LayersOf, n_layers: int) -> LayerCosts:
    if not isinstance(layers, LayerCosts):
        layers = read_layers(layers)
    if layers.n_layers != n_layers:
        raise RequestError(
            f"there are costs of {layers.n_layers} layers, but the model has "
            f"{n_layers}; measure this model"
        )
    return layers


def split_of(schedule: Schedule, split: Split, n_layers: int) -> tuple[int, ...]:
    """Layers of each chunk where there are no costs per layer.

    Raises:
        RequestError: they do not fit the model, or cannot be balanced.
    """
    n_chunks = schedule.placement.n_chunks
    if split == "balanced":
        raise RequestError(
            "split is balanced, but there are no costs per layer; give layers=, or "
            "leave split out"
        )
    if split is None and schedule.split is not None:
        if sum(schedule.split) != n_layers:
            raise RequestError(
                f"the schedule's split {list(schedule.split)} is for "
                f"{sum(schedule.split)} layers, but the model has {n_layers}; plan "
                "again, or give the split"
            )
        return schedule.split
    if split is None or split == "even":
        return even_split(n_layers, n_chunks)
    if isinstance(split, str):
        raise RequestError(
            f"split is {split!r}; choose balanced or even, or give the layers of each "
            "chunk"
        )
    return tuple(split)


def _split_on(split: Split, n_layers: int, placement: Placement) -> tuple[int, ...]:
    """Layers of each chunk of a placement, without costs of them."""
    if split is None or isinstance(split, str):
        return even_split(n_layers, placement.n_chunks)
    return tuple(split)


def choose_validation(
    schedule: Schedule, wanted: bool | None, *, steps: bool = True
) -> Schedule:
    """Give a schedule its V's, or take them out.

    Args:
        schedule: with or without V's.
        wanted: None: yes for schedules that split the backward or have V's already,
            if there are stages to wait for. Others have bubbles enough for a barrier.
        steps: there is an optimizer.

    Raises:
        RequestError: steps shall be validated, but the caller takes them.
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


def recomputed_layers(schedule: Schedule, ranges: Sequence[range]) -> frozenset[int]:
    """Global indices of the layers that a schedule recomputes.

    Args:
        schedule: says which of each chunk's layers.
        ranges: layers of each chunk.

    Raises:
        RequestError: a chunk has no such layer.
    """
    found: set[int] = set()
    for chunk, layers in enumerate(ranges):
        for layer in schedule.recomputes(chunk, len(layers)):
            if not layer < len(layers):
                raise RequestError(
                    f"layer {layer} of chunk {chunk} shall be recomputed, but the "
                    f"chunk has {len(layers)} layers; plan for this split, or give the "
                    f"schedule's: {list(schedule.split or ()) or 'it has none'}"
                )
            found.add(layers[layer])
    return frozenset(found)


def memory_model(memory: MemoryModel | str | float | None) -> MemoryModel | None:
    """Read a limit, as a number or a text such as ``"16GiB"``.

    Raises:
        RequestError: the text is no amount of memory.
    """
    if isinstance(memory, MemoryModel) or memory is None:
        return memory
    limit = parse_memory(memory) if isinstance(memory, str) else float(memory)
    return MemoryModel(limit=limit)
