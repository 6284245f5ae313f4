"""Words about plans that take long: before, and about the time's use."""

from zbpp.schedules.planner.budget import parse_effort
from zbpp.schedules.planner.compiled.library import library

__all__ = ["gain_line", "waiting_line"]

_LEAST_S = 15.0
_US_A_JOB = (3.0, 12.0)
"""With one chunk a stage or several; effort fast, the larger plans, loops in C."""


def waiting_line(n_jobs: int, chunks_per_stage: int, effort: str) -> str | None:
    """Say how long a plan of some jobs will take about; None if that is not long.

    >>> waiting_line(12, 1, "best:30")
    'planning 12 jobs, 30 s of CPU time beyond effort default'
    """
    kind, seconds = parse_effort(effort)
    each = _US_A_JOB[chunks_per_stage > 1]
    about = n_jobs * each * 1e-6 * (1 if kind == "fast" else 3)
    if kind == "best":
        more = f"{seconds:g} s of CPU time beyond effort default"
        return f"planning {n_jobs:,} jobs, {more}"
    if about < _LEAST_S:
        return None
    least = "about" if library is not None else "without a C compiler more than"
    hint = "" if kind == "fast" else "; effort fast takes a third of it"
    return f"planning {n_jobs:,} jobs, {least} {about:.0f} s{hint}"


def gain_line(span: float, before: float, effort: str) -> str:
    """Say what effort best has found beyond effort default.

    >>> gain_line(98.0, 100.0, "best:30")
    'best:30: span 98, 2.00% shorter than with effort default'
    """
    if span < before * (1 - 1e-9):
        return (
            f"{effort}: span {span:.6g}, {1 - span / before:.2%} shorter than with "
            "effort default"
        )
    return f"{effort}: span {span:.6g}, nothing shorter than with effort default"
