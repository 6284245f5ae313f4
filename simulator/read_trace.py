"""Timelines of a trace that `write_trace` has written, read back."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zbpp.core import Pass, Placement, Slot, Timeline, parse_job
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
    runs: dict[int, list[Event]] = defaultdict(list)
    about: dict[int, Event] = {}
    for event in events:
        if not isinstance(event, dict):
            fail(source, f"no trace: {event!r} is no event")
        run = event.get("pid", 0)
        if event.get("ph") == "X":
            runs[run].append(event)
        elif event.get("name") == "process_name":
            about[run] = event.get("args", {})
    if not runs or any("timeline" not in about.get(run, ()) for run in runs):
        fail(source, "no trace that zbpp bench, zbpp trace or write_trace has written")
    try:
        return [
            _timeline(about[run], jobs, microseconds_per_unit)
            for run, jobs in sorted(runs.items())
        ]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        fail(source, f"no trace of one step: {type(error).__name__}: {error}")


def _timeline(about: Event, jobs: Sequence[Event], unit: float) -> Timeline:
    n = about["n_stages"]
    lanes: list[list[Slot]] = [[] for _ in range(2 * n)]
    for event in jobs:
        start, lane = event["ts"], event["tid"]
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
        raise ValueError(f"{about['timeline']}: these are not the jobs of one step")
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
