"""Judge a schedule file by itself: order, memory and times, with none of zbpp's code.

    python tests/support/judge.py plan.json costs.json

Reads the two file formats, replays the jobs one by one, and prints the largest span of
a stage, the bubble rate and the peak memories. A message is a delay. Memory: a stage
uses m_fixed, m_b from the start of F and m_w from the end of B to that of W; and
a job, O too, its peak above the memory before it. Every fault ends the run with an
error that names the stage and the job.

Of plan and costs with parts, each lane of a stage runs its parts in the order of the
row; a part needs the one before it in its pass, and the k-th of W the k-th of B that
computes, if they are as many. Memory is then looked at at all times.
"""

import json
import re
import sys
from collections.abc import Callable
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any

__all__ = ["Verdict", "judge"]

JOB = re.compile(r"(\d+)(F|BW|B|W)(\d+)")
PART = re.compile(r"(\d+)(F|B|W)(\d+)\.(\d+)(~?)")
PAIR = re.compile(rf"\(({JOB.pattern});({JOB.pattern})\)OVERLAP_F_B")
Pass = tuple[str, int, int]
"""Kind, chunk, micro-batch."""
Job = tuple[Pass, ...]
Part = tuple[str, int, int, int]
"""Kind, chunk, micro-batch, index."""
Need = tuple[Any, float]
"""A job that must have ended, and the time from its end on."""


class Verdict:
    """Figures of a schedule: times in the unit of the costs, one entry a stage."""

    def __init__(self, spans: list[float], work: list[float], peaks: list[float]):
        self.spans, self.work, self.peaks = spans, work, peaks
        self.span = max(spans)
        self.bubble = 1 - max(work) / self.span if self.span else 0.0


def judge(plan: dict[str, Any], costs: dict[str, Any]) -> Verdict:
    """Replay a schedule; both arguments are the objects of their files.

    Raises:
        ValueError: a pass is missing, twice or on a wrong stage, a backward is split
            where it cannot be, the stages wait for one another, or memory runs out.
    """
    stage_of, m = plan["placement"], plan["n_microbatches"]
    rows = [[passes for job in row if (passes := _passes(job))] for row in plan["jobs"]]
    cost = _Costs(costs, stage_of)
    _check_complete(rows, stage_of, m, cost)
    peaks = [_peak(s, row, cost) for s, row in enumerate(plan["jobs"])]
    _check_limits(peaks, cost)
    if "parts" in plan and costs.get("parts") is not None:
        return _judge_parts(plan["parts"], m, cost, costs)
    job_of = {(k[:1], c, i): job for row in rows for job in row for k, c, i in job}

    def needs(job: Job) -> list[Need]:
        return [
            (job_of[k, d, one[2]], delay)
            for one in job
            for k, d, delay in _inputs(one, cost)
        ]

    starts, ends = _replay(rows, cost.of, needs)
    work = [sum(map(cost.of, row)) for row in rows]
    return Verdict(_spans(rows, starts, ends), work, peaks)


def _replay(
    lanes: list[list[Any]],
    lasts: Callable[[Any], float],
    needs: Callable[[Any], list[Need]],
) -> tuple[dict[Any, float], dict[Any, float]]:
    """Start and end of each job: in the order of its lane, when its needs are met."""
    starts: dict[Any, float] = {}
    ends: dict[Any, float] = {}
    left, moved = [[*reversed(lane)] for lane in lanes], True
    free = [0.0] * len(lanes)
    while moved:
        moved = False
        for number, lane in enumerate(left):
            while lane and all(other in ends for other, _ in needs(lane[-1])):
                job = lane.pop()
                ready = [ends[other] + delay for other, delay in needs(job)]
                starts[job] = max([free[number], *ready])
                ends[job] = free[number] = starts[job] + lasts(job)
                moved = True
    if waiting := [lane[-1] for lane in left if lane]:
        raise ValueError(f"waits for ever: {waiting}")
    return starts, ends


def _spans(
    rows: list[list[Any]], starts: dict[Any, float], ends: dict[Any, float]
) -> list[float]:
    return [max(map(ends.get, row)) - min(map(starts.get, row)) for row in rows]


def _check_limits(peaks: list[float], cost: "_Costs") -> None:
    for s, (peak, limit) in enumerate(zip(peaks, cost.limit, strict=True)):
        if peak > limit * (1 + 1e-6):
            raise ValueError(f"stage {s} uses {peak}, over its limit {limit}")


def _judge_parts(
    texts: list[list[str]],
    m: int,
    cost: "_Costs",
    costs: dict[str, Any],
) -> Verdict:
    """Replay rows of parts."""
    times = _part_times(costs, cost)
    rows: list[list[Part]] = [[] for _ in texts]
    for s, row in enumerate(texts):
        for match in filter(None, map(PART.fullmatch, row)):
            c, kind, i, k = int(match[1]), match[2], int(match[3]), int(match[4])
            lane = "network" if match[5] else "compute"
            if cost.stage_of[c] != s or times[kind, c][k][0] != lane:
                raise ValueError(f"stage {s} cannot run {match[0]}")
            rows[s].append((kind, c, i, k))
    due = {
        (kind, c, i, k)
        for (kind, c), parts in times.items()
        for i in range(m)
        for k in range(len(parts))
    }
    there = [part for row in rows for part in row]
    if len(there) != len(due) or set(there) != due:
        raise ValueError("a part is missing or twice")

    def lane_of(part: Part) -> str:
        return times[part[0], part[1]][part[3]][0]

    def lasts(part: Part) -> float:
        return times[part[0], part[1]][part[3]][1]

    firsts = [[part for part in row if part[3] == 0] for row in rows]
    before = {b: a for row in firsts for a, b in pairwise(row)}

    def needs(part: Part) -> list[Need]:
        found = _needs_of_part(part, times, cost)
        if part in before:  # passes of a stage begin in the order of its row
            found.append((before[part], -lasts(before[part])))
        return found

    kinds = "compute", "network"
    lanes = [[x for x in row if lane_of(x) == kind] for row in rows for kind in kinds]
    starts, ends = _replay(lanes, lasts, needs)
    work = [sum(lasts(x) for x in row if lane_of(x) == "compute") for row in rows]
    peaks = []
    for s, row in enumerate(rows):
        changes = [(0.0, cost.fixed[s])]
        for kind, c, i, k in row:
            last = len(times[kind, c]) - 1
            is_joint = kind == "B" and not times["W", c]
            peak = cost.peak["BW" if is_joint else kind][c]
            left = {"F": cost.m_b, "B": cost.m_w, "W": [0.0] * len(cost.m_w)}[kind][c]
            left -= {"F": 0.0, "B": cost.m_b[c], "W": cost.m_w[c]}[kind]
            left -= cost.m_w[c] if is_joint else 0.0
            if k == 0:
                changes.append((starts[kind, c, i, k], peak))
            if k == last:
                changes.append((ends[kind, c, i, k], left - peak))
        peaks.append(max(accumulate(change for _, change in sorted(changes))))
    _check_limits(peaks, cost)
    return Verdict(_spans(rows, starts, ends), work, peaks)


def _part_times(
    costs: dict[str, Any], cost: "_Costs"
) -> dict[tuple[str, int], list[tuple[str, float]]]:
    """Lane and time of each part of F, B and W of each chunk; B has W's if joint."""
    given, stage_of = costs["parts"], cost.stage_of
    n = len(stage_of)
    if isinstance(given, list):
        each = [(one, one.get("layers", 1)) for one in given]
    else:
        layers = given.get("layers", 1)
        each = [(given, layers // stage_of.count(s)) for s in stage_of]
    times = {}
    for c, (one, layers) in enumerate(each):
        for kind in "FBW":
            parts = [(str(lane), float(t)) for lane, t in one.get(kind.lower(), [])]
            times[kind, c] = parts * layers
        if not cost.splits[stage_of[c]]:
            times["B", c] += times["W", c]
            times["W", c] = []
    for (kind, c), parts in times.items():
        speed = cost.speed[stage_of[c]]
        times[kind, c] = [(lane, t / speed) for lane, t in parts]
    times["F", n - 1].append(("compute", costs.get("loss", 0.0)))
    return {key: x if key[0] == "W" else _merged(x) for key, x in times.items()}


def _merged(parts: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """What computes in a row is one part; what takes no time is none."""
    runs = groupby(
        enumerate(x for x in parts if x[1]),
        lambda entry: (entry[1][0], entry[0] if entry[1][0] == "network" else -1),
    )
    sums = [(lane, sum(t for _, (_, t) in run)) for (lane, _), run in runs]
    return sums or [("compute", 0.0)]


def _needs_of_part(
    part: Part, times: dict[tuple[str, int], list[tuple[str, float]]], cost: "_Costs"
) -> list[Need]:
    """The part before it in its pass, or the last parts of what its pass reads."""
    kind, c, i, k = part
    needs: list[Need] = [((kind, c, i, k - 1), 0.0)] if k else []

    def last(kind: str, c: int) -> Part:
        return kind, c, i, len(times[kind, c]) - 1

    if kind == "W":
        on = [j for j, (lane, _) in enumerate(times["B", c]) if lane == "compute"]
        same = len(on) == len(times["W", c])
        needs.append((("B", c, i, on[k]) if same else last("B", c), 0.0))
    elif k == 0:
        needs += [(last(x, d), delay) for x, d, delay in _inputs(part, cost)]
    return needs


def _passes(job: str) -> Job:
    """The passes of a job: one, two that run at the same time, or none."""
    if not (JOB.fullmatch(job) or PAIR.fullmatch(job)):
        return ()
    return tuple((kind, int(c), int(i)) for c, kind, i in JOB.findall(job))


class _Costs:
    """The costs file on a placement; what is left out has the value of the format."""

    def __init__(self, costs: dict[str, Any], stage_of: list[int]):
        self.stage_of, n = stage_of, len(stage_of)
        p = max(stage_of) + 1
        share = [stage_of.count(s) for s in range(p)]

        def per_chunk(key: str, default: float) -> list[float]:
            value = costs.get(key, default)
            if not isinstance(value, list):
                return [value / share[s] for s in stage_of]
            if len(value) != n:
                raise ValueError(f"{key} has {len(value)} entries")
            return [float(entry) for entry in value]

        speed = costs.get("speed") or 1.0
        self.speed = speed if isinstance(speed, list) else [speed] * p

        def passes(key: str) -> list[float]:
            pairs = zip(per_chunk(key, 1.0), stage_of, strict=True)
            return [time / self.speed[s] for time, s in pairs]

        def peaks(key: str, least: list[float]) -> list[float]:
            return per_chunk(key, 0.0) if key in costs else least

        f = passes("f")
        f[-1] += costs.get("loss", 0.0)
        self.fb = per_chunk("fb", 0.0) if "fb" in costs else None
        self.times = {"F": f, "B": passes("b"), "W": passes("w")}
        self.m_b, self.m_w = per_chunk("m_b", 1.0), per_chunk("m_w", 0.5)
        gain = [w - b for b, w in zip(self.m_b, self.m_w, strict=True)]
        peak_b = peaks("peak_b", [max(0.0, more) for more in gain])
        peak_w = peaks("peak_w", [0.0] * n)
        in_turn = [
            max(b, more + w) for b, more, w in zip(peak_b, gain, peak_w, strict=True)
        ]
        peak_f = peaks("peak_f", self.m_b)
        self.peak = {"F": peak_f, "B": peak_b, "W": peak_w, "BW": in_turn}
        self.fixed, self.peak_o = [0.0] * p, [0.0] * p
        for key, sums in (("m_fixed", self.fixed), ("peak_o", self.peak_o)):
            for s, amount in zip(stage_of, per_chunk(key, 0.0), strict=True):
                sums[s] += amount
        self.splits = costs.get("splits") or [True] * p
        limit = costs.get("memory_limit")
        limit = float("inf") if limit is None else limit
        limits = limit if isinstance(limit, list) else [limit] * p
        self.limit = [float(one) for one in limits]
        self.edges = self._edges(costs.get("comm", 0.0))

    def _edges(self, times: float | list[float]) -> list[float]:
        edges = list(pairwise(self.stage_of))
        given = times if isinstance(times, list) else [times] * len(edges)
        return [
            0.0 if a == b else one for one, (a, b) in zip(given, edges, strict=True)
        ]

    def of(self, passes: Job) -> float:
        """Time of a job."""
        if len(passes) == 2 and self.fb is not None:
            return self.fb[passes[0][1]]
        return sum(self.times[letter][c] for kind, c, _ in passes for letter in kind)

    def delay(self, c: int, d: int) -> float:
        if self.stage_of[c] == self.stage_of[d]:
            return 0.0
        return float(self.edges[min(c, d)])


def _inputs(one: Pass | Part, cost: _Costs) -> list[tuple[str, int, float]]:
    """Kind and chunk of the passes whose results a pass reads, and the delays."""
    kind, c, *_ = one
    if kind == "W":
        return [("B", c, 0.0)]
    if kind == "F":
        return [("F", c - 1, cost.delay(c - 1, c))] if c else []
    is_last = c == len(cost.stage_of) - 1
    above = [] if is_last else [("B", c + 1, cost.delay(c + 1, c))]
    return [("F", c, 0.0), *above]


def _check_complete(
    rows: list[list[Job]], stage_of: list[int], m: int, cost: _Costs
) -> None:
    for s, jobs in enumerate(rows):
        row = [each for job in jobs for each in job]
        kinds = {kind for kind, c, _ in row}
        if not cost.splits[s] and kinds & {"B", "W"}:
            raise ValueError(f"stage {s} splits its backward, but cannot")
        parts = [(letter, c, i) for kind, c, i in row for letter in kind]
        mine = [c for c, stage in enumerate(stage_of) if stage == s]
        wanted = {(k, c, i) for k in "FBW" for c in mine for i in range(m)}
        if len(parts) != len(wanted) or set(parts) != wanted:
            raise ValueError(f"stage {s} does not run every pass of its chunks once")


def _peak(s: int, row: list[str], cost: _Costs) -> float:
    """Add up the memory of each micro-batch on each chunk, job after job."""
    stored: dict[tuple[int, int], float] = {}
    most = cost.fixed[s]
    for text in row:
        before = cost.fixed[s] + sum(stored.values())
        passes = _passes(text)
        peak_o = cost.peak_o[s] if text == "O" else 0.0
        most = max(most, before + peak_o + sum(cost.peak[k][c] for k, c, _ in passes))
        for kind, c, i in passes:
            if kind == "F":
                stored[c, i] = cost.m_b[c]
            elif kind == "B":
                stored[c, i] = cost.m_w[c]
            else:
                stored.pop((c, i), None)
        most = max(most, cost.fixed[s] + sum(stored.values()))
    return most


def main() -> None:
    """Judge the two files of the command line."""
    plan, costs = (json.loads(Path(path).read_text()) for path in sys.argv[1:3])
    verdict = judge(plan, costs)
    print(f"span {verdict.span:g}  bubble {verdict.bubble:.5f}  peaks {verdict.peaks}")


if __name__ == "__main__":
    main()
