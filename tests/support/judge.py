"""Judge a schedule file by itself: order, memory and times, with none of zbpp's code.

    python tests/support/judge.py plan.json costs.json

Reads the two file formats, replays the jobs one by one, and prints the largest span of
a stage, the bubble rate and the peak memories. A message is a delay; for the first
send_occupies of it its sender does nothing else, and it takes no less. Memory: a
stage holds m_fixed, m_b from the start of F and m_w from the end of B to that of W; and
a job, O too, its peak above what was held before it. Every fault ends the run with an
error that names the stage and the job.

Of plan and costs with parts, each lane of a stage runs its parts in the order of the
row; a part needs the one before it in its pass, and the k-th of W the k-th of B that
computes, if they are as many. Memory is then looked at at all times.
"""

import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

__all__ = ["Verdict", "judge"]

JOB = re.compile(r"(\d+)(F|BW|B|W)(\d+)")
PART = re.compile(r"(\d+)(F|B|W)(\d+)\.(\d+)(~?)")
PAIR = re.compile(rf"\(({JOB.pattern});({JOB.pattern})\)OVERLAP_F_B")
Pass = tuple[str, int, int]


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
    for s, (peak, limit) in enumerate(zip(peaks, cost.limit, strict=True)):
        if peak > limit * (1 + 1e-6):
            raise ValueError(f"stage {s} holds {peak}, over its limit {limit}")
    if "parts" in plan and costs.get("parts") is not None:
        return _judge_parts(plan["parts"], m, cost, costs)
    ends: dict[tuple[str, int, int], float] = {}
    place, free = [0] * len(rows), [0.0] * len(rows)
    first: list[float | None] = [None] * len(rows)
    moved = True
    while moved:
        moved = False
        for s, row in enumerate(rows):
            while place[s] < len(row):
                passes = row[place[s]]
                ready = [_ready(kind, c, i, ends, cost) for kind, c, i in passes]
                if None in ready:
                    break
                start = max([free[s], *(time for time in ready if time is not None)])
                if first[s] is None:
                    first[s] = start
                free[s] = start + cost.of(passes)
                for kind, c, i in passes:
                    ends[kind[:1], c, i] = free[s] - cost.sending(kind, c)
                place[s] += 1
                moved = True
    for s, row in enumerate(rows):
        if place[s] < len(row):
            raise ValueError(f"stage {s} waits for ever at {row[place[s]]}")
    spans = [end - (begin or 0.0) for end, begin in zip(free, first, strict=True)]
    work = [sum(cost.of(job) - cost.sends(job) for job in row) for row in rows]
    return Verdict(spans, work, peaks)


Part = tuple[str, int, int, int]
"""Kind, chunk, micro-batch, index."""


def _judge_parts(
    texts: list[list[str]],
    m: int,
    cost: "_Costs",
    costs: dict[str, Any],
) -> Verdict:
    """Replay rows of parts."""
    times = _part_times(costs, cost)
    rows: list[list[tuple[Part, str]]] = []
    for s, row in enumerate(texts):
        matches = [match for text in row if (match := PART.fullmatch(text))]
        rows.append([])
        for match in matches:
            c, kind, i, k = int(match[1]), match[2], int(match[3]), int(match[4])
            lane = "network" if match[5] else "compute"
            if cost.stage_of[c] != s or times[kind, c][k][0] != lane:
                raise ValueError(f"stage {s} cannot run {match[0]}")
            rows[-1].append(((kind, c, i, k), lane))
    due = {
        (kind, c, i, k)
        for (kind, c), parts in times.items()
        for i in range(m)
        for k in range(len(parts))
    }
    there = [part for row in rows for part, _ in row]
    if len(there) != len(due) or set(there) != due:
        raise ValueError("a part is missing or twice")
    ends: dict[Part, float] = {}
    starts: dict[Part, float] = {}
    lanes = [
        [[part for part, on in row if on == lane] for lane in ("compute", "network")]
        for row in rows
    ]
    firsts = [[part for part, _ in row if part[3] == 0] for row in rows]
    before = {b: a for row in firsts for a, b in pairwise(row)}
    place = [[0, 0] for _ in rows]
    moved = True
    while moved:
        moved = False
        for s, both in enumerate(lanes):
            for lane, row in enumerate(both):
                while place[s][lane] < len(row):
                    part = row[place[s][lane]]
                    ready = _part_ready(part, ends, starts, times, cost, before)
                    if ready is None:
                        break
                    if place[s][lane]:
                        ready = max(ready, ends[row[place[s][lane] - 1]])
                    kind, c, _, k = part
                    starts[part], ends[part] = ready, ready + times[kind, c][k][1]
                    place[s][lane] += 1
                    moved = True
    if len(ends) < len(due):
        raise ValueError("stages wait for ever")
    spans = [
        max(ends[part] for part, _ in row) - min(starts[part] for part, _ in row)
        for row in rows
    ]
    work = [
        sum(ends[part] - starts[part] for part, lane in row if lane == "compute")
        for row in rows
    ]
    peaks = []
    for s, row in enumerate(rows):
        changes = [(0.0, cost.fixed[s])]
        for kind, c, i, k in (part for part, _ in row):
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
        held = most = 0.0
        for _, change in sorted(changes):
            held += change
            most = max(most, held)
        if most > cost.limit[s] * (1 + 1e-6):
            raise ValueError(f"stage {s} holds {most}, over its limit {cost.limit[s]}")
        peaks.append(most)
    return Verdict(spans, work, peaks)


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
    if costs.get("loss"):
        times["F", n - 1].append(("compute", costs["loss"]))
    return times


def _part_ready(
    part: Part,
    ends: dict[Part, float],
    starts: dict[Part, float],
    times: dict[tuple[str, int], list[tuple[str, float]]],
    cost: "_Costs",
    before: dict[Part, Part],
) -> float | None:
    """Time at which the inputs of a part are there; None: not yet known."""
    kind, c, i, k = part
    needs: list[tuple[Part, float]] = []
    if k:
        needs.append(((kind, c, i, k - 1), 0.0))
    last = {(x, d): len(parts) - 1 for (x, d), parts in times.items()}
    n = len(cost.stage_of)
    if kind == "W":
        on = [j for j, (lane, _) in enumerate(times["B", c]) if lane == "compute"]
        same = len(on) == len(times["W", c])
        needs.append((("B", c, i, on[k] if same else last["B", c]), 0.0))
    elif k == 0 and kind == "F" and c > 0:
        needs.append((("F", c - 1, i, last["F", c - 1]), cost.edges[c - 1]))
    elif k == 0 and kind == "B":
        needs.append((("F", c, i, last["F", c]), 0.0))
        if c < n - 1:
            needs.append((("B", c + 1, i, last["B", c + 1]), cost.edges[c]))
    if not all(need in ends for need, _ in needs):
        return None
    if k == 0 and part in before and before[part] not in starts:
        return None
    begun = starts[before[part]] if k == 0 and part in before else 0.0
    return max([begun, *(ends[need] + delay for need, delay in needs)])


def _passes(job: str) -> list[Pass]:
    """The passes of a job: one, two that run at the same time, or none."""
    if not (JOB.fullmatch(job) or PAIR.fullmatch(job)):
        return []
    return [(kind, int(c), int(i)) for c, kind, i in JOB.findall(job)]


class _Costs:
    """The costs file on a placement; what is left out has the value of the format."""

    def __init__(self, costs: dict[str, Any], stage_of: list[int]):
        self.stage_of, n = stage_of, len(stage_of)
        p = max(stage_of) + 1
        share = [stage_of.count(s) for s in range(p)]

        def per_chunk(key: str, default: float) -> list[float]:
            value = costs.get(key, default)
            entries = value if isinstance(value, list) else [value] * p
            numbers = [_number(entry) for entry in entries]
            if len(numbers) == n:
                if isinstance(value, list):
                    return numbers
            elif len(numbers) != p:
                raise ValueError(f"{key} has {len(numbers)} entries")
            return [numbers[s] / share[s] for s in stage_of]

        def peaks(key: str, least: list[float]) -> list[float]:
            return per_chunk(key, 0.0) if key in costs else least

        f = per_chunk("f", 1.0)
        f[-1] += costs.get("loss", 0.0)
        self.fb = per_chunk("fb", 0.0) if "fb" in costs else None
        self.times = {"F": f, "B": per_chunk("b", 1.0), "W": per_chunk("w", 1.0)}
        self.m_b, self.m_w = per_chunk("m_b", 1.0), per_chunk("m_w", 0.5)
        gain = [w - b for b, w in zip(self.m_b, self.m_w, strict=True)]
        peak_b = peaks("peak_b", [max(0.0, more) for more in gain])
        peak_w = peaks("peak_w", [0.0] * n)
        in_turn = [
            max(b, more + w) for b, more, w in zip(peak_b, gain, peak_w, strict=True)
        ]
        peak_bw = peaks("peak_bw", in_turn)
        peak_f = peaks("peak_f", self.m_b)
        self.peak = {"F": peak_f, "B": peak_b, "W": peak_w, "BW": peak_bw}
        self.fixed, self.peak_o = [0.0] * p, [0.0] * p
        for key, sums in (("m_fixed", self.fixed), ("peak_o", self.peak_o)):
            for s, amount in zip(stage_of, per_chunk(key, 0.0), strict=True):
                sums[s] += amount
        self.splits = costs.get("splits") or [True] * p
        limit = costs.get("memory_limit")
        limit = float("inf") if limit is None else limit
        limits = limit if isinstance(limit, list) else [limit] * p
        self.limit = [_number(one) for one in limits]
        self.occupied = self._edges(costs.get("send_occupies", 0.0))
        hops = zip(self._edges(costs.get("comm", 0.0)), self.occupied, strict=True)
        self.edges = [max(both) for both in hops]

    def _edges(self, times: float | list[float]) -> list[float]:
        edges = list(pairwise(self.stage_of))
        given = times if isinstance(times, list) else [times] * len(edges)
        last = max(self.stage_of)
        if len(given) != len(edges):  # one a link, not one an edge
            return [
                0.0 if a == b else given[last if abs(a - b) == last > 1 else min(a, b)]
                for a, b in edges
            ]
        return [
            0.0 if a == b else one for one, (a, b) in zip(given, edges, strict=True)
        ]

    def sending(self, kind: str, c: int) -> float:
        edge = c if kind == "F" else c - 1
        at_the_end = not 0 <= edge < len(self.occupied)
        return 0.0 if kind == "W" or at_the_end else self.occupied[edge]

    def of(self, passes: list[Pass]) -> float:
        """Time of a job, with that in which it only sends."""
        if len(passes) == 2 and self.fb is not None:
            return self.fb[passes[0][1]] + self.sends(passes)
        alone = [self.times[letter][c] for kind, c, _ in passes for letter in kind]
        return sum(alone) + self.sends(passes)

    def sends(self, passes: list[Pass]) -> float:
        return sum(self.sending(kind, c) for kind, c, _ in passes)

    def delay(self, c: int, d: int) -> float:
        if self.stage_of[c] == self.stage_of[d]:
            return 0.0
        return float(self.edges[min(c, d)])


def _ready(
    kind: str, c: int, i: int, ends: dict[tuple[str, int, int], float], cost: _Costs
) -> float | None:
    """The time at which all inputs of a pass are there; None: one is not computed."""
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
    rows: list[list[list[Pass]]], stage_of: list[int], m: int, cost: _Costs
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


def _number(value: float | str) -> float:
    """A number, or bytes as in "1.5 GiB"."""
    if not isinstance(value, str):
        return value
    found = re.fullmatch(
        r"\s*([\d.e+]+)\s*(?:([KMGT]?)(i?)B)?\s*", value, re.IGNORECASE
    )
    if found is None:
        raise ValueError(f"{value!r} is no amount of memory")
    power = " KMGT".index((found[2] or " ").upper())
    return float(found[1]) * (1024 if found[3] else 1000) ** power


def _peak(s: int, row: list[str], cost: _Costs) -> float:
    """Add up what each micro-batch holds on each chunk, job after job."""
    held: dict[tuple[int, int], float] = {}
    most = cost.fixed[s]
    for text in row:
        before = cost.fixed[s] + sum(held.values())
        passes = _passes(text)
        peak_o = cost.peak_o[s] if text == "O" else 0.0
        most = max(most, before + peak_o + sum(cost.peak[k][c] for k, c, _ in passes))
        for kind, c, i in passes:
            if kind == "F":
                held[c, i] = cost.m_b[c]
            elif kind == "B":
                held[c, i] = cost.m_w[c]
            else:
                held.pop((c, i), None)
        most = max(most, cost.fixed[s] + sum(held.values()))
    return most


def main() -> None:
    """Judge the two files of the command line."""
    plan, costs = (json.loads(Path(path).read_text()) for path in sys.argv[1:3])
    verdict = judge(plan, costs)
    print(f"span {verdict.span:g}  bubble {verdict.bubble:.5f}  peaks {verdict.peaks}")


if __name__ == "__main__":
    main()
