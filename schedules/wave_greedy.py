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
from heapq import heapify, heappop, heappush

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
    n_stages = problem.n_stages
    time, change, delay = problem.time, problem.change, problem.delay
    stage_of, numbers = problem.stage, problem.numbers
    unit = max(problem.work) / m or 1.0
    tiny = 1e-9 * unit
    limit = [one * (1 + 1e-9) for one in problem.memory.limit]
    ranks, shift = knobs.ranks, knobs.shift
    bonus = knobs.alternate
    last = 2 * n_chunks - 1
    arrived: list[list[float]] = [[] for _ in range(last + 1)]
    arrived[0] = [0.0] * m
    done = [0] * (last + 1)
    free = [0.0] * n_stages
    held = [0.0] * n_stages
    slack = [below - one - tiny for one in problem.work]
    start = [-1.0] * n_stages
    was_forward = [False] * n_stages
    pending: list[list[int]] = [[] for _ in range(n_stages)]
    weights_done = [0] * n_stages
    rows: list[list[int]] = [[] for _ in range(n_stages)]
    heap = [(0.0, stage) for stage in range(n_stages)]
    heapify(heap)
    unknown = float("inf")

    while heap:
        now, stage = heappop(heap)
        if now < free[stage]:
            continue
        soon = now + tiny
        mine = numbers[stage]
        ready: list[tuple[float, int]] = []
        coming: list[tuple[float, float, int]] = []
        starved = False
        room = limit[stage] - held[stage]
        whole = done[mine[len(mine) // 2]]
        need = unknown
        for q in mine:
            i = done[q]
            queue = arrived[q]
            if i >= len(queue):
                continue
            arrival = queue[i]
            if q < n_chunks:
                if q == mine[0] and i - done[mine[-1]] >= knobs.caps[stage]:
                    continue
                if need == unknown:
                    need = _reserve(mine, done, change, whole)
                take = need if i == whole else need + change[q]
                take = max(take, change[q])
                if take > room:
                    starved = starved or arrival <= soon
                    continue
                rank = ranks[q][i] + shift[q]
                if bonus and was_forward[stage]:
                    rank += bonus
            else:
                rank = ranks[q][i] + shift[q]
                if bonus and not was_forward[stage]:
                    rank += bonus
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
                    b_from = end - knobs.hold[stage] * time[q] - tiny
                    f_from = end - knobs.hold_later[stage] * time[q] - tiny
                    for arrival, other_rank, other in coming:
                        last_start = b_from if other >= n_chunks else f_from
                        if other_rank < rank and other > q and arrival < last_start:
                            break
                    else:
                        chosen = q
                        break
            else:
                chosen = min(ready)[1]
        if chosen < 0:
            queue_w = pending[stage]
            n_done = weights_done[stage]
            if n_done < len(queue_w):
                q = queue_w[n_done]
                if not starved and coming:
                    tail = done[mine[0]] == m
                    share = knobs.late_tail[stage] if tail else knobs.late[stage]
                    if now + time[q] * (1 - share) > min(coming)[0] + tiny:
                        continue
                chosen = q
                weights_done[stage] = n_done + 1
            else:
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
        heappush(heap, (end, stage))
        if chosen <= last:
            done[chosen] += 1
            was_forward[stage] = chosen < n_chunks
            if chosen >= n_chunks and stage not in problem.joint:
                pending[stage].append(chosen + n_chunks)
            if chosen < last:
                target = stage_of[chosen + 1]
                arrival = end + delay[chosen]
                arrived[chosen + 1].append(arrival)
                if target != stage and arrival >= free[target]:
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
