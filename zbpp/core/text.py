"""The text form of jobs, orders and timelines, for docs, tests, files and errors."""

import re
from collections.abc import Sequence

from zbpp.core.errors import RequestError, ScheduleError
from zbpp.core.jobs import (
    KINDS,
    Check,
    Collective,
    CollectiveKind,
    Job,
    Lane,
    Pair,
    PairKind,
    Part,
    Pass,
    PassKind,
    StageKind,
    Step,
    kind_of,
    passes_in,
    place_of,
)
from zbpp.core.timeline import Slot, Timeline

_MOST_CELLS = 10**7
_CONTEXT = 6  # columns shown on each side of a marked one
_NUMBER = "(0|[1-9][0-9]{0,8})"
_PASSES, _OF_CHUNKS = "|".join(PassKind), "|".join(CollectiveKind)
_PASS = re.compile(f"{_NUMBER}({_PASSES}){_NUMBER}")
_PART = re.compile(rf"({_PASS.pattern})\.{_NUMBER}(~?)")
_OF_CHUNK = re.compile(f"{_NUMBER}({_OF_CHUNKS})")
_PAIR = re.compile(rf"\((\w+);(\w+)\){PairKind.FB}")


def parse_job(text: object, *, stage: int) -> Job:
    """Read one job of a stage: ``3BW7`` = chunk 3, B and W, micro-batch 7.

    >>> parse_job("3BW7", stage=0)
    Pass(kind=<PassKind.BW: 'BW'>, chunk=3, microbatch=7)

    Raises:
        RequestError: the text names no job.
    """
    word = text if isinstance(text, str) else ""
    if match := _PASS.fullmatch(word):
        return Pass(PassKind(match[2]), int(match[1]), int(match[3]))
    if match := _PART.fullmatch(word):
        of = Pass(PassKind(match[3]), int(match[2]), int(match[4]))
        return Part(of, int(match[5]), Lane.NETWORK if match[6] else Lane.COMPUTE)
    if match := _OF_CHUNK.fullmatch(word):
        return Collective(CollectiveKind(match[2]), int(match[1]))
    if match := _PAIR.fullmatch(word):
        forward, backward = (parse_job(part, stage=stage) for part in match.groups())
        if isinstance(forward, Pass) and isinstance(backward, Pass):
            return Pair(forward, backward)
    for of_stage in (Step, Check):
        if word == of_stage.kind:
            return of_stage(stage)
    of_stages = ", ".join(f"{kind} ({KINDS[kind].summary})" for kind in StageKind)
    raise RequestError(
        f"{text!r} is not a job; write <chunk><{_PASSES}><micro-batch> such as 3BW7, "
        f"{of_stages}, <chunk><{_OF_CHUNKS}>, or (<F>;<B or BW>){PairKind.FB}"
    )


def grid(
    rows: Sequence[Sequence[object]], *, mark: tuple[int, int] | None = None
) -> str:
    """Lay out orders, one row a stage; a mark crops the columns to those around it."""
    first, last = 0, max((len(row) for row in rows), default=0)
    if mark is not None:
        first = max(0, mark[1] - _CONTEXT)
        last = min(last, mark[1] + _CONTEXT + 1)
    shown = [[str(cell) for cell in row[first:last]] for row in rows]
    width = max((len(cell) for row in shown for cell in row), default=1)
    dots = "... " if first else ""
    lines = []
    for stage, row in enumerate(shown):
        head = f"stage {stage} | {dots}"
        cells = " ".join(cell.ljust(width) for cell in row)
        more = " ..." if len(rows[stage]) > last else ""
        lines.append((head + cells + more).rstrip())
        if mark is not None and mark[0] == stage:
            indent = len(head) + (mark[1] - first) * (width + 1)
            lines.append(" " * indent + "^" * width + " here")
    return "\n".join(lines)


def mistake(
    rows: Sequence[Sequence[object]], row: int, column: int, reason: str
) -> ScheduleError:
    """Name the place of a mistake and show it in the grid."""
    return ScheduleError(
        f"row {row}, column {column} (counted from 0): {reason}\n"
        + grid(rows, mark=(row, column))
    )


def draw(timeline: Timeline, *, unit: float = 1.0) -> str:
    """Draw a timeline: one cell is ``unit`` of time, ``.`` is idle, ``-`` continues.

    Starts and ends are rounded to whole cells; jobs shorter than half a cell vanish.
    A V that vanishes is written in front of the job after it: ``VB0``. Below a stage
    (``+``) is what runs during its jobs: ``U0`` gathers chunk 0 (UNSHARD), ``R0``
    adds up its gradients (REDUCE_GRAD), and a pass is there while it exchanges data.

    Raises:
        RequestError: the picture has more than ten million cells a stage.
    """
    lanes = timeline.collectives or ((),) * len(timeline.rows)
    slots = [slot for row in (*timeline.rows, *lanes) for slot in row]
    origin = min((slot.start for slot in slots), default=0.0)
    n_cells = (max((slot.end for slot in slots), default=0.0) - origin) / unit
    if not n_cells <= _MOST_CELLS:
        raise RequestError(
            f"a picture of {n_cells:.3g} cells a stage; take a unit above {unit:g}, so "
            f"that they are at most {_MOST_CELLS:,}"
        )
    number = len(str(len(timeline.rows) - 1))
    rows: list[tuple[str, list[str]]] = []
    for stage, (row, lane) in enumerate(zip(timeline.rows, lanes, strict=True)):
        rows.append((f"{stage:{number}} |", _cells(row, timeline, origin, unit)))
        if cells := _cells(lane, timeline, origin, unit):
            rows.append((f"{'':{number}} +", cells))
    width = max((len(cell) for _, row in rows for cell in row), default=1)
    return "\n".join(
        f"{head} " + " ".join(cell.ljust(width) for cell in row).rstrip()
        for head, row in rows
    )


def _cells(
    slots: Sequence[Slot], timeline: Timeline, origin: float, unit: float
) -> list[str]:
    """Cells of one line of a drawing."""
    with_chunk = timeline.placement.n_chunks > timeline.placement.n_stages
    cells: list[str] = []
    check = ""
    for slot in slots:
        start = round((slot.start - origin) / unit)
        end = round((slot.end - origin) / unit)
        if end > start:
            cells += ["."] * (start - len(cells))
            cells.append(check + _name(slot.job, with_chunk=with_chunk))
            cells += ["-"] * (end - start - 1)
            check = ""
        elif isinstance(slot.job, Check):
            check = str(slot.job)
    return cells


def _name(job: Job, *, with_chunk: bool) -> str:
    """Write a job; pictures of one chunk a stage leave the chunk out."""
    if isinstance(job, Pair):
        return "&".join(_name(part, with_chunk=with_chunk) for part in passes_in(job))
    if isinstance(job, Part):
        return _name(job.of, with_chunk=with_chunk)
    if kind_of(job).is_async:
        return f"{job.kind[0]}{place_of(job)}"
    if isinstance(job, Pass) and not with_chunk:
        return f"{job.kind}{job.microbatch}"
    return str(job)
