"""A timeline as Chrome trace JSON, for Perfetto (ui.perfetto.dev) and chrome://tracing.

One process (``pid``) a run, one thread (``tid``) a stage, and one for what goes on
beside its jobs where there is anything (``tid`` of the stage + number of stages).
Events by phase (``ph``): ``X`` a job with its start and duration in microseconds (what
it only sends at its end is an event of its own), ``s`` and ``f`` the two ends of a
message's arrow, ``C`` a stage's memory, ``M`` the names of runs and stages. Simulated
and measured runs have the same events. Format: "Trace Event Format", Chromium project.

`read_trace` reads the timelines of such a file back.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from zbpp.core import (
    Costs,
    Part,
    Placement,
    RequestError,
    Slot,
    Timeline,
    is_beside,
    parse_job,
    passes_in,
)
from zbpp.core.files.json_text import fail, object_of, read, write_file
from zbpp.simulator.arguments import takes_timelines
from zbpp.simulator.boxes import SEND, Drawing, origin_of
from zbpp.simulator.critical_path import messages
from zbpp.simulator.metrics import memory_over_time, waste

__all__ = ["read_trace", "trace_events", "write_trace"]

_PER_UNIT = 1000.0  # microseconds; the unit of costs is then a millisecond
_MOMENT = 0.001  # microseconds: the finest time that is written

Event = dict[str, Any]


@takes_timelines
def write_trace(
    timelines: Timeline | Sequence[Timeline],
    path: str | Path,
    *,
    costs: Costs | Sequence[Costs | None] | None = None,
    microseconds_per_unit: float = _PER_UNIT,
) -> None:
    """Write one or more timelines, simulated or measured, into one trace file.

    Args:
        timelines: each becomes one process of the trace.
        path: the file to write.
        costs: add a counter of the memory for each stage, in their unit; a sequence
            has costs, or None, for each timeline.
        microseconds_per_unit: what one unit of the timelines is: 1000 for
            milliseconds, 1e6 for seconds.

    Raises:
        RequestError: the file cannot be written.
    """
    runs = [timelines] if isinstance(timelines, Timeline) else timelines
    if costs is None or isinstance(costs, Costs):
        costs = [costs] * len(runs)
    lines = [
        json.dumps(event)
        for run, (timeline, of_run) in enumerate(zip(runs, costs, strict=True))
        for event in trace_events(
            timeline, run=run, costs=of_run, microseconds_per_unit=microseconds_per_unit
        )
    ]
    text = ",\n".join(lines)
    write_file(path, f'{{"displayTimeUnit": "ms", "traceEvents": [\n{text}\n]}}\n')


@takes_timelines
def trace_events(
    timeline: Timeline,
    *,
    run: int = 0,
    costs: Costs | None = None,
    microseconds_per_unit: float = _PER_UNIT,
) -> list[Event]:
    """List the events of one timeline; times count from its first start."""

    def microseconds(time: float) -> float:
        return round(time * microseconds_per_unit, 3)

    drawing, n_stages = Drawing(timeline), timeline.placement.n_stages
    events = list(_names(drawing, run, microseconds_per_unit))
    for box in drawing.boxes:
        start = microseconds(box.start)
        events.append(
            {
                "name": box.name,
                "cat": box.style.role,
                "ph": "X",
                "pid": run,
                "tid": box.lane * n_stages + box.stage,
                "ts": start,
                "dur": round(microseconds(box.end) - start, 3),
                "args": box.numbers,
            }
        )
    events += _arrows(timeline, run, microseconds)
    origin = origin_of(timeline)
    for stage, curve in enumerate(memory_over_time(timeline, costs) if costs else []):
        events += [
            {
                "name": f"memory of stage {stage}",
                "ph": "C",
                "pid": run,
                "ts": microseconds(time - origin),
                "args": {"held": held},
            }
            for time, held in curve
        ]
    return events


def _arrows(
    timeline: Timeline, run: int, microseconds: Callable[[float], float]
) -> Iterator[Event]:
    """Two events a message; viewers bind each to the job in which its time lies."""
    lines, origin = timeline.lines, origin_of(timeline)
    for number, message in enumerate(messages(timeline)):
        sender, reader = (
            lines[line][index] for line, index in (message.source, message.target)
        )
        shared = {
            "name": str(message.value.what),
            "cat": "message",
            "id": f"{run}.{number}",
            "pid": run,
        }
        sent = round(microseconds(sender.end - origin) - _MOMENT, 3)
        sent = max(microseconds(sender.start - origin), sent)
        read_at = microseconds(reader.start - origin)
        yield shared | {"ph": "s", "tid": message.source[0], "ts": sent}
        yield shared | {"ph": "f", "bp": "e", "tid": message.target[0], "ts": read_at}


def _names(drawing: Drawing, run: int, unit: float) -> Iterator[Event]:
    timeline = drawing.timeline
    of, share = waste(timeline)
    name = f"{timeline.name}, {of} {share:.4f}"
    about: Event = {  # what `read_trace` cannot see in the jobs
        "timeline": timeline.name,
        "n_stages": timeline.placement.n_stages,
        "recomputing": sorted(timeline.recomputing),
    }
    if timeline.sending:
        about["sending"] = [time * unit for time in timeline.sending]
    yield _metadata("process_name", run, 0, {"name": name, **about})
    yield _metadata("process_sort_index", run, 0, {"sort_index": run})
    n_stages = timeline.placement.n_stages
    beside = "network" if timeline.has_parts else "collectives"
    for stage in range(n_stages):
        for lane in range(drawing.n_lanes):
            thread = lane * n_stages + stage
            name = f"{beside} of stage {stage}" if lane else f"stage {stage}"
            place = {"sort_index": drawing.n_lanes * stage + lane}
            yield _metadata("thread_name", run, thread, {"name": name})
            yield _metadata("thread_sort_index", run, thread, place)


def _metadata(name: str, run: int, thread: int, args: Event) -> Event:
    return {"name": name, "ph": "M", "pid": run, "tid": thread, "args": args}


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
        if event.get("cat") == SEND:  # the end of the job before
            first = lanes[lane].pop()
            end = (start + event["dur"]) / unit
            lanes[lane].append(Slot(first.job, first.start, end))
            continue
        job = parse_job(event["name"], stage=lane % n)
        if lane >= n and not is_beside(job):
            continue  # it stands on the stage's own line too
        lanes[lane].append(Slot(job, start / unit, (start + event["dur"]) / unit))
    jobs_once = [
        job
        for row in lanes
        for slot in row
        for job in ((slot.job,) if isinstance(slot.job, Part) else passes_in(slot.job))
    ]
    if len(set(jobs_once)) < len(jobs_once) or not jobs_once:
        raise RequestError(f"{about['timeline']}: these are not the jobs of one step")
    passes = [
        (part, stage)
        for stage, row in enumerate(lanes[:n])
        for slot in row
        for part in passes_in(slot.job)
    ]
    stage_of = {job.chunk: stage for job, stage in passes}
    return Timeline(
        about["timeline"],
        Placement(tuple(stage_of[chunk] for chunk in range(len(stage_of)))),
        max(job.microbatch for job, _ in passes) + 1,
        tuple(map(tuple, lanes[:n])),
        recomputing=frozenset(about["recomputing"]),
        collectives=tuple(map(tuple, lanes[n:])) if any(lanes[n:]) else (),
        sending=tuple(time / unit for time in about.get("sending", ())),
    )
