"""Plan a mode and the split of the layers together, from costs per layer."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import accumulate

from zbpp.core import (
    Costs,
    LayerCosts,
    LimitError,
    MemoryModel,
    Placement,
    RequestError,
    Schedule,
)
from zbpp.modes import canonical, is_file, plan, planner_of
from zbpp.modes.auto import best_of, plan_on
from zbpp.modes.fixed import kept
from zbpp.schedules import (
    LayerPlan,
    Recomputing,
    Split,
    check_effort,
    even_split,
    plan_recompute,
)
from zbpp.schedules.planner.auto import Candidate, placements, plan_one
from zbpp.schedules.planner.budget import LONG, Budget, parse_effort, shares
from zbpp.schedules.planner.layers.search import SplitPlanner
from zbpp.schedules.planner.request import Request

__all__ = ["parse_split", "plan_layers", "planners", "recomputed_of"]


def plan_layers(
    mode: str | Schedule,
    layers: LayerCosts,
    *,
    n_stages: int | None = None,
    n_microbatches: int | None = None,
    split: Split = None,
    recompute: Recomputing | None = None,
    effort: str = "default",
    chunks_per_stage: int | None = None,
) -> LayerPlan:
    """Plan by the name of a mode, or split the layers for a schedule file.

    Args:
        mode: any spelling of a mode, the path of a schedule file, or a schedule.
            ``auto`` compares placements, each with its own best split.
        layers: times, memories and limit of the layers.
        n_stages: stages; for a file it may be left out, else it must agree.
        n_microbatches: micro-batches in a step; for a file as above.
        split: ``"balanced"``, ``"even"``, or the layers of each chunk; None: that of
            the file if it has one, else balanced. Balanced chunks have the least
            largest load that memory allows; then layers move while the plan gets
            shorter.
        recompute: ``"auto"``, ``"all"``, ``"none"``, or the layers that are
            recomputed, of the whole model; None: those of the file, else none.
        effort: as in `zbpp.plan`; ``best:SECONDS`` is shared by the placements and
            with the split.
        chunks_per_stage: as in `zbpp.plan`.

    Raises:
        RequestError: as in `zbpp.plan`, or the split does not fit the layers.
    """
    check_effort(effort)
    if isinstance(mode, Schedule):
        return _for_orders(mode, layers, split, recompute, effort)
    if is_file(mode):
        held = plan(mode, n_stages=n_stages, n_microbatches=n_microbatches)
        return _for_orders(held, layers, split, recompute, effort)
    if n_stages is None or n_microbatches is None:
        raise RequestError(
            f"n_stages is {n_stages} and n_microbatches {n_microbatches}; "
            f"{canonical(mode)} needs both"
        )
    found: list[LayerPlan] = []
    errors: list[RequestError] = []
    options = list(planners(mode, n_stages, n_microbatches, chunks_per_stage))
    efforts = shares(effort, len(options))
    for (placement, planner), share in zip(options, efforts, strict=True):
        try:
            one = plan_recompute(
                *(planner, layers, placement, n_microbatches),
                recompute=() if recompute is None else recompute,
                split=split,
                effort=share,
            )
        except RequestError as error:
            errors.append(error)
            continue
        found.append(one)
    if not found:
        limits = [error for error in errors if isinstance(error, LimitError)]
        raise min(limits, key=lambda error: error.smallest) if limits else errors[0]
    best = reduce(lambda a, b: b if b.is_better_than(a) else a, found)
    even = [one.even_step for one in found if one.even_step is not None]
    return replace(best, even_step=min(even, default=None))


def parse_split(text: str) -> Split:
    """Read ``balanced``, ``even`` or the layers of each chunk, as ``3,4,5``.

    >>> parse_split("3,4,5")
    (3, 4, 5)

    Raises:
        RequestError: it is none of these.
    """
    if text == "balanced":
        return "balanced"
    if text == "even":
        return "even"
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise RequestError(
            f"split {text!r} is not known; choose balanced or even, or give the layers "
            "of each chunk, as 3,4,5"
        ) from None


def planners(
    mode: str, n_stages: int, n_microbatches: int, chunks_per_stage: int | None
) -> Iterator[tuple[Placement, SplitPlanner]]:
    """The placements of a mode, and what plans each."""
    name = canonical(mode)
    placement = plan(  # of one micro-batch: it checks the sizes, and has the placement
        *(name,), n_stages=n_stages, n_microbatches=min(1, n_microbatches),
        effort="fast", chunks_per_stage=chunks_per_stage,
    ).placement  # fmt: skip
    if name == "auto":
        for placement, _ in placements(n_stages, chunks_per_stage):
            yield placement, partial(_plan_auto, placement, n_microbatches)
        return
    of_chunks = planner_of(name, chunks_per_stage)

    def planner(costs: Costs, memory: MemoryModel, effort: str) -> Schedule:
        return of_chunks(
            n_stages=n_stages,
            n_microbatches=n_microbatches,
            costs=costs,
            memory=memory,
            effort=effort,
        )

    yield placement, planner


def _plan_auto(
    placement: Placement,
    n_microbatches: int,
    costs: Costs,
    memory: MemoryModel,
    effort: str,
) -> Schedule:
    """Plan a placement: with effort fast or long by itself, else by every mode.

    The seconds of best are for the placement alone, after every mode by default.
    """
    request: Request = {
        "n_stages": placement.n_stages,
        "n_microbatches": n_microbatches,
        "costs": costs,
        "memory": memory,
        "effort": effort,
    }
    if effort in ("fast", LONG):
        return plan_one(placement, **request)
    kind, seconds = parse_effort(effort)
    budget = Budget(math.inf, seconds)
    if kind == "best":
        request["effort"] = "default"
    best = best_of(plan_on(placement, **request))
    if kind == "best":
        request["effort"] = f"best:{budget.seconds_left:g}"
        last = Candidate(plan_one(placement, **request), costs, memory)
        best = last if last.is_better_than(best) else best
    limited = None if memory.limit is None else memory
    return replace(best.plan, name="auto", memory=limited)


def _for_orders(
    held: Schedule,
    layers: LayerCosts,
    split: Split,
    recompute: Recomputing | None,
    effort: str,
) -> LayerPlan:
    """Split the layers for the orders of a schedule, unless it has a split."""
    n_layers, placement = layers.n_layers, held.placement
    if split is None and held.split is not None:
        split = held.split
        if sum(split) != n_layers:
            raise RequestError(
                f"the schedule's split {list(split)} is for {sum(split)} layers, but "
                f"the costs are for {n_layers}; plan again, or give another split"
            )
    if recompute is None and held.recompute is not None:
        if split is None or isinstance(split, str):
            split = even_split(n_layers, placement.n_chunks)
        recompute = recomputed_of(held, split)

    def planner(costs: Costs, memory: MemoryModel, effort: str) -> Schedule:
        return kept(held, costs, memory)

    return plan_recompute(
        *(planner, layers, placement, held.n_microbatches),
        recompute=() if recompute is None else recompute,
        split=split,
        effort=effort,
    )


def recomputed_of(schedule: Schedule, split: Sequence[int]) -> list[int]:
    """Layers of the whole model that a schedule recomputes."""
    firsts = accumulate(split, initial=0)
    return [
        first + layer
        for chunk, (first, n_layers) in enumerate(zip(firsts, split, strict=False))
        for layer in sorted(schedule.recomputes(chunk, n_layers))
    ]
