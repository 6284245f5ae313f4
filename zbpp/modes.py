"""From the value of a ``--pipeline_schedule_mode`` flag to a schedule.

A mode is one row of the table below. Its name and other spellings are read without
regard to case, hyphens and underscores. Anything else must be a schedule file: it ends
in ``.json``, or it exists.
"""

from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Protocol

from zbpp.core import (
    Costs,
    MemoryModel,
    RequestError,
    Schedule,
    ScheduleError,
    peaks,
    read_schedule,
)
from zbpp.schedules import (
    check_effort,
    plan_auto,
    plan_fthenb,
    plan_one_f_one_b,
    plan_v_half,
    plan_v_min,
    plan_vpp,
    plan_zb,
    plan_zb1p,
    plan_zb2p,
    plan_zbv,
    plan_zbvpp,
)

__all__ = ["MODES", "Mode", "canonical", "is_file", "plan"]


_UNIT = Costs()
_NO_LIMIT = MemoryModel()


class Planner(Protocol):
    """A pure function from a pipeline, its costs and its memory to a schedule."""

    def __call__(
        self,
        *,
        n_stages: int,
        n_microbatches: int,
        costs: Costs = _UNIT,
        memory: MemoryModel = _NO_LIMIT,
        effort: str = "default",
    ) -> Schedule: ...


class HandMade(Protocol):
    """A planner whose orders depend on the size of the pipeline alone."""

    def __call__(self, *, n_stages: int, n_microbatches: int) -> Schedule: ...


def _fixed(hand_made: HandMade) -> Planner:
    """Make a planner of a hand-made one: its order fits the memory, or is refused."""

    def plan_fixed(
        *,
        n_stages: int,
        n_microbatches: int,
        costs: Costs = _UNIT,
        memory: MemoryModel = _NO_LIMIT,
        effort: str = "default",
    ) -> Schedule:
        schedule = hand_made(n_stages=n_stages, n_microbatches=n_microbatches)
        return _kept(schedule, costs, memory)

    return plan_fixed


@dataclass(frozen=True)
class Mode:
    """A name, what plans it, a line for help texts, and other spellings of the name."""

    name: str
    planner: Planner
    summary: str
    aliases: tuple[str, ...] = ()


MODES = {
    mode.name: mode
    for mode in (
        Mode("FThenB", _fixed(plan_fthenb), "all F, then all BW; memory m", ("GPipe",)),
        Mode(
            *("1F1B", _fixed(plan_one_f_one_b), "one F, one BW; memory p"),
            ("PipeDream-Flush",),
        ),
        Mode("VPP", _fixed(plan_vpp), "half of 1F1B's bubble", ("Interleaved1F1B",)),
        Mode("ZBH1", plan_zb1p, "a third of 1F1B's bubble; memory p", ("ZB1P",)),
        Mode("ZBH2", plan_zb2p, "no bubble; memory 2p-1", ("ZB2P",)),
        Mode("ZB", plan_zb, "one chunk a stage under any memory limit; 2p if none"),
        Mode("ZBV", plan_zbv, "no bubble; memory p", ("ZBVZeroBubble",)),
        Mode("ZBVPP", plan_zbvpp, "ZBV under any memory limit; p if none"),
        Mode("VHalf", plan_v_half, "half of 1F1B's bubble and memory: (p+2)//2"),
        Mode("VMin", plan_v_min, "a third of 1F1B's memory: (p+4)//3"),
        Mode("auto", plan_auto, "the better of ZB and ZBV under any memory limit"),
    )
}
"""Every mode by its name, one line each: bubble at F=B=W and m >= 2p, memory in M_B."""


def _plain(spelling: str) -> str:
    return spelling.casefold().replace("-", "").replace("_", "")


_NAMES = {
    _plain(spelling): mode.name
    for mode in MODES.values()
    for spelling in (mode.name, *mode.aliases)
}


def canonical(mode: str) -> str:
    """Find the name of a mode from any of its spellings.

    >>> canonical("zb-h1"), canonical("gpipe"), canonical("ZB_1P")
    ('ZBH1', 'FThenB', 'ZBH1')

    Raises:
        RequestError: there is no such mode; the message lists them.
    """
    name = _NAMES.get(_plain(mode))
    if name is None:
        nearest = get_close_matches(_plain(mode), _NAMES, n=1, cutoff=0.0)[0]
        raise RequestError(
            f"unknown schedule mode {mode!r}; did you mean {_NAMES[nearest]}? "
            f"Choose one of {', '.join(MODES)}, or the path of a schedule file (.json)"
        )
    return name


def plan(
    mode: str,
    *,
    n_stages: int | None = None,
    n_microbatches: int | None = None,
    costs: Costs = _UNIT,
    memory: MemoryModel = _NO_LIMIT,
    effort: str = "default",
) -> Schedule:
    """Plan by the name of a mode, or read a schedule file.

    Args:
        mode: any spelling of a mode, or the path of a schedule file.
        n_stages: stages; for a file it may be left out, else it must agree.
        n_microbatches: micro-batches in a step; for a file as above.
        costs: must fit the placement; the hand-made orders depend on no times.
        memory: if it has a limit, the schedule keeps it, or is refused.
        effort: how hard to search: ``fast``, ``default``, ``best`` (a minute) or
            ``best:SECONDS``.

    Raises:
        RequestError: the mode is unknown, the file is invalid or does not agree, or
            the schedule does not fit the memory limit.
    """
    check_effort(effort)
    if is_file(mode):
        schedule = read_schedule(mode)
        _check_agrees(mode, "n_stages", schedule.n_stages, n_stages)
        _check_agrees(mode, "n_microbatches", schedule.n_microbatches, n_microbatches)
        try:
            return _kept(schedule, costs, memory)
        except ScheduleError:
            raise RequestError(_needs_more(schedule, memory)) from None
    name = canonical(mode)
    planner = MODES[name].planner
    n_stages = _at_least_one(name, "n_stages", n_stages)
    n_microbatches = _at_least_one(name, "n_microbatches", n_microbatches)
    try:
        return planner(
            n_stages=n_stages,
            n_microbatches=n_microbatches,
            costs=costs,
            memory=memory,
            effort=effort,
        )
    except ScheduleError:  # a hand-made order; the others are made to fit
        schedule = planner(n_stages=n_stages, n_microbatches=n_microbatches)
        raise RequestError(_needs_more(schedule, memory)) from None


def _kept(schedule: Schedule, costs: Costs, memory: MemoryModel) -> Schedule:
    """Return a schedule that keeps the memory limit, or raise ScheduleError."""
    costs.on(schedule.placement)
    memory.on(schedule.placement)
    return schedule if memory.limit is None else replace(schedule, memory=memory)


def is_file(mode: str) -> bool:
    """Whether a mode is the path of a schedule file, which knows its own numbers."""
    if _plain(mode) in _NAMES:
        return False
    return mode.endswith(".json") or Path(mode).is_file()


def _check_agrees(path: str, name: str, held: int, wanted: int | None) -> None:
    if wanted is not None and wanted != held:
        raise RequestError(
            f"{path}: {name} is {held}, but {wanted} is asked for; "
            "plan again, or leave it out"
        )


def _at_least_one(mode: str, name: str, number: int | None) -> int:
    if number is None or number < 1:
        raise RequestError(f"{name} is {number}; {mode} needs at least 1")
    return number


def _needs_more(schedule: Schedule, memory: MemoryModel) -> str:
    """Say what a schedule needs where it exceeds the limit most, and what would fit."""
    model = memory.on(schedule.placement)
    needs = peaks(schedule.orders, model)
    stage = max(range(schedule.n_stages), key=lambda s: needs[s] - model.limit[s])
    fitting = [name for name in MODES if _fits(name, schedule, memory)]
    others = f"{', '.join(fitting)} would fit" if fitting else "no mode fits"
    return (
        f"{schedule.name} with {schedule.n_stages} stages and "
        f"{schedule.n_microbatches} micro-batches needs memory {needs[stage]:g} on "
        f"stage {stage}, over the limit {model.limit[stage]:g}; {others}: "
        f"{'choose one' if fitting else 'take smaller micro-batches'}, or raise "
        "memory_limit"
    )


def _fits(name: str, schedule: Schedule, memory: MemoryModel) -> bool:
    try:
        MODES[name].planner(
            n_stages=schedule.n_stages,
            n_microbatches=schedule.n_microbatches,
            memory=memory,
            effort="fast",
        )
    except RequestError:  # over the limit, or a list of another number of chunks
        return False
    return True
