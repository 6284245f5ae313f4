"""From the value of a ``--pipeline_schedule_mode`` flag to a schedule.

A mode is one row of the table below. Its name and other spellings are read without
regard to case, hyphens and underscores. Anything else must be a schedule file: it ends
in ``.json``, or in ``.csv`` (torch's), or it exists.
"""

from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path

from zbpp.core import (
    Costs,
    LimitError,
    MemoryModel,
    Placement,
    RequestError,
    Schedule,
    format_memory,
    read_schedule,
    recomputed,
)
from zbpp.modes.auto import plan_best
from zbpp.modes.fixed import fixed, kept, plan_fixed_vpp
from zbpp.schedules import (
    check_effort,
    is_torch_csv,
    plan_fthenb,
    plan_one_f_one_b,
    plan_v_half,
    plan_v_min,
    plan_zb,
    plan_zb1p,
    plan_zb2p,
    plan_zbv,
    plan_zbvpp,
    read_torch_csv,
)
from zbpp.schedules.planner.request import ChunkPlanner, Planner, Request

__all__ = [
    "MODES",
    "SINGLE_CHUNK_MODES",
    "Mode",
    "canonical",
    "is_auto",
    "is_file",
    "plan",
    "planner_of",
]


_UNIT = Costs()
_NO_LIMIT = MemoryModel()


@dataclass(frozen=True)
class Mode:
    """A name, what plans it, a line for help texts, and other spellings of the name.

    ``chunked`` is the planner again if it takes any number of chunks a stage.
    """

    name: str
    planner: Planner
    summary: str
    aliases: tuple[str, ...] = ()
    chunked: ChunkPlanner | None = None


MODES = {
    mode.name: mode
    for mode in (
        Mode("FThenB", fixed(plan_fthenb), "all F, then all BW; memory m", ("GPipe",)),
        Mode(
            *("1F1B", fixed(plan_one_f_one_b), "one F, one BW; memory p"),
            ("PipeDream-Flush",),
        ),
        Mode(
            *("VPP", plan_fixed_vpp, "half of 1F1B's bubble", ("Interleaved1F1B",)),
            chunked=plan_fixed_vpp,
        ),
        Mode("ZBH1", plan_zb1p, "a third of 1F1B's bubble; memory p", ("ZB1P",)),
        Mode("ZBH2", plan_zb2p, "no bubble; memory 2p-1", ("ZB2P",)),
        Mode("ZB", plan_zb, "one chunk a stage under any memory limit; 2p if none"),
        Mode("ZBV", plan_zbv, "no bubble; memory p", ("ZBVZeroBubble",)),
        Mode(
            *("ZBVPP", plan_zbvpp, "ZBV under any memory limit; p if none"),
            chunked=plan_zbvpp,
        ),
        Mode("VHalf", plan_v_half, "half of 1F1B's bubble and memory: (p+2)//2"),
        Mode("VMin", plan_v_min, "a third of 1F1B's memory: (p+4)//3"),
        Mode(
            *("auto", plan_best, "the best of all under any memory limit"),
            chunked=plan_best,
        ),
    )
}
"""Every mode by its name, one line each: bubble at F=B=W and m >= 2p, memory in M_B."""

SINGLE_CHUNK_MODES = ("FThenB", "1F1B", "ZBH1", "ZBH2", "ZB")
"""Modes whose stages hold one chunk each."""


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
            f"Choose one of {', '.join(MODES)}, or the path of a schedule file (.json, "
            "or torch's .csv)"
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
    chunks_per_stage: int | None = None,
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
        chunks_per_stage: for VPP, ZBVPP and auto; None: as many as the lists of costs
            and memory are for, else 2 (auto: 1 and 2).

    Raises:
        RequestError: the mode is unknown, the file is invalid or does not agree, or
            the schedule does not fit the memory limit.
    """
    check_effort(effort)
    if is_file(mode):
        schedule = read_torch_csv(mode) if is_torch_csv(mode) else read_schedule(mode)
        each = schedule.placement.n_chunks // schedule.n_stages
        _check_agrees(mode, "n_stages", schedule.n_stages, n_stages)
        _check_agrees(mode, "n_microbatches", schedule.n_microbatches, n_microbatches)
        _check_agrees(mode, "chunks_per_stage", each, chunks_per_stage)
        try:
            if memory.limit is not None:
                costs, memory = recomputed(costs, memory, schedule)
            return kept(schedule, costs, memory)
        except LimitError as error:
            request = Request(
                n_stages=schedule.n_stages,
                n_microbatches=schedule.n_microbatches,
                costs=costs,
                memory=memory,
            )
            raise _with_others(error, request) from None
    name = canonical(mode)
    request = Request(
        n_stages=_at_least_one(name, "n_stages", n_stages),
        n_microbatches=_at_least_one(name, "n_microbatches", n_microbatches),
        costs=costs,
        memory=memory,
        effort=effort,
    )
    try:
        return planner_of(name, chunks_per_stage)(**request)
    except LimitError as error:
        raise _with_others(error, request) from None


def planner_of(name: str, chunks_per_stage: int | None = None) -> Planner:
    """Return what plans a mode, given its name.

    Raises:
        RequestError: a number of chunks is given that the mode cannot have.
    """
    mode = MODES[name]
    if chunks_per_stage is None:
        return mode.planner
    if mode.chunked is None:
        takers = ", ".join(other.name for other in MODES.values() if other.chunked)
        raise RequestError(
            f"chunks_per_stage is {chunks_per_stage}, but {name} has its own number; "
            f"leave it out, or choose one of {takers}"
        )
    _at_least_one(name, "chunks_per_stage", chunks_per_stage)
    return partial(mode.chunked, chunks_per_stage=chunks_per_stage)


def is_auto(mode: object) -> bool:
    """True if a mode is any spelling of ``auto``."""
    return isinstance(mode, str) and _plain(mode) == "auto"


def is_file(mode: str) -> bool:
    """True if a mode is the path of a schedule file, which knows its own numbers."""
    if _plain(mode) in _NAMES:
        return False
    return mode.endswith((".json", ".csv")) or Path(mode).is_file()


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


def _with_others(error: LimitError, request: Request) -> RequestError:
    """Add to an error what would fit."""
    fitting = [name for name in MODES if _fits(name, request)]
    others = f"{', '.join(fitting)} would fit" if fitting else "no mode fits"
    return RequestError(
        f"{error.reason}; {others}: "
        f"{'choose one' if fitting else 'take smaller micro-batches'}, or raise "
        f"memory_limit: the smallest limit that works is "
        + format_memory(error.smallest, round_up=True)
    )


def _fits(name: str, request: Request) -> bool:
    """True if a mode fits the limit; told without a plan of the full size.

    What is planned refuses no limit that holds one micro-batch at a time, so one is
    asked for. 1F1B and VPP hold no more forwards than there are in their warm-up.
    FThenB holds all; one is run, beside what the others have left.
    """
    quick = request.copy()
    quick["effort"] = "fast"
    quick["n_microbatches"] = 1
    if name in ("1F1B", "VPP"):
        quick["n_microbatches"] = min(
            request["n_microbatches"], 4 * request["n_stages"]
        )
    try:
        MODES[name].planner(**quick)
        if name == "FThenB":
            others = request["n_microbatches"] - 1
            placement, memory = Placement.single(request["n_stages"]), request["memory"]
            held = memory.on(placement)
            left = zip(held.fixed, held.m_b, strict=True)
            fixed = tuple(one + others * m_b for one, m_b in left)
            quick["memory"] = replace(memory, m_fixed=fixed, peak_o=0.0)
            MODES[name].planner(**quick)
    except RequestError:  # over the limit, or a list of another number of chunks
        return False
    return True
