"""The list scheduler of a line of stages: one event loop, four rules per stage.

A heap holds when each stage has to decide next. A pass is never interrupted, so when
it starts, the arrival of what it sends is known: a stage looks ahead to the next
input of its F and gradient of its B. Then, with n micro-batches between F and B:

    1. F, if it is ready, fits, and n is below ``ahead`` or F ends before the next B;
       or ``early`` times even if it puts off a B;
    2. else B, if it is ready and fits;
    3. else W, if it ends before the next F or B; or ends late by at most ``late`` of
       itself, and all late ends together by at most ``slack``; or, where rules are
       fair, if waiting would make this stage the one that has waited longest; or if F
       or B lacks memory;
    4. else sleep until an input arrives.

F fits if its peak does, and if after it all that is in flight can come back: the W's,
then each B with its W. So no stage can be stuck if its limit holds one micro-batch:
with none in flight and no W left, F fits; else B fits as soon as the W's are done, and
it comes, for the stage below is not stuck either, and the last stage waits for none.
"""

import math
from dataclasses import dataclass
from heapq import heappop, heappush, heappushpop

from zbpp.schedules.planner.single.problem import B, F, Kinds, Line, W

__all__ = ["Rules", "Run", "list_schedule_line"]

_MARGIN = 1e-9  # relative, for sums of times and of memory


@dataclass(frozen=True)
class Rules:
    """Settings of the four rules, one entry per stage."""

    ahead: tuple[int, ...]
    early: tuple[int, ...]
    late: tuple[float, ...]
    slack: tuple[float, ...]
    is_fair: bool = False
    """For all stages: the paper's rule for gaps smaller than W."""


@dataclass(frozen=True)
class Run:
    """Orders and their largest span; a run that was cut has none, and no span."""

    kinds: Kinds
    span: float
    n_steps: int
    """Passes that were placed, whether cut or not: the work it took."""


def list_schedule_line(line: Line, rules: Rules, *, cut: float = math.inf) -> Run:
    """Plan once; give up as soon as the largest span is sure to exceed ``cut``.

    One long loop over local names, in the order of the rules; what does not change from
    pass to pass is computed once per line. Choosing in a function costs 20 %.
    """
    p, m = line.n_stages, line.n_microbatches
    f_time, b_time, w_time, works = line.f, line.b, line.w, line.works
    f_room, b_room = line.forward_room, line.backward_room
    eps = _MARGIN * (max(works) / m)
    idle_left = [cut - work + eps for work in works]
    idle = [0.0] * p
    most_idle = -math.inf if rules.is_fair else math.inf  # over all stages
    ahead, early = rules.ahead, list(rules.early)
    late = [share * time for share, time in zip(rules.late, w_time, strict=True)]
    slack = list(rules.slack)
    splits, hop, last = line.splits, line.hop, p - 1

    inputs: list[list[float]] = [[] for _ in range(p)]  # when each F's input arrives
    inputs[0] = [0.0] * m
    gradients: list[list[float]] = [[] for _ in range(p)]  # and each B's
    n_f, n_b, n_w = [0] * p, [0] * p, [0] * p  # passes started
    free = [0.0] * p  # end of the last pass
    first = [0.0] * p
    wake = [0.0] + [math.inf] * last  # when the stage decides next
    kinds = [bytearray() for _ in range(p)]
    heap = [(0.0, 0)]
    n_steps = 0

    while heap:
        t, s = heappop(heap)
        while wake[s] == t:  # else it was woken earlier
            i, j, k = n_f[s], n_b[s], n_w[s]
            arrivals = inputs[s]
            next_f = arrivals[i] if i < len(arrivals) else math.inf
            arrivals = gradients[s]
            next_b = arrivals[j] if j < len(arrivals) else math.inf
            room = j - k <= f_room[s][i - j]
            # Rules 1 to 3: F, else B, else W.
            f_ready = next_f <= t
            kind = -1
            if (
                f_ready
                and room
                and (i - j < ahead[s] or (t < next_b and t + f_time[s] <= next_b + eps))
            ):
                kind = F
            elif f_ready and room and early[s] > 0:
                early[s] -= 1
                kind = F
            elif next_b <= t and j - k <= b_room[s][i - j]:
                kind = B
            elif j > k:
                horizon = next_b if f_ready or not room or next_b < next_f else next_f
                over = t + w_time[s] - horizon
                if over <= eps or (f_ready and not room) or next_b <= t:
                    kind = W
                elif over <= late[s] and over <= slack[s]:
                    slack[s] -= over
                    kind = W
                elif idle[s] + horizon - t > most_idle:
                    kind = W

            # Rule 4: sleep until something arrives.
            if kind < 0:
                wake[s] = next_b if f_ready or next_b < next_f else next_f
                if wake[s] < math.inf:
                    heappush(heap, (wake[s], s))
                break

            # Run what is chosen, or give up a plan that has become too long.
            if t > free[s]:
                if i:
                    idle[s] += t - free[s]
                    if idle[s] > most_idle:
                        most_idle = idle[s]
                    if idle[s] > idle_left[s]:
                        return Run([], math.inf, n_steps)
                else:
                    first[s] = t
            n_steps += 1
            kinds[s].append(kind)
            # The rule of core/clock.py, inlined for speed
            if kind == F:
                n_f[s] = i + 1
                end = t + f_time[s]
                if s == last:
                    gradients[s].append(end)
                else:
                    other = s + 1
                    arrival = end + hop[s]
                    inputs[other].append(arrival)
                    if free[other] < wake[other] > arrival:  # asleep
                        wake[other] = arrival
                        heappush(heap, (arrival, other))
            elif kind == B:
                n_b[s] = j + 1
                end = t + b_time[s]
                if not splits[s]:
                    n_w[s] = j + 1
                if s:
                    other = s - 1
                    arrival = end + hop[other]
                    gradients[other].append(arrival)
                    if free[other] < wake[other] > arrival:
                        wake[other] = arrival
                        heappush(heap, (arrival, other))
            else:
                n_w[s] = k + 1
                end = t + w_time[s]
            free[s] = end
            if n_w[s] == m:
                wake[s] = math.inf
                break
            wake[s] = end
            t, s = heappushpop(heap, (end, s))

    spans = [free[s] - first[s] for s in range(p)]
    return Run(kinds, max(spans), n_steps)
