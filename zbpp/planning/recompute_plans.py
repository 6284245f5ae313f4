"""Plan a mode with chunks, or layers, that are recomputed, from costs of chunks."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from typing import TypeVar

from zbpp.core import (
    Costs,
    LimitError,
    MemoryModel,
    Placement,
    Recompute,
    RequestError,
    Schedule,
    recomputed,
)
from zbpp.core.costs import chunk_layers
from zbpp.modes import canonical, is_file, plan
from zbpp.modes.fixed import kept
from zbpp.planning.layer_plans import planners
from zbpp.schedules import LayerPlan, Recomputing, plan_recompute
from zbpp.schedules.planner.budget import shares
from zbpp.schedules.planner.layers.search import recompute_by_chunk
from zbpp.schedules.planner.request import listed_chunks

__all__ = ["SplitOf", "parse_recompute", "plan_recomputed", "with_recompute"]

_R = TypeVar("_R", bound=Recomputing)
_UNIT = Costs()
_NO_LIMIT = MemoryModel()

SplitOf = Callable[[Placement], Sequence[int]]
"""Layers of each chunk of a placement."""


def parse_recompute(text: str) -> Recomputing:
    """Read ``auto``, ``all``, ``none``, or numbers of chunks or layers, as ``0,2,5``.

    >>> parse_recompute("0,2,5")
    (0, 2, 5)

    Raises:
        RequestError: it is none of these.
    """
    match text:
        case "auto":
            return "auto"
        case "all":
            return "all"
        case "none":
            return "none"
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise RequestError(
            f"recompute {text!r} is not known; choose auto, all or none, or give "
            "numbers, as 0,2,5"
        ) from None


def plan_recomputed(
    mode: str,
    recompute: Recomputing,
    *,
    n_stages: int | None = None,
    n_microbatches: int | None = None,
    costs: Costs = _UNIT,
    memory: MemoryModel = _NO_LIMIT,
    split_of: SplitOf | None = None,
    effort: str = "default",
    chunks_per_stage: int | None = None,
) -> Schedule:
    """Plan by the name of a mode; of a file, say what is recomputed.

    Args:
        mode: any spelling of a mode, or the path of a schedule file.
        recompute: ``"auto"``, ``"all"``, ``"none"``, or the numbers of what is
            recomputed: layers of the whole model if their split is known, else chunks.
        n_stages: as in `zbpp.plan`, as the arguments below.
        n_microbatches: likewise.
        costs: without recompute; with ``m_r`` in the memory, auto needs it.
        memory: likewise.
        split_of: layers of each chunk; they share its costs evenly.
        effort: likewise.
        chunks_per_stage: likewise.

    Raises:
        RequestError: as in `zbpp.plan`; or there is no such chunk or layer; or auto
            lacks m_r or a limit, or the orders of a file are not to be planned.
    """
    if is_file(mode):
        held = plan(mode, n_stages=n_stages, n_microbatches=n_microbatches)
        own = held.split
        known = split_of if own is None or split_of is None else lambda _: own
        schedule = with_recompute(held, recompute, known)
        if memory.limit is None:
            return schedule
        return kept(schedule, *recomputed(costs, memory, schedule))
    if n_stages is None or n_microbatches is None:
        raise RequestError(
            f"n_stages is {n_stages} and n_microbatches {n_microbatches}; "
            f"{canonical(mode)} needs both"
        )
    if chunks_per_stage is None and canonical(mode) in ("VPP", "ZBVPP", "auto"):
        chunks_per_stage = listed_chunks(costs, memory, n_stages)
    found: list[LayerPlan] = []
    errors: list[RequestError] = []
    options = list(planners(mode, n_stages, n_microbatches, chunks_per_stage))
    efforts = shares(effort, len(options))
    for (placement, planner), share in zip(options, efforts, strict=True):
        split = (1,) * placement.n_chunks if split_of is None else split_of(placement)
        try:
            found.append(
                plan_recompute(
                    planner,
                    chunk_layers(costs, memory, placement, split),
                    *(placement, n_microbatches),
                    recompute=_checked(recompute, sum(split), split_of),
                    split=split,
                    effort=share,
                )
            )
        except RequestError as error:
            errors.append(error)
    if not found:
        limits = [error for error in errors if isinstance(error, LimitError)]
        raise min(limits, key=lambda error: error.smallest) if limits else errors[0]
    best = reduce(lambda a, b: b if b.is_better_than(a) else a, found).schedule
    return best if split_of is not None else replace(best, split=None)


def with_recompute(
    schedule: Schedule, recompute: Recomputing, split_of: SplitOf | None = None
) -> Schedule:
    """The same orders, with other parts that are recomputed.

    Args:
        schedule: whose orders stay; its memory limit is not checked again.
        recompute: as for `plan_recomputed`, but not ``"auto"``.
        split_of: likewise.

    Raises:
        RequestError: there is no such chunk or layer, or it is to be planned.
    """
    if recompute == "auto":
        raise RequestError(
            f"recompute auto plans anew, but the orders of {schedule.name} are given; "
            "give a mode, or plan a file with zbpp plan --recompute auto"
        )
    n_chunks = schedule.placement.n_chunks
    split = (1,) * n_chunks if split_of is None else split_of(schedule.placement)
    which: tuple[Recompute, ...] | None
    if isinstance(recompute, str):
        which = (True,) * n_chunks if recompute == "all" else None
    else:
        which = recompute_by_chunk(split, _checked(recompute, sum(split), split_of))
    if split_of is None:
        split = schedule.split or ()
    return replace(
        schedule, memory=None, recompute=which, split=tuple(split) if split else None
    )


def _checked(recompute: _R, n: int, split_of: SplitOf | None) -> _R:
    """Return what names chunks, or layers, that there are.

    Raises:
        RequestError: it names another.
    """
    what = "chunk" if split_of is None else "layer"
    for one in () if isinstance(recompute, str) else recompute:
        if not 0 <= one < n:
            raise RequestError(
                f"{what} {one} shall be recomputed; the {what}s are 0 to {n - 1}"
            )
    return recompute
