"""The text form of jobs, orders and timelines, for docs, tests, files and errors."""

import re
from collections.abc import Sequence

from zbpp.core.errors import RequestError
from zbpp.core.jobs import Check, Job, Pass, PassKind, Step
from zbpp.core.timeline import Timeline

__all__ = ["draw", "format_job", "grid", "parse_job"]

_PASS = re.compile(r"(0|[1-9][0-9]{0,8})(F|BW|B|W)(0|[1-9][0-9]{0,8})")
_CONTEXT = 6  # columns shown on each side of a marked one


def parse_job(text: object, *, stage: int) -> Job:
    """Read one job of a stage: ``3BW7`` = chunk 3, B and W, micro-batch 7.

    >>> parse_job("3BW7", stage=0)
    Pass(kind=<PassKind.BW: 'BW'>, chunk=3, microbatch=7)

    Raises:
        RequestError: the text names no job.
    """
    if text == "O":
        return Step(stage)
    if text == "V":
        return Check(stage)
    match = _PASS.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise RequestError(
            f"{text!r} is not a job; write <chunk><F|B|W|BW><micro-batch> such as "
            "3BW7, O (optimizer step) or V (post-validation)"
        )
    return Pass(PassKind(match[2]), int(match[1]), int(match[3]))


def format_job(job: Job, *, with_chunk: bool = True) -> str:
    """Write a job; pictures of one chunk a stage leave the chunk out.

    >>> format_job(Pass(PassKind.F, 1, 3), with_chunk=False)
    'F3'
    """
    if isinstance(job, Pass) and not with_chunk:
        return f"{job.kind}{job.microbatch}"
    return str(job)


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


def draw(timeline: Timeline, *, unit: float = 1.0) -> str:
    """Draw a timeline: one cell is ``unit`` of time, ``.`` is idle, ``-`` goes on.

    Starts and ends are rounded to whole cells; jobs shorter than half a cell vanish.
    A V that vanishes is written in front of the job after it: ``VB0``.
    """
    with_chunk = timeline.placement.n_chunks > timeline.placement.n_stages
    starts = [slot.start for row in timeline.rows for slot in row]
    origin = min(starts, default=0.0)
    rows = []
    for slots in timeline.rows:
        cells: list[str] = []
        check = ""
        for slot in slots:
            start = round((slot.start - origin) / unit)
            end = round((slot.end - origin) / unit)
            if end > start:
                cells += ["."] * (start - len(cells))
                cells.append(check + format_job(slot.job, with_chunk=with_chunk))
                cells += ["-"] * (end - start - 1)
                check = ""
            elif isinstance(slot.job, Check):
                check = str(slot.job)
        rows.append(cells)
    width = max((len(cell) for row in rows for cell in row), default=1)
    number = len(str(len(rows) - 1))
    return "\n".join(
        f"{stage:{number}} | " + " ".join(cell.ljust(width) for cell in row).rstrip()
        for stage, row in enumerate(rows)
    )
