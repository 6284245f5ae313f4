"""Modes: the values of ``--pipeline_schedule_mode``, one row each.

A mode's name and other spellings are read without regard to case, hyphens and
underscores. Anything else must be a schedule or plan file: it ends in ``.json``, or it
exists. Every list of modes elsewhere is made of these rows.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from zbpp.core import Placement, RequestError, Schedule
from zbpp.schedules import (
    plan_combined_1f1b,
    plan_dual_pipe_v,
    plan_fthenb,
    plan_one_f_one_b,
    plan_vpp,
)

AUTO = "auto"
BASELINE = "1F1B"
"""The mode that others are compared with."""


@dataclass(frozen=True)
class Mode:
    """A way to plan, and the names that it goes by.

    Args:
        name: as it is written in files and tables.
        summary: one line: bubble at F = B = W and m >= 2p, memory in M_B.
        place: the placement of (n_stages, chunks_per_stage); None: any, the best.
        aliases: other names.
        chunks: chunks of a stage; None: any number.
        promise: M_B that a search never exceeds, of n_stages.
        default: M_B that a search may use where no memory limit is given, and that
            `auto` gives it.
        order: makes the orders, from n_stages, n_microbatches and, where any number is
            allowed, chunks_per_stage; None: they are searched for the costs.
        splits: the backward is split into B and W.
        pairs: passes run in pairs, which pays where the costs have ``fb`` or
            ``parts``.
        is_usual: it is compared where no mode is named.
    """

    name: str
    summary: str
    place: Callable[[int, int], Placement] | None
    aliases: tuple[str, ...] = ()
    chunks: int | None = 1
    promise: Callable[[int], int] | None = None
    default: Callable[[int], int] | None = None
    order: Callable[..., Schedule] | None = None
    splits: bool = True
    pairs: bool = False
    is_usual: bool = True

    def order_on(self, placement: Placement, n_microbatches: int) -> Schedule:
        """Make the hand-made order on one of the mode's placements."""
        assert self.order is not None, self.name
        n_stages = placement.n_stages
        sizes = {"n_stages": n_stages, "n_microbatches": n_microbatches}
        if self.chunks is None:
            sizes["chunks_per_stage"] = placement.n_chunks // n_stages
        return self.order(**sizes)


def _single(n_stages: int, _: int) -> Placement:
    return Placement.single(n_stages)


_ROWS = (
    Mode(
        name="FThenB",
        summary="all F, then all BW; memory m",
        place=_single,
        aliases=("GPipe",),
        order=plan_fthenb,
        splits=False,
    ),
    Mode(
        name=BASELINE,
        summary="one F, one BW; memory p",
        place=_single,
        aliases=("PipeDream-Flush",),
        order=plan_one_f_one_b,
        splits=False,
    ),
    Mode(
        name="VPP",
        summary="half of 1F1B's bubble",
        place=Placement.interleaved,
        aliases=("Interleaved1F1B",),
        chunks=None,
        order=plan_vpp,
        splits=False,
    ),
    Mode(
        name="ZBH1",
        summary="a third of 1F1B's bubble; memory p",
        place=_single,
        aliases=("ZB1P",),
        promise=lambda p: p,
    ),
    Mode(
        name="ZBH2",
        summary="no bubble; memory 2p-1",
        place=_single,
        aliases=("ZB2P",),
        promise=lambda p: 2 * p - 1,
    ),
    Mode(
        name="ZB",
        summary="one chunk a stage under any memory limit; 2p if none",
        place=_single,
        default=lambda p: 2 * p,
        is_usual=False,
    ),
    Mode(
        name="ZBV",
        summary="no bubble; memory p",
        place=Placement.wave,
        aliases=("ZBVZeroBubble",),
        chunks=2,
        default=lambda p: p,
    ),
    Mode(
        name="ZBVPP",
        summary="ZBV under any memory limit; p if none",
        place=Placement.wave,
        chunks=None,
        default=lambda p: p,
        is_usual=False,
    ),
    Mode(
        name="VHalf",
        summary="half of 1F1B's bubble; memory (p+2)//2",
        place=Placement.wave,
        chunks=2,
        promise=lambda p: (p + 2) // 2,
    ),
    Mode(
        name="VMin",
        summary="least memory, with some bubble: (p+4)//3",
        place=Placement.wave,
        chunks=2,
        promise=lambda p: (p + 4) // 3,
    ),
    Mode(
        name="DualPipeV",
        summary="F overlaps with backwards, on a V (costs fb or parts); memory p + 1/2",
        place=Placement.wave,
        chunks=2,
        order=plan_dual_pipe_v,
        pairs=True,
        is_usual=False,
    ),
    Mode(
        name="Combined1F1B",
        summary="VPP, F overlaps with backwards (costs fb or parts); memory 3p/2",
        place=Placement.interleaved,
        chunks=None,
        order=plan_combined_1f1b,
        splits=False,
        pairs=True,
        is_usual=False,
    ),
    Mode(
        name=AUTO,
        summary="the best of all under any memory limit",
        place=None,
        chunks=None,
        is_usual=False,
    ),
)

MODES = {mode.name: mode for mode in _ROWS}
"""Every mode by its name."""

USUAL_MODES = tuple(mode.name for mode in _ROWS if mode.is_usual)
"""Modes that are compared if none is named; they differ in memory."""

MODE_WORDS = f"{', '.join(MODES)}, or a file."
"""All values of a mode, for help texts."""


def one_of(names: Iterable[str], word: str = "or") -> str:
    """Write names in a sentence.

    >>> one_of(["ZB", "ZBV", "auto"])
    'ZB, ZBV or auto'
    """
    *first, last = names
    return f"{', '.join(first)} {word} {last}" if first else last


JOINT_WORDS = one_of(mode.name for mode in _ROWS if not mode.splits)
"""Modes whose backward is in one piece."""
CHUNKED_MODES = tuple(mode.name for mode in _ROWS if mode.chunks is None)
"""Modes of any number of chunks a stage."""


def _plain(spelling: str) -> str:
    return spelling.casefold().replace("-", "").replace("_", "")


_NAMES = {
    _plain(spelling): mode.name
    for mode in _ROWS
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
        raise RequestError(
            f"unknown schedule mode {mode!r}; {_guess(_plain(mode))}choose one of "
            f"{', '.join(MODES)}, or the path of a schedule or plan file (.json)"
        )
    return name


def _guess(spelling: str) -> str:
    """Ask for modes that are spelled nearly so: with letters swapped, or others."""
    swapped = [name for name in _NAMES if sorted(name) == sorted(spelling)]
    near = swapped or get_close_matches(spelling, _NAMES)
    names = list(dict.fromkeys(_NAMES[name] for name in near))
    return f"did you mean {one_of(names)}? Or " if names else ""


def is_auto(mode: object) -> bool:
    """True if a mode is any spelling of ``auto``."""
    return isinstance(mode, str) and _NAMES.get(_plain(mode)) == AUTO


def is_file(mode: str) -> bool:
    """True if a mode is the path of a schedule file, which has these numbers."""
    if _plain(mode) in _NAMES:
        return False
    return mode.endswith(".json") or Path(mode).is_file()
