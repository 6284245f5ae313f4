"""Timelines of a trace that `write_trace` has written, read back."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zbpp.core import Pass, Placement, RequestError, Slot, Timeline, parse_job
from zbpp.core.files.json_text import fail, object_of, read

__all__ = ["read_trace"]

_PER_UNIT = 1000.0  # microseconds; the unit is then a millisecond

Event = Mapping[str, Any]


def read_trace(
    path: str | Path, *, microseconds_per_unit: float = _PER_UNIT
) -> list[Timeline]:
    """Read the timelines, simulated and measured, in the order of the file.

    Args:
        path: of the file; times in it are fine to a nanosecond.
        microseconds_per_unit: what one unit of the timelines is: 1000 for
            milliseconds, 1e6 for seconds.

    Raises:
        RequestError: the file cannot be read, or is no trace of zbpp.
    """
    source = str(path)
    events = object_of(read(path), source).get("traceEvents")
    if not isinstance(events, list):
        fail(source, "no trace: there is no list traceEvents")
    try:
        return list(_timelines(events, microseconds_per_unit))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
        reason = f"{type(e).__name__}: {e}" if not isinstance(e, RequestError) else e
        fail(source, f"no trace that zbpp has written: {reason}")


def _timelines(events: Sequence[Event], unit: float) -> Iterator[Timeline]:
    """The timelines of a trace's events, each of the events of one process."""
    runs: dict[int, list[Event]] = defaultdict(list)
    about: dict[int, Event] = {}
    for event in events:
        run = event.get("pid", 0)
        if event.get("ph") == "X":
            runs[run].append(event)
        elif event.get("name") == "process_name":
            about[run] = event.get("args", {})
    if not runs:
        raise RequestError("it has no jobs")
    for run, jobs in sorted(runs.items()):
        if "timeline" not in about.get(run, ()):
            raise RequestError(f"process {run} is not called a timeline")
        yield _timeline(about[run], jobs, unit)


def _timeline(about: Event, jobs: Sequence[Event], unit: float) -> Timeline:
    n = about["n_stages"]
    if not 0 < n <= len(jobs):
        raise RequestError(f"n_stages is {n}, and there are {len(jobs)} jobs")
    lanes: list[list[Slot]] = [[] for _ in range(2 * n)]
    for event in jobs:
        start, lane = event["ts"], event["tid"]
        if not (0 <= lane < 2 * n and math.isfinite(start + event["dur"])):
            raise RequestError(f"{event['name']} is on no stage, or at no time")
        if event.get("cat") == "SEND":  # the end of the job before
            first = lanes[lane].pop()
            end = (start + event["dur"]) / unit
            lanes[lane].append(Slot(first.job, first.start, end))
            continue
        job = parse_job(event["name"], stage=lane % n)
        lanes[lane].append(Slot(job, start / unit, (start + event["dur"]) / unit))
    passes = [
        (slot.job, stage)
        for stage, row in enumerate(lanes[:n])
        for slot in row
        if isinstance(slot.job, Pass)
    ]
    if len(set(passes)) < len(passes) or not passes:
        raise RequestError(f"{about['timeline']}: these are not the jobs of one step")
    stage_of = {job.chunk: stage for job, stage in passes}
    return Timeline(
        about["timeline"],
        Placement(tuple(stage_of[chunk] for chunk in range(len(stage_of)))),
        max(job.microbatch for job, _ in passes) + 1,
        tuple(map(tuple, lanes[:n])),
        recomputing=frozenset(about["recomputing"]),
        clock_error=about["clock_error"] / unit,
        collectives=tuple(map(tuple, lanes[n:])) if any(lanes[n:]) else (),
        sending=tuple(one / unit for one in about.get("sending", ())),
    )
