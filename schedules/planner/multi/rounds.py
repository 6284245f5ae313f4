"""Plan a V in rounds: in each, every stage runs one B and one F.

    head      one F of chunk 0 on each stage; from the last stage up as many more as
              memory and the time before the stage's first F of chunk 1 allow
    balance   no stage has fewer F's than the one before it; the chunks alternate
    rounds    one B and one F a stage, of the chunk that is ready, until all are done

W's fill the gaps that hold them, and give memory back where it is full. A gap smaller
than W is filled too if waiting would make the stage's idle time the longest of all so
far. So plans ZB-V (Qi et al., arXiv 2401.10241, section 6). Ours differs:

* The B of chunk 1 goes first only if it is there before that of chunk 0, or at once.
* The F of chunk 1 goes only if it is there at once, else that of chunk 0 if it is there
  earlier and memory stays for one more.
"""

from zbpp.schedules.planner.multi.problem import PlacementProblem, Plan, Rows

__all__ = ["plan_rounds"]


class _Draft:
    """A growing plan: the clocks, memories and counts of all stages."""

    def __init__(self, problem: PlacementProblem):
        p, m = problem.n_stages, problem.n_microbatches
        self.problem = problem
        self.tiny, self.limit = problem.tiny, problem.limits
        self.rows: Rows = [[] for _ in range(p)]
        self.starts = [0.0] * p
        self.free, self.held, self.idle = [0.0] * p, [0.0] * p, [0.0] * p
        self.most_idle = 0.0
        self.arrived: list[list[float]] = [[] for _ in range(4 * p + 1)]
        self.arrived[0] = [0.0] * m
        self.done = [0] * (4 * p)
        self.pending: list[list[int]] = [[] for _ in range(p)]
        self.n_weights = [0] * p

    def arrival(self, q: int) -> float:
        """Time at which the next pass of a number can start; infinite if not known."""
        i, queue = self.done[q], self.arrived[q]
        return queue[i] if i < len(queue) else float("inf")

    def weight(self, stage: int) -> bool:
        """Run a W if one is pending."""
        at = self.n_weights[stage]
        if at == len(self.pending[stage]):
            return False
        q = self.pending[stage][at]
        self.n_weights[stage] = at + 1
        self.rows[stage].append(q)
        self.free[stage] += self.problem.time[q]
        self.held[stage] += self.problem.change[q]
        return True

    def put(self, q: int) -> bool:
        """Run the next pass of a number, W's before it as they fit; False if stuck."""
        problem = self.problem
        stage, change = problem.stage[q], problem.change[q]
        arrival = self.arrival(q)
        if arrival == float("inf"):
            return False
        while self.held[stage] + problem.needs[q] > self.limit[stage]:
            if not self.weight(stage):
                return False
        while self._fills(stage, arrival) and self.weight(stage):
            pass
        # The rule of core/clock.py, inlined for speed
        gap = arrival - self.free[stage]
        if gap > 0:
            if self.rows[stage]:
                self.idle[stage] += gap
                self.most_idle = max(self.most_idle, self.idle[stage])
            else:
                self.starts[stage] = arrival
            self.free[stage] = arrival
        end = self.free[stage] = self.free[stage] + problem.time[q]
        self.held[stage] += change
        self.rows[stage].append(q)
        self.done[q] += 1
        self.arrived[q + 1].append(end + problem.delay[q])
        if q >= problem.n_chunks and stage not in problem.joint:
            self.pending[stage].append(q + problem.n_chunks)
        return True

    def _fills(self, stage: int, arrival: float) -> bool:
        """True if a pending W should go before a pass that arrives then."""
        at = self.n_weights[stage]
        if at == len(self.pending[stage]):
            return False
        gap = arrival - self.free[stage]
        if gap + self.tiny >= self.problem.time[self.pending[stage][at]]:
            return True
        left = self.most_idle - self.idle[stage]
        return gap > left + self.tiny


def plan_rounds(problem: PlacementProblem) -> Plan | None:
    """Plan a V so; None if the memory is too small."""
    draft = _Draft(problem)
    if not (_head(draft) and _rounds(draft)):
        return None
    pairs = zip(draft.starts, draft.free, strict=True)
    return Plan(max(end - start for start, end in pairs), draft.rows)


def _head(draft: _Draft) -> bool:
    problem, put = draft.problem, draft.put
    p, m = problem.n_stages, problem.n_microbatches
    for s in range(p):
        put(s)
    for s in reversed(range(p)):
        later = 2 * p - 1 - s
        known = draft.arrival(later)
        held = problem.change[s]
        while (
            draft.done[0] < m
            and draft.held[s] + (2 + 2 * s) * held <= draft.limit[s]
            and draft.free[s] + problem.time[s] <= known + draft.tiny
        ):
            if not all(put(j) for j in range(s + 1)):
                return False
        if not put(later):
            return False
    return _balance(draft)


def _balance(draft: _Draft) -> bool:
    """Give every stage as many F's as the one before it, the chunks in turn."""
    p, done = draft.problem.n_stages, draft.done
    goes = True
    while goes:
        goes = False
        for s in range(1, p):
            later = 2 * p - 1 - s
            if done[s - 1] + done[later + 1] > done[s] + done[later]:
                q = s if draft.rows[s][-1] == later else later
                goes = draft.put(q) or goes
    return True


def _rounds(draft: _Draft) -> bool:
    problem = draft.problem
    p = problem.n_stages
    n_left = 4 * p * problem.n_microbatches - sum(draft.done)
    while n_left:
        n_put = 0
        for choose in (_backward, _forward):
            for q in sorted(q for s in range(p) if (q := choose(draft, s)) >= 0):
                n_put += draft.put(q)
        if not n_put:
            return False
        n_left -= n_put
    for s in range(p):
        while draft.weight(s):
            pass
    return True


def _backward(draft: _Draft, s: int) -> int:
    """Choose the B of a round, -1 for none."""
    p = draft.problem.n_stages
    later, first = 2 * p + s, 4 * p - 1 - s
    to_later, to_first = draft.arrival(later), draft.arrival(first)
    if min(to_later, to_first) == float("inf"):
        return -1
    return later if to_later <= max(to_first, draft.free[s]) else first


def _forward(draft: _Draft, s: int) -> int:
    """Choose the F of a round, -1 for none."""
    first, later = s, 2 * draft.problem.n_stages - 1 - s
    to_first, to_later = draft.arrival(first), draft.arrival(later)
    if to_later <= draft.free[s]:
        return later
    if to_first < to_later and _has_room(draft, s, first, later):
        return first
    return later if to_later < float("inf") else -1


def _has_room(draft: _Draft, s: int, first: int, later: int) -> bool:
    """True if memory holds one more F of either chunk when all W's are done."""
    change = draft.problem.change
    room = draft.limit[s] - draft.held[s]
    for q in draft.pending[s][draft.n_weights[s] :]:
        room -= change[q]
    return room >= change[first] + change[later]
