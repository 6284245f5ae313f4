"""Place the W's of a plan whose F's and B's keep their order.

    0 | F0 F1 F2 .  B0 F3 B1 ...      given: the F's and B's of each stage
    0 | F0 F1 F2 .  B0 W0 F3 B1 ...   W's go where the stage waits, or memory lacks

A stage takes its next F or B as soon as it is ready. While it waits, it runs a pending
W, first in, first out, if the W ends before the next input arrives, or overruns it by
at most the share ``late`` of its time.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from zbpp.schedules.planner.multi.problem import PlacementProblem, Plan, Rows

__all__ = ["place_weights"]


def place_weights(
    problem: PlacementProblem,
    rows: Sequence[Sequence[int]],
    late: Sequence[float],
    below: float,
) -> Plan | None:
    """Add the W's to rows of F's and B's.

    None if the order comes to a deadlock, if it does not fit the memory, or as soon
    as the span cannot be under ``below``.

    One long loop over local names: see `list_schedule` for what a call per pass costs.
    """
    m, n_chunks, n_stages = problem.n_microbatches, problem.n_chunks, problem.n_stages
    time, change, delay = problem.time, problem.change, problem.delay
    stage_of, needs = problem.stage, problem.needs
    tiny, limit, joint = problem.tiny, problem.limits, problem.joint
    last = 2 * n_chunks - 1
    arrived: list[list[float]] = [[] for _ in range(last + 1)]
    arrived[0] = [0.0] * m
    done = [0] * (last + 1)
    free = [0.0] * n_stages
    held = [0.0] * n_stages
    slack = [below - one - tiny for one in problem.work]
    start = [-1.0] * n_stages
    place = [0] * n_stages
    length = [len(row) for row in rows]
    pending: list[list[int]] = [[] for _ in range(n_stages)]
    weights_done = [0] * n_stages
    result: Rows = [[] for _ in range(n_stages)]
    heap = [(0.0, stage) for stage in range(n_stages)]
    heapify(heap)

    while heap:
        now, stage = heappop(heap)
        if now < free[stage]:
            continue
        # The next F or B of the row, if it has arrived and fits.
        chosen = -1
        coming = -1.0
        at = place[stage]
        if at < length[stage]:
            q = rows[stage][at]
            queue = arrived[q]
            i = done[q]
            if i < len(queue):
                arrival = queue[i]
                if held[stage] + needs[q] > limit[stage]:
                    pass  # only a W can make room
                elif arrival <= now + tiny:
                    chosen = q
                    done[q] = i + 1
                    place[stage] = at + 1
                else:
                    coming = arrival
        # Else a W, if it does not delay that pass by too much.
        if chosen < 0:
            n_done = weights_done[stage]
            if n_done == len(pending[stage]):
                continue
            q = pending[stage][n_done]
            if coming >= 0 and now + time[q] * (1 - late[stage]) > coming + tiny:
                continue
            chosen = q
            weights_done[stage] = n_done + 1
        if start[stage] < 0:
            start[stage] = now
        else:
            slack[stage] -= now - free[stage]
            if slack[stage] < 0:
                return None
        # The rule of core/clock.py, inlined for speed
        end = now + time[chosen]
        free[stage] = end
        held[stage] += change[chosen]
        result[stage].append(chosen)
        heappush(heap, (end, stage))
        if chosen <= last:
            if chosen >= n_chunks and stage not in joint:
                pending[stage].append(chosen + n_chunks)
            if chosen < last:
                target = stage_of[chosen + 1]
                arrival = end + delay[chosen]
                arrived[chosen + 1].append(arrival)
                if target != stage and arrival >= free[target]:
                    heappush(heap, (arrival, target))
    if place != length:
        return None
    return Plan(max(f - s for f, s in zip(free, start, strict=True)), result)
