"""Time rows of passes as they are, W's included."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from zbpp.schedules.planner.multi.problem import PlacementProblem, Plan, Rows

__all__ = ["Times", "retime", "rows_by_starts", "starts_of", "time_again", "time_rows"]


@dataclass(frozen=True)
class Times:
    """Starts of all passes, row by row, and the end of each stage.

    ``begins[q]`` lists the same starts by number, in the order of the micro-batches.
    """

    starts: list[list[float]]
    ends: list[float]
    begins: list[list[float]]

    @cached_property
    def spans(self) -> list[float]:
        """Per stage the time from its first start to its end."""
        return [end - row[0] for row, end in zip(self.starts, self.ends, strict=True)]

    @cached_property
    def span(self) -> float:
        """The largest of them."""
        return max(self.spans)


def time_rows(problem: PlacementProblem, rows: Sequence[Sequence[int]]) -> Times | None:
    """Start every pass as early as its row allows; None if they come to a deadlock.

    The memory is not looked at: it depends on the order alone.
    """
    return time_again(problem, rows)[0]


def starts_of(problem: PlacementProblem, plan: Plan) -> list[list[float]]:
    """List the starts of a plan's F's and B's, by number and micro-batch."""
    times = time_rows(problem, plan.rows)
    assert times is not None
    return times.begins[: 2 * problem.n_chunks]


def rows_by_starts(
    problem: PlacementProblem, starts: Sequence[Sequence[float]]
) -> Rows:
    """Order the F's and B's of every stage by starts, as `starts_of` lists them."""
    return [
        [q for _, q in sorted((start, q) for q in numbers for start in starts[q])]
        for numbers in problem.numbers
    ]


def time_again(
    problem: PlacementProblem,
    rows: Sequence[Sequence[int]],
    *,
    known: Times | None = None,
    since: float = 0.0,
    most: float = math.inf,
) -> tuple[Times | None, int]:
    """Time rows of which those passes have times already that start before ``since``.

    A pass starts no earlier than those that it waits for. So where rows differ in
    passes that start then or later, all earlier ones start as they did.

    A stage runs until it lacks an input; whoever computes that input wakes it. None if
    all stages lack one, or as soon as the span of a stage is sure to exceed ``most``.

    Returns:
        The times, and the number of passes that were timed.
    """
    n_stages, last = problem.n_stages, 2 * problem.n_chunks - 1
    time, delay, stage_of = problem.time, problem.delay, problem.stage
    if known is None:
        begins: list[list[float]] = [[] for _ in range(3 * problem.n_chunks)]
        starts: list[list[float]] = [[] for _ in range(n_stages)]
    else:
        begins = [one[: bisect_left(one, since)] for one in known.begins]
        starts = [one[: bisect_left(one, since)] for one in known.starts]
    slack = [most - one + problem.tiny for one in problem.work]
    for q, begun in enumerate(begins):
        slack[stage_of[q]] += len(begun) * time[q]
    ends = [0.0] * n_stages
    for stage, begun in enumerate(starts):
        if begun:
            ends[stage] = begun[-1] + time[rows[stage][len(begun) - 1]]
            slack[stage] -= ends[stage] - begun[0]
    awake = list(range(n_stages))
    is_awake = [True] * n_stages
    n_timed = 0
    while awake:
        stage = awake.pop()
        is_awake[stage] = False
        row, begun, now = rows[stage], starts[stage], ends[stage]
        n_before = len(begun)
        for at in range(n_before, len(row)):
            q = row[at]
            mine = begins[q]
            if 0 < q <= last:
                before = begins[q - 1]
                if len(mine) >= len(before):
                    break
                # The rule of core/clock.py, inlined for speed
                arrival = before[len(mine)] + time[q - 1] + delay[q - 1]
                if arrival > now:
                    if at:
                        slack[stage] -= arrival - now
                        if slack[stage] < 0:
                            return None, n_timed + at - n_before
                    now = arrival
            begun.append(now)
            mine.append(now)
            now += time[q]
            if q < last:
                target = stage_of[q + 1]
                if not is_awake[target] and len(begins[q + 1]) == len(mine) - 1:
                    at_other, other = len(starts[target]), rows[target]
                    if (
                        target != stage
                        and at_other < len(other)
                        and other[at_other] == q + 1
                    ):
                        is_awake[target] = True
                        awake.append(target)
        n_timed += len(begun) - n_before
        ends[stage] = now
    if any(len(begun) < len(row) for begun, row in zip(starts, rows, strict=True)):
        return None, n_timed
    return Times(starts, ends, begins), n_timed


def retime(problem: PlacementProblem, plan: Plan) -> Plan:
    """Let every pass of a valid plan start as early as it can."""
    times = time_rows(problem, plan.rows)
    assert times is not None
    return Plan(times.span, plan.rows)
