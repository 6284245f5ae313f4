"""The list scheduler: one simulation of all stages that decides as it goes.

A stage is asked for its next pass when it becomes free or when an input reaches it.
Passes are never interrupted, so the arrival of an input is known as soon as its
producer *starts*: every rule below looks that far ahead.

1. Of the F's and B's that are ready, take the one with the smallest priority. It
   grows by the work of one micro-batch from micro-batch to micro-batch, and along the
   chain by the time on the way; `Settings.shift` moves it per number.
2. An F is not ready while memory lacks (see below), or if it would delay a better pass
   that is known to come: a B by more than the share ``hold`` of the F's time, or an F
   of a later chunk by more than ``hold_later``. Nor is the stage's first F ready while
   `Settings.caps` micro-batches are in flight, or while `Settings.fresh` of them have
   had no B on the stage.
3. Else take a W, if it ends before the next known input, or overruns it by at most
   ``late`` of its time (``late_tail`` when the stage has no first F left), or if an F
   or a B lacks only memory.
4. Else sleep until an input arrives.

No deadlock, for every limit that holds one micro-batch: an F is admitted only if
after it the first micro-batch with no B on this stage could still run all its F's,
once those before it have given back what they hold. It then comes to its B's, and
when it is through, it leaves as much memory as the next one may need.

Passes with peaks, and B's that add memory, need room beside that: as much as the most
of them is left free by every F (`PlacementProblem.forward_limits`). Where the limit is
too low for this, an F is admitted if all that is in flight could come home after it,
the W's first, then one micro-batch after the other. A B waits for W's if it, or a W
after it, would not fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from zbpp.schedules.planner.budget import Budget
from zbpp.schedules.planner.multi.home import comes_home
from zbpp.schedules.planner.multi.problem import PlacementProblem, Plan

__all__ = ["Settings", "chain_offsets", "list_schedule"]


@dataclass(frozen=True)
class Settings:
    """Priorities and limits of one run; lists have one entry per stage.

    ``ranks`` has one entry per number of the chain and micro-batch, in the unit of the
    times: smaller comes first; ``shift`` is added to all of a number. ``alternate`` is
    in the same unit and is added to the class, F or B, that ran last.
    """

    caps: tuple[int, ...]
    fresh: tuple[int, ...]
    ranks: Sequence[Sequence[float]]
    shift: tuple[float, ...]
    late: tuple[float, ...]
    late_tail: tuple[float, ...]
    hold: tuple[float, ...]
    hold_later: tuple[float, ...]
    alternate: float = 0.0


def list_schedule(
    problem: PlacementProblem, settings: Settings, below: float, budget: Budget
) -> Plan | None:
    """Plan by the rules above; None as soon as the span cannot be under ``below``.

    The passes that it placed are spent from the budget.

    One long loop over local names, in the order of the rules: what does not change
    from pass to pass is computed once per problem, and what is seldom needed stands in
    functions. Choosing in a function of its own costs 5 to 9 % of the time of a plan.
    """
    m, n_chunks = problem.n_microbatches, problem.n_chunks
    n_stages = problem.n_stages
    time, change, delay = problem.time, problem.change, problem.delay
    stage_of, numbers = problem.stage, problem.numbers
    tiny, limit, joint = problem.tiny, problem.forward_limits, problem.joint
    peaked, needs, full = not problem.is_plain, problem.needs, problem.limits
    whole, ample = problem.all_forwards, problem.ample
    first_b = [own[len(own) // 2] for own in numbers]
    caps, fresh, bonus = settings.caps, settings.fresh, settings.alternate
    hold, later = settings.hold, settings.hold_later
    ranks = [
        [rank + shift for rank in row] if shift else row
        for row, shift in zip(settings.ranks, settings.shift, strict=True)
    ]
    late, late_tail = settings.late, settings.late_tail
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
    pending: list[list[int]] = [[] for _ in range(n_stages)]
    weights_done = [0] * n_stages
    rows: list[list[int]] = [[] for _ in range(n_stages)]
    wake = [unknown] * n_stages  # when the stage decides next
    wake[stage_of[0]] = 0.0
    heap = [(0.0, stage_of[0])]

    while heap:
        now, stage = heappop(heap)
        if wake[stage] != now:  # it was woken earlier
            continue
        # Rules 1 and 2: of the F's and B's that may go, the one of smallest rank.
        soon = now + tiny
        mine = numbers[stage]
        known: list[tuple[float, float, int]] = []  # rank, arrival, number
        chosen = -1
        best = best_coming = soonest = unknown
        starved = False
        back = done[first_b[stage]]
        room = limit[stage] - held[stage]
        if room >= ample[stage]:
            need = -1.0
        elif (back - done[mine[-1]]) * change[mine[0]] >= whole[stage]:
            need = 0.0
        else:
            need = max(0.0, _reserve(mine, done, change, back))
        f_extra = bonus if was_forward[stage] else 0.0
        b_extra = bonus - f_extra
        for q in mine:
            arrival = following[q]
            if arrival == unknown:
                continue
            i = done[q]
            if q < n_chunks:
                if q == mine[0] and (
                    i - done[mine[-1]] >= caps[stage] or i - back >= fresh[stage]
                ):
                    continue
                if (
                    need >= 0
                    and (
                        change[q] > room
                        or (need if i == back else need + change[q]) > room
                    )
                    and (
                        limit[stage] >= 0
                        or not comes_home(
                            problem,
                            q,
                            held[stage],
                            done,
                            pending[stage][weights_done[stage] :],
                        )
                    )
                ):
                    starved = starved or arrival <= soon
                    continue
                rank = ranks[q][i] + f_extra
            else:
                if (
                    peaked
                    and held[stage] + needs[q] > full[stage]
                    and weights_done[stage] < len(pending[stage])
                ):
                    starved = starved or arrival <= soon
                    continue
                rank = ranks[q][i] + b_extra
            known.append((rank, arrival, q))
            if arrival > soon:
                best_coming = min(best_coming, rank)
                soonest = min(soonest, arrival)
            elif rank < best:
                best, chosen = rank, q
        if 0 <= chosen < n_chunks and best_coming < best:
            chosen = _hold_back(
                known, now, tiny, time, n_chunks, hold[stage], later[stage]
            )
        # Rule 3: else a W, if the time or the memory asks for it.
        if chosen < 0 and weights_done[stage] < len(pending[stage]):
            q = pending[stage][weights_done[stage]]
            tail = done[mine[0]] == m
            share = late_tail[stage] if tail else late[stage]
            if starved or now + time[q] * (1 - share) <= soonest + tiny:
                chosen = q
                weights_done[stage] += 1
        # Rule 4: else sleep until something arrives.
        if chosen < 0:
            arrivals = [following[q] for q in mine if following[q] > soon]
            wake[stage] = min(arrivals, default=unknown)
            if wake[stage] < unknown:
                heappush(heap, (wake[stage], stage))
            continue
        # Run what is chosen, or give up a plan that has become too long.
        if start[stage] < 0:
            start[stage] = now
        else:
            slack[stage] -= now - free[stage]
        if slack[stage] < 0:
            budget.spend(sum(map(len, rows)))
            return None
        # The rule of core/clock.py, inlined for speed
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
            if chosen >= n_chunks and stage not in joint:
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


def _hold_back(
    known: Sequence[tuple[float, float, int]],
    now: float,
    tiny: float,
    time: Sequence[float],
    n_chunks: int,
    hold: float,
    hold_later: float,
) -> int:
    """Choose the best ready pass that delays no better one by too much; -1: none.

    ``known`` has the rank, the arrival and the number of each pass to choose from.
    """
    ranked = sorted(known)
    for rank, arrival, q in ranked:
        if arrival > now + tiny:
            continue
        if q >= n_chunks:
            return q
        b_from = now + (1 - hold) * time[q] - tiny
        f_from = now + (1 - hold_later) * time[q] - tiny
        for other_rank, other_arrival, other in ranked:
            if other_rank >= rank:
                return q
            last = b_from if other >= n_chunks else f_from
            if other > q and now + tiny < other_arrival < last:
                break
        else:
            return q
    return -1


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


def chain_offsets(problem: PlacementProblem) -> list[float]:
    """List the starts of the numbers of the chain if nothing waits."""
    offsets = [0.0]
    for q in range(2 * problem.n_chunks - 1):
        offsets.append(offsets[-1] + problem.time[q] + problem.delay[q])
    return offsets
