"""The mode `auto`: the best of all others, by span, then step time, then memory.

`plan_auto` plans each placement once, under as much memory as it may have. Where
several orders take the same time, a mode that promises less memory may hold less; and
the hand-made orders are no worse than themselves. So all of them are planned too,
unless their lower bound shows that they are slower.

    mode            may hold, M_B     is planned if no number or list asks for others
    1F1B  ZBH1      p                 one chunk a stage
    ZBH2            2p-1              the same
    ZBVPP           p                 the same, by the planner of many chunks
    ZBV             p                 two chunks a stage
    VHalf  VMin     (p+2)//2, (p+4)//3   the same
    VPP, FThenB     what the order needs, up to 2p without a limit
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Unpack

from zbpp.core import MemoryModel, Placement, RequestError, Schedule, lower_bound
from zbpp.modes.fixed import fixed, plan_fixed_vpp
from zbpp.schedules import (
    plan_auto,
    plan_fthenb,
    plan_one_f_one_b,
    plan_v_half,
    plan_v_min,
    plan_zb1p,
    plan_zb2p,
    plan_zbv,
    plan_zbvpp,
)
from zbpp.schedules.planner.auto import Candidate, plan_one
from zbpp.schedules.planner.limits import capped
from zbpp.schedules.planner.request import ChunkRequest, Planner, Request, models

__all__ = [
    "Contender",
    "best_of",
    "compare_all",
    "plan_best",
    "plan_on",
    "promised_memory",
]

_PROMISED = ("ZBV", "ZBVPP", "ZBH1", "ZBH2", "VHalf", "VMin")
_ROUNDING = 1e-9  # relative


@dataclass(frozen=True)
class Contender:
    """A mode that was looked at, and what came of it."""

    mode: str
    candidate: Candidate | None = None
    """None: it was not planned."""
    reason: str = ""
    """Of a mode that was not planned."""


@dataclass(frozen=True)
class _Mode:
    name: str
    planner: Planner
    placement: Callable[[int], Placement]
    promise: Callable[[int], float]
    """Memory in M_B that the mode never exceeds, if no limit is given or a higher."""


_MODES = (
    _Mode("ZBV", plan_zbv, Placement.wave, lambda p: p),
    _Mode("ZBH1", plan_zb1p, Placement.single, lambda p: p),
    _Mode("ZBH2", plan_zb2p, Placement.single, lambda p: 2 * p - 1),
    _Mode(
        *("ZBVPP", partial(plan_zbvpp, chunks_per_stage=1)),
        placement=Placement.single,
        promise=lambda p: p,
    ),
    _Mode("VHalf", plan_v_half, Placement.wave, lambda p: (p + 2) // 2),
    _Mode("VMin", plan_v_min, Placement.wave, lambda p: (p + 4) // 3),
    _Mode("1F1B", fixed(plan_one_f_one_b), Placement.single, lambda p: 2 * p),
    _Mode("FThenB", fixed(plan_fthenb), Placement.single, lambda p: 2 * p),
    _Mode(
        *("VPP", plan_fixed_vpp, lambda p: Placement.interleaved(p, 2)),
        promise=lambda p: 2 * p,
    ),
)


def promised_memory(n_stages: int) -> dict[str, float]:
    """Forwards of a whole stage that modes never exceed, by the mode's name.

    >>> promised_memory(4)
    {'ZBV': 4, 'ZBH1': 4, 'ZBH2': 7, 'ZBVPP': 4, 'VHalf': 3, 'VMin': 2}
    """
    return {
        mode.name: mode.promise(n_stages) for mode in _MODES if mode.name in _PROMISED
    }


def compare_all(**request: Unpack[ChunkRequest]) -> Iterator[Contender]:
    """Plan every mode that can be the best, that of `plan_auto` first.

    Raises:
        LimitError: nothing fits; it names the smallest limit that works.
        RequestError: no placement can be planned.
    """
    plain = request.copy()
    chunks = plain.pop("chunks_per_stage", None)
    first = Candidate(plan_auto(**request), *models(plain))
    n_stages = plain["n_stages"]
    yield from _with_modes(
        first,
        plain,
        lambda placement: chunks in (None, placement.n_chunks // n_stages),
    )


def plan_on(placement: Placement, **request: Unpack[Request]) -> Iterator[Contender]:
    """Plan every mode of one placement that can be the best.

    Raises:
        LimitError: nothing fits; it names the smallest limit that works.
        RequestError: the costs do not fit the placement.
    """
    costs, memory = models(request)
    first = Candidate(plan_one(placement, **request), costs, memory)
    yield from _with_modes(first, request, lambda other: other == placement)


def best_of(contenders: Iterable[Contender]) -> Candidate:
    """Return the best plan, of equal ones the first."""
    best: Candidate | None = None
    for contender in contenders:
        found = contender.candidate
        if found is not None and (best is None or found.is_better_than(best)):
            best = found
    assert best is not None, "the first contender is a plan"
    return best


def _with_modes(
    first: Candidate, request: Request, wanted: Callable[[Placement], bool]
) -> Iterator[Contender]:
    best = first
    yield Contender("auto", first)
    for mode in _MODES:
        placement = mode.placement(request["n_stages"])
        if not wanted(placement):
            continue
        found = _plan(mode, placement, request, first.memory, best)
        yield found
        if found.candidate is not None and found.candidate.is_better_than(best):
            best = found.candidate


def _plan(
    mode: _Mode,
    placement: Placement,
    request: Request,
    memory: MemoryModel,
    best: Candidate,
) -> Contender:
    costs = best.costs
    promise = mode.promise(placement.n_stages)
    try:
        splits = costs.on(placement).splits
        limited = capped(memory, placement, splits=splits, default_limit=promise)
        if mode.name in _PROMISED:
            limited = capped(memory, placement, splits=splits, memory_cap=promise)
        bound = lower_bound(placement, request["n_microbatches"], costs, limited)
        if bound > best.span * (1 + _ROUNDING):
            why = f"its span is at least {bound:.4g}, that of {best.plan.name} is "
            return Contender(mode.name, reason=f"{why}{best.span:.4g}")
        asked = request.copy()
        asked["memory"] = limited
        plan = replace(mode.planner(**asked), memory=None)
    except RequestError as error:
        return Contender(mode.name, reason=str(error).partition("\n")[0])
    return Contender(mode.name, Candidate(plan, costs, memory))


def plan_best(**request: Unpack[ChunkRequest]) -> Schedule:
    """Plan the mode `auto`: see the module's text.

    Args:
        request: as for `plan_auto`.

    Raises:
        LimitError: nothing fits; it names the smallest limit that works.
        RequestError: no placement can be planned.
    """
    best = best_of(compare_all(**request))
    limited = None if best.memory.limit is None else best.memory
    return replace(best.plan, name="auto", memory=limited)
