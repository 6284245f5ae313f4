"""One list schedule on two lanes a stage.

All stages are simulated at once. A lane that is free takes, of the parts that are ready
on it, the one with the least rank: the next part of a pass in flight, or the first one
of a pass whose input has arrived, where the rules and the memory admit it.

    compute  0F0.0        0F1.0 0F0.2     0F1.2        F1 starts while F0 exchanges data
    network        0F0.1~       0F1.1~ 0F0.3~

A W waits until nothing else can go and its next part ends before anything else comes,
but for a tolerance; or until memory is short, or too many W's wait.

An F is admitted only if, when all W's that wait are done, its chunk fits beside the
chunks that the first micro-batch without all its F's still needs: so that one can take
all its passes, and no limit that holds one micro-batch ends in a deadlock.
"""

import ctypes
import math
from array import array
from itertools import accumulate, chain, pairwise

from zbpp.schedules.planner.compiled.binding import (
    Structure,
    check,
    doubles,
    kept,
    loops,
    pointer,
    whole,
)
from zbpp.schedules.planner.lanes.problem import LaneProblem, LaneRules, Rows

__all__ = ["list_schedule", "list_span"]


def list_schedule(
    problem: LaneProblem, rules: LaneRules, *, below: float = math.inf
) -> tuple[float, Rows] | None:
    """Make rows of parts; None if a stage's idle time rules a span of ``below`` out.

    Returns:
        The longest span of a stage, and the rows.
    """
    run = _in_c(problem, rules, below)
    if run is None:
        return None
    span, parts, microbatches = run
    rows = [
        list(zip(parts[begin:end], microbatches[begin:end], strict=True))
        for begin, end in pairwise(problem.row_from)
    ]
    return span, rows


def list_span(problem: LaneProblem, rules: LaneRules, *, below: float) -> float:
    """The longest span of `list_schedule`; infinite where that gives None."""
    run = _in_c(problem, rules, below)
    return math.inf if run is None else run[0]


def _in_c(
    problem: LaneProblem, rules: LaneRules, below: float
) -> "tuple[float, array[int], array[int]] | None":
    """Schedule in C; return the span, and the rows end to end."""
    settings = Structure(
        rank=doubles(rules.rank),
        cap=whole(rules.cap),
        most_f=whole(rules.most_f),
        most_b=whole(rules.most_b),
        most_w=whole(rules.most_w),
        tolerance=doubles(rules.tolerance),
        tail=doubles(rules.tail),
        go_on=float(rules.go_on),
        most=rules.most,
    )
    row_from = whole(problem.row_from)
    parts, microbatches = (array("q", bytes(8 * row_from[-1])) for _ in "pm")
    span = ctypes.c_double()
    is_done = check(
        loops().zbpp_schedule_lanes(
            kept(problem, _flatten).address,
            settings.address,
            ctypes.c_double(below),
            pointer(row_from),
            pointer(parts),
            pointer(microbatches),
            ctypes.byref(span),
        )
    )
    return (span.value, parts, microbatches) if is_done else None


def _flatten(problem: LaneProblem) -> Structure:
    """`Lanes` of lane_scheduler.c."""
    base = problem.base
    return Structure(
        n_microbatches=base.n_microbatches,
        n_chunks=base.n_chunks,
        n_stages=base.n_stages,
        round=float(problem.round),
        first=whole(problem.first),
        lane=whole(problem.lane),
        time=doubles(problem.time),
        source=whole(problem.source),
        delay=doubles(base.delay),
        change=doubles(base.change),
        stage=whole(base.stage),
        held=whole(chain.from_iterable(base.numbers)),
        held_from=whole(accumulate(map(len, base.numbers), initial=0)),
        room=doubles(base.forward_limits),
    )
