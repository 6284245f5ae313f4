"""The greedy planner: one simulation of all stages that decides as it goes.

A stage is asked for its next pass when it becomes free or when an input reaches it.
Passes are never interrupted, so the arrival of an input is known as soon as its
producer *starts*: every rule below looks that far ahead.

1. Of the F's and B's that are ready, take the one with the smallest priority. It
   grows by the work of one micro-batch from micro-batch to micro-batch, and along the
   chain by the time on the way; `Knobs.shift` moves it per number.
2. An F is not ready while memory lacks (see below), while `Knobs.caps` micro-batches
   are in flight (the stage's first F only), or if it would delay a better pass that is
   known to come: a B by more than the share ``hold`` of the F's time, or an F of a
   later chunk by more than ``hold_later``.
3. Else take a W, if it ends before the next known input, or overruns it by at most
   ``late`` of its time (``late_tail`` when the stage has no first F left), or if an F
   lacks only memory.
4. Else sleep until an input arrives.

No deadlock, for every limit that holds one micro-batch: an F is admitted only if
after it the first micro-batch with no B on this stage could still run all its F's,
once those before it have given back what they hold. It then comes to its B's, and
when it is through, it leaves as much memory as the next one may need.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from zbpp.schedules.effort import Budget
from zbpp.schedules.wave_problem import Plan, WaveProblem

__all__ = ["Knobs", "chain_offsets", "greedy"]


@dataclass(frozen=True)
class Knobs:
    """What a run of the greedy planner may vary; lists have one entry per stage.

    ``ranks`` has one entry per number of the chain and micro-batch, in the unit of the
    times: smaller comes first; ``shift`` is added to all of a number. ``alternate`` is
    in the same unit and is added to the class, F or B, that ran last.
    """

    caps: tuple[int, ...]
    ranks: Sequence[Sequence[float]]
    shift: tuple[float, ...]
    late: tuple[float, ...]
    late_tail: tuple[float, ...]
    hold: tuple[float, ...]
    hold_later: tuple[float, ...]
    alternate: float = 0.0


def greedy(
    problem: WaveProblem, knobs: Knobs, below: float, budget: Budget
) -> Plan | None:
    """Plan by the rules above; None as soon as the span cannot be under ``below``.

    The passes that it placed are spent from the budget.
    """
    m, n_chunks = problem.n_microbatches, problem.n_chunks
    n_stages, stages = problem.n_stages, range(problem.n_stages)
    time, change, delay = problem.time, problem.change, problem.delay
    stage_of, numbers = problem.stage, problem.numbers
    tiny = 1e-9 * (max(problem.work) / m or 1.0)
    limit = [one * (1 + 1e-9) for one in problem.memory.limit]
    forwards = [numbers[s][: len(numbers[s]) // 2] for s in stages]
    backwards = [numbers[s][len(numbers[s]) // 2 :] for s in stages]
    # With this much room an F fits whatever else is to come.
    ample = [
        sum(takes) + max(takes)
        for takes in ([change[q] for q in own] for own in forwards)
    ]
    splits = [stage not in problem.joint for stage in stages]
    caps, ranks, shift, bonus = knobs.caps, knobs.ranks, knobs.shift, knobs.alternate
    hold, hold_later = knobs.hold, knobs.hold_later
    late, late_tail = knobs.late, knobs.late_tail
    last = 2 * n_chunks - 1
    unknown = float("inf")
    arrived: list[list[float]] = [[] for _ in range(last + 2)]
    arrived[0] = [0.0] * m
    following = [0.0] + [unknown] * (last + 1)  # arrival of the next of each number
    done = [0] * (last + 1)
    free = [0.0] * n_stages
    held = [0.0] * n_stages
    slack = [below - one - tiny for one in problem.work]
    start = [-1.0] * n_stages
    was_forward = [False] * n_stages
    pending: list[list[int]] = [[] for _ in stages]
    weights_done = [0] * n_stages
    rows: list[list[int]] = [[] for _ in stages]
    wake = [unknown] * n_stages  # when the stage decides next
    wake[stage_of[0]] = 0.0
    heap = [(0.0, stage_of[0])]

    while heap:
        now, stage = heappop(heap)
        if wake[stage] != now:  # it was woken earlier
            continue
        soon = now + tiny
        mine = numbers[stage]
        ready: list[tuple[float, int]] = []
        coming: list[tuple[float, float, int]] = []
        starved = False
        room = limit[stage] - held[stage]
        need = -1.0 if room >= ample[stage] else unknown
        extra = bonus if was_forward[stage] else 0.0
        for q in forwards[stage]:
            arrival = following[q]
            if arrival == unknown:
                continue
            i = done[q]
            if q == mine[0] and i - done[mine[-1]] >= caps[stage]:
                continue
            if need >= 0:
                whole = done[backwards[stage][0]]
                if need == unknown:
                    need = max(0.0, _reserve(mine, done, change, whole))
                take = max(need if i == whole else need + change[q], change[q])
                if take > room:
                    starved = starved or arrival <= soon
                    continue
            rank = ranks[q][i] + shift[q] + extra
            if arrival <= soon:
                ready.append((rank, q))
            else:
                coming.append((arrival, rank, q))
        extra = bonus - extra
        for q in backwards[stage]:
            arrival = following[q]
            if arrival == unknown:
                continue
            rank = ranks[q][done[q]] + shift[q] + extra
            if arrival <= soon:
                ready.append((rank, q))
            else:
                coming.append((arrival, rank, q))
        chosen = -1
        if ready:
            if coming:
                best = min(coming, key=_rank)[1]
                ready.sort()
                for rank, q in ready:
                    if q >= n_chunks or rank <= best:
                        chosen = q
                        break
                    end = now + time[q]
                    b_from = end - hold[stage] * time[q] - tiny
                    f_from = end - hold_later[stage] * time[q] - tiny
                    for arrival, other_rank, other in coming:
                        last_start = b_from if other >= n_chunks else f_from
                        if other_rank < rank and other > q and arrival < last_start:
                            break
                    else:
                        chosen = q
                        break
            else:
                chosen = min(ready)[1]
        if chosen < 0 and weights_done[stage] < len(pending[stage]):
            q = pending[stage][weights_done[stage]]
            tail = done[mine[0]] == m
            share = late_tail[stage] if tail else late[stage]
            if (
                starved
                or not coming
                or now + time[q] * (1 - share) <= min(coming)[0] + tiny
            ):
                chosen = q
                weights_done[stage] += 1
        if chosen < 0:  # sleep until something arrives
            known = [following[q] for q in mine if following[q] > soon]
            wake[stage] = min(known, default=unknown)
            if wake[stage] < unknown:
                heappush(heap, (wake[stage], stage))
            continue
        if start[stage] < 0:
            start[stage] = now
        else:
            slack[stage] -= now - free[stage]
        if slack[stage] < 0:
            budget.spend(sum(map(len, rows)))
            return None
        end = now + time[chosen]
        free[stage] = end
        held[stage] += change[chosen]
        rows[stage].append(chosen)
        wake[stage] = end
        heappush(heap, (end, stage))
        if chosen <= last:
            i = done[chosen] = done[chosen] + 1
            queue = arrived[chosen]
            following[chosen] = queue[i] if i < len(queue) else unknown
            was_forward[stage] = chosen < n_chunks
            if chosen >= n_chunks and splits[stage]:
                pending[stage].append(chosen + n_chunks)
            if chosen < last:
                other = chosen + 1
                target = stage_of[other]
                arrival = end + delay[chosen]
                arrived[other].append(arrival)
                if following[other] == unknown:
                    following[other] = arrival
                if free[target] < wake[target] > arrival:  # asleep
                    wake[target] = arrival
                    heappush(heap, (arrival, target))
    budget.spend(sum(map(len, rows)))
    return Plan(max(f - s for f, s in zip(free, start, strict=True)), rows)


def _reserve(
    mine: Sequence[int],
    done: Sequence[int],
    change: Sequence[float],
    whole: int,
) -> float:
    """Memory that the first micro-batch with no B yet needs for its other F's.

    Less what the ones before it hold, for they give it back first.
    """
    need = 0.0
    for place in range(len(mine) // 2):
        forward, backward = mine[place], mine[-1 - place]
        if done[forward] <= whole:
            need += change[forward]
        need -= change[forward] * (whole - done[backward])
    return need


def chain_offsets(problem: WaveProblem) -> list[float]:
    """When each number of the chain starts if nothing waits."""
    offsets = [0.0]
    for q in range(2 * problem.n_chunks - 1):
        offsets.append(offsets[-1] + problem.time[q] + problem.delay[q])
    return offsets


def _rank(entry: Sequence[float]) -> float:
    return entry[1]
