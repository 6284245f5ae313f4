"""Choose the schedule of a pipeline together with the split of its layers."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from zbpp.core import (
    Costs,
    LayerCosts,
    MemoryModel,
    Placement,
    RequestError,
    Schedule,
    read_layers,
    recomputed,
)
from zbpp.core.costs.units import check_unit, with_limit
from zbpp.modes import is_auto, is_file
from zbpp.planning.choose import choose
from zbpp.planning.layer_plans import plan_layers
from zbpp.planning.recompute_plans import plan_recomputed, with_recompute
from zbpp.planning.resolve import choose_schedule, count_stages
from zbpp.schedules import Recomputing, Split, even_split

__all__ = ["Chosen", "LayersOf", "choose_split", "split_of"]

LayersOf = LayerCosts | str | Path
"""Costs per layer, or a file of them."""

_log = logging.getLogger("zbpp")


@dataclass(frozen=True)
class Chosen:
    """A schedule, what it was planned for, and the layers of each chunk."""

    schedule: Schedule
    costs: Costs | None
    memory: MemoryModel | None
    split: tuple[int, ...]
    line: str = ""
    """Of `auto` with costs per layer: what was chosen, and why the others lost."""


def choose_split(
    schedule: str | Path | Schedule,
    layers: LayersOf | None,
    split: Split,
    *,
    n_layers: int,
    n_stages: int | None,
    n_ranks: int,
    n_microbatches: int | None,
    costs: Costs | None,
    memory: MemoryModel | None,
    recompute: Recomputing | None = None,
) -> Chosen:
    """Plan for the layers; without costs of them, choose the schedule alone.

    Args:
        schedule: as in `choose_schedule`.
        layers: costs per layer, or None.
        split: what was asked for; None: the schedule's; if it has none, balanced with
            costs per layer, and even without.
        n_layers: layers of the model.
        n_stages: as in `choose_schedule`, as are the arguments below.
        n_ranks: likewise.
        n_microbatches: likewise.
        costs: likewise; not with ``layers``.
        memory: likewise; with ``layers``, its limit counts where they have none.
        recompute: layers whose graph B computes again, as in `plan_recomputed`; None:
            those of the schedule.

    Raises:
        RequestError: these do not fit together.
    """
    if layers is not None and costs is not None:
        raise RequestError(
            "costs and layers are both given; the costs of chunks follow from those of "
            "layers: leave costs out"
        )
    if layers is None and memory is not None:
        check_unit(memory)
    is_given = isinstance(schedule, Schedule) or is_file(str(schedule))
    if layers is None and recompute is not None and not is_given:
        schedule = plan_recomputed(
            *(str(schedule), recompute),
            n_stages=count_stages(n_stages, n_ranks) or n_ranks,
            n_microbatches=n_microbatches,
            costs=costs or Costs(),
            memory=memory or MemoryModel(),
            split_of=partial(_split_on, split, n_layers),
        )
    elif layers is None or is_given:
        schedule = choose_schedule(
            schedule,
            n_stages=n_stages,
            n_ranks=n_ranks,
            n_microbatches=n_microbatches,
            costs=costs or Costs(),
            memory=(memory if layers is None else None) or MemoryModel(),
        )
    if layers is None:
        assert isinstance(schedule, Schedule)
        chosen = split_of(schedule, split, n_layers)
        if recompute is not None and is_given:
            schedule = with_recompute(schedule, recompute, lambda _: chosen)
        schedule = _with_split(schedule, chosen)
        if costs is not None:
            costs, memory = recomputed(costs, memory or MemoryModel(), schedule)
        return Chosen(schedule, costs, memory, chosen)
    layers = _checked(layers, n_layers, memory)
    p, line = count_stages(n_stages, n_ranks) or n_ranks, ""
    if is_auto(schedule) and n_microbatches is not None:
        choice = choose(
            layers,
            n_stages=p,
            n_microbatches=n_microbatches,
            split=split,
            recompute=recompute,
        )
        planned, line = choice.plan, choice.line
        _log.info(line)
    else:
        planned = plan_layers(
            schedule if isinstance(schedule, Schedule) else str(schedule),
            layers,
            n_stages=p,
            n_microbatches=n_microbatches,
            split=split,
            recompute=recompute,
        )
    return Chosen(planned.schedule, planned.costs, planned.memory, planned.split, line)


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


def _with_split(schedule: Schedule, split: Sequence[int]) -> Schedule:
    """The schedule with a split that it is run with, if it names another one.

    Or if it recomputes layers: which share of a chunk they are is then known.
    """
    if schedule.split == split or len(split) != schedule.placement.n_chunks:
        return schedule
    if schedule.split is None and not schedule.recompute:
        return schedule
    return replace(schedule, split=tuple(split))


def _checked(layers: LayersOf, n_layers: int, memory: MemoryModel | None) -> LayerCosts:
    if not isinstance(layers, LayerCosts):
        layers = read_layers(layers)
    if layers.n_layers != n_layers:
        raise RequestError(
            f"there are costs of {layers.n_layers} layers, but the model has "
            f"{n_layers}; measure this model"
        )
    limit = memory.limit if memory is not None and layers.limit is None else None
    return with_limit(layers, limit)
