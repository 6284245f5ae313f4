"""Time rows of passes as they are, W's included."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from zbpp.schedules.planner.multi.problem import PlacementProblem, Plan

__all__ = ["Times", "retime", "time_rows"]


@dataclass(frozen=True)
class Times:
    """Starts of all passes, row by row, and the end of each stage.

    ``arrived[q]`` lists when the inputs of number q are there, by micro-batch.
    """

    starts: list[list[float]]
    ends: list[float]
    arrived: list[list[float]]

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

    The memory is not looked at: it depends on the order alone. A stage runs until it
    lacks an input; whoever computes that input wakes it.
    """
    n_stages, last = problem.n_stages, 2 * problem.n_chunks - 1
    time, delay, stage_of = problem.time, problem.delay, problem.stage
    arrived: list[list[float]] = [[] for _ in range(last + 2)]
    arrived[0] = [0.0] * problem.n_microbatches
    done = [0] * (last + 1)
    starts: list[list[float]] = [[] for _ in range(n_stages)]
    ends = [0.0] * n_stages
    awake = list(range(n_stages))
    while awake:
        stage = awake.pop()
        row, begun, now = rows[stage], starts[stage], ends[stage]
        for at in range(len(begun), len(row)):
            q = row[at]
            if q <= last:
                i = done[q]
                queue = arrived[q]
                if i >= len(queue):
                    break
                done[q] = i + 1
                arrival = queue[i]
                # The rule of core/clock.py, inlined for speed
                if arrival > now:
                    now = arrival
            begun.append(now)
            now += time[q]
            if q < last:
                queue = arrived[q + 1]
                target = stage_of[q + 1]
                if target != stage and done[q + 1] == len(queue):
                    at_other = len(starts[target])
                    other = rows[target]
                    if at_other < len(other) and other[at_other] == q + 1:
                        awake.append(target)
                queue.append(now + delay[q])
        ends[stage] = now
    if any(len(begun) < len(row) for begun, row in zip(starts, rows, strict=True)):
        return None
    return Times(starts, ends, arrived)


def retime(problem: PlacementProblem, plan: Plan) -> Plan:
    """Let every pass of a valid plan start as early as it can."""
    times = time_rows(problem, plan.rows)
    assert times is not None
    return Plan(times.span, plan.rows)
