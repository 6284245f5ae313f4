"""Judge a schedule file by itself: order, memory and times, with none of zbpp's code.

    python benchmarks/judge.py plan.json costs.json

Reads the two file formats, replays the jobs one by one, and prints the largest span of
a stage, the bubble rate and the peak memories. A message is a pure delay. Every fault
ends the run with an error that names the stage and the job.
"""

import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

__all__ = ["Verdict", "judge"]

JOB = re.compile(r"(\d+)(F|BW|B|W)(\d+)")


class Verdict:
    """Figures of a schedule: times in the unit of the costs, one entry a stage."""

    def __init__(self, spans: list[float], work: list[float], peaks: list[float]):
        self.spans, self.work, self.peaks = spans, work, peaks
        self.span = max(spans)
        self.bubble = 1 - max(work) / self.span


def judge(plan: dict[str, Any], costs: dict[str, Any]) -> Verdict:
    """Replay a schedule; both arguments are the objects of their files.

    Raises:
        ValueError: a pass is missing, twice or on a wrong stage, a backward is split
            where it cannot be, the stages wait for one another, or memory runs out.
    """
    stage_of, m = plan["placement"], plan["n_microbatches"]
    rows = [_passes(row) for row in plan["jobs"]]
    cost = _Costs(costs, stage_of)
    _check_complete(rows, stage_of, m, cost)
    peaks = [_peak(rows[s], cost) for s in range(len(rows))]
    for s, (peak, limit) in enumerate(zip(peaks, cost.limit, strict=True)):
        if peak > limit * (1 + 1e-6):
            raise ValueError(f"stage {s} holds {peak}, over its limit {limit}")
    ends: dict[tuple[str, int, int], float] = {}
    place, free = [0] * len(rows), [0.0] * len(rows)
    first: list[float | None] = [None] * len(rows)
    moved = True
    while moved:
        moved = False
        for s, row in enumerate(rows):
            while place[s] < len(row):
                kind, c, i = row[place[s]]
                ready = _ready(kind, c, i, ends, cost)
                if ready is None:
                    break
                start = max(ready, free[s])
                if first[s] is None:
                    first[s] = start
                free[s] = start + cost.time(kind, c)
                ends[kind[:1], c, i] = free[s]
                place[s] += 1
                moved = True
    for s, row in enumerate(rows):
        if place[s] < len(row):
            raise ValueError(f"stage {s} waits for ever at {row[place[s]]}")
    spans = [end - (begin or 0.0) for end, begin in zip(free, first, strict=True)]
    work = [sum(cost.time(kind, c) for kind, c, _ in row) for row in rows]
    return Verdict(spans, work, peaks)


def _passes(row: list[str]) -> list[tuple[str, int, int]]:
    found = (JOB.fullmatch(text) for text in row if text not in ("O", "V"))
    return [(job[2], int(job[1]), int(job[3])) for job in found if job]


class _Costs:
    """The costs file on a placement; what is left out has the value of the format."""

    def __init__(self, costs: dict[str, Any], stage_of: list[int]):
        self.stage_of, n = stage_of, len(stage_of)
        p = max(stage_of) + 1
        share = [stage_of.count(s) for s in stage_of]

        def per_chunk(key: str, default: float) -> list[float]:
            value = costs.get(key, default)
            if isinstance(value, list):
                return list(value)
            return [value / part for part in share]

        f = per_chunk("f", 1.0)
        f[-1] += costs.get("loss", 0.0)
        self.times = {"F": f, "B": per_chunk("b", 1.0), "W": per_chunk("w", 1.0)}
        self.m_b, self.m_w = per_chunk("m_b", 1.0), per_chunk("m_w", 0.5)
        self.splits = costs.get("splits") or [True] * p
        limit = costs.get("memory_limit")
        limit = float("inf") if limit is None else limit
        self.limit = limit if isinstance(limit, list) else [limit] * p
        comm = costs.get("comm", 0.0)
        self.edges = comm if isinstance(comm, list) else [comm] * (n - 1)
        if len(self.edges) != n - 1:  # one a link, not one an edge
            links = self.edges
            last = p - 1
            self.edges = [
                0.0 if a == b else links[last if abs(a - b) == last > 1 else min(a, b)]
                for a, b in pairwise(stage_of)
            ]

    def time(self, kind: str, c: int) -> float:
        return sum(self.times[letter][c] for letter in kind)

    def delay(self, c: int, d: int) -> float:
        if self.stage_of[c] == self.stage_of[d]:
            return 0.0
        return float(self.edges[min(c, d)])


def _ready(
    kind: str, c: int, i: int, ends: dict[tuple[str, int, int], float], cost: _Costs
) -> float | None:
    """When all inputs of a pass are there; None if one is not yet computed."""
    last = len(cost.stage_of) - 1
    needs = [("B", c, 0.0)] if kind == "W" else []
    if kind == "F" and c > 0:
        needs = [("F", c - 1, cost.delay(c - 1, c))]
    if kind in ("B", "BW"):
        needs = [("F", c, 0.0)]
        if c < last:
            needs.append(("B", c + 1, cost.delay(c + 1, c)))
    times = [(ends.get((k, d, i)), delay) for k, d, delay in needs]
    if any(end is None for end, _ in times):
        return None
    return max([end + delay for end, delay in times if end is not None], default=0.0)


def _check_complete(
    rows: list[list[tuple[str, int, int]]], stage_of: list[int], m: int, cost: _Costs
) -> None:
    for s, row in enumerate(rows):
        kinds = {kind for kind, c, _ in row}
        if not cost.splits[s] and kinds & {"B", "W"}:
            raise ValueError(f"stage {s} splits its backward, but cannot")
        parts = [(letter, c, i) for kind, c, i in row for letter in kind]
        mine = [c for c, stage in enumerate(stage_of) if stage == s]
        wanted = {(k, c, i) for k in "FBW" for c in mine for i in range(m)}
        if len(parts) != len(wanted) or set(parts) != wanted:
            raise ValueError(f"stage {s} does not run every pass of its chunks once")


def _peak(row: list[tuple[str, int, int]], cost: _Costs) -> float:
    held = peak = 0.0
    for kind, c, _ in row:
        if kind == "F":
            held += cost.m_b[c]
            peak = max(peak, held)
        else:
            kept = cost.m_w[c]
            held -= {"B": cost.m_b[c] - kept, "W": kept, "BW": cost.m_b[c]}[kind]
    return peak


def main() -> None:
    """Judge the two files of the command line."""
    plan, costs = (json.loads(Path(path).read_text()) for path in sys.argv[1:3])
    verdict = judge(plan, costs)
    print(f"span {verdict.span:g}  bubble {verdict.bubble:.5f}  peaks {verdict.peaks}")


if __name__ == "__main__":
    main()
