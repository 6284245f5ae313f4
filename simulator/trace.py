"""A timeline as Chrome trace JSON, for Perfetto (ui.perfetto.dev) and chrome://tracing.

One process (``pid``) a run, one thread (``tid``) a stage, and one more for a stage's
network (``tid`` of the stage + number of stages). Events by phase (``ph``): ``X`` a job
with its start and duration in microseconds (what it only sends at its end is a separate
event), ``s`` and ``f`` the two ends of a message's arrow, ``C`` a stage's memory, ``M``
the names of runs and stages. Simulated and measured runs have the same events. Format:
"Trace Event Format", Chromium project.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zbpp.core import Costs, Timeline
from zbpp.core.files.json_text import write_file
from zbpp.simulator.arguments import takes_timelines
from zbpp.simulator.boxes import Drawing, origin_of
from zbpp.simulator.critical_path import messages
from zbpp.simulator.metrics import memory_over_time, waste

__all__ = ["trace_events", "write_trace"]

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
    drawing, n_stages = Drawing(timeline), timeline.placement.n_stages
    origin, lines = origin_of(timeline), timeline.lines

    def event(phase: str, name: str, thread: int, **more: Any) -> Event:
        return {"name": name, "ph": phase, "pid": run, "tid": thread, **more}

    def microseconds(time: float) -> float:
        return round(time * microseconds_per_unit, 3)

    events = [
        event("M", name, thread, args=arguments)
        for name, thread, arguments in _names(drawing, run)
    ]
    for box in drawing.boxes:
        start, end = microseconds(box.start), microseconds(box.end)
        thread, duration = box.lane * n_stages + box.stage, round(end - start, 3)
        role = box.style.role
        events.append(event("X", box.name, thread, cat=role, ts=start, dur=duration))
    for number, message in enumerate(messages(timeline)):
        sender, reader = (
            lines[line][index] for line, index in (message.source, message.target)
        )
        # Viewers bind each end of an arrow to the job in which its time lies.
        sent = round(microseconds(sender.end - origin) - _MOMENT, 3)
        sent = max(microseconds(sender.start - origin), sent)
        read_at = microseconds(reader.start - origin)
        arrow = {"cat": "message", "id": f"{run}.{number}"}
        name = str(message.value.what)
        events.append(event("s", name, message.source[0], ts=sent, **arrow))
        target = message.target[0]
        events.append(event("f", name, target, ts=read_at, bp="e", **arrow))
    for stage, curve in enumerate(memory_over_time(timeline, costs) if costs else []):
        name = f"memory of stage {stage}"
        for time, held in curve:
            ts = microseconds(time - origin)
            events.append(event("C", name, stage, ts=ts, args={"held": held}))
    return events


def _names(drawing: Drawing, run: int) -> Iterator[tuple[str, int, Event]]:
    """Names and places of the run and its threads."""
    timeline, n_stages = drawing.timeline, drawing.timeline.placement.n_stages
    of, share = waste(timeline)
    yield "process_name", 0, {"name": f"{timeline.name}, {of} {share:.4f}"}
    yield "process_sort_index", 0, {"sort_index": run}
    beside = "network" if timeline.has_parts else "collectives"
    for stage in range(n_stages):
        for lane in range(drawing.n_lanes):
            thread = lane * n_stages + stage
            name = f"{beside} of stage {stage}" if lane else f"stage {stage}"
            place = {"sort_index": drawing.n_lanes * stage + lane}
            yield "thread_name", thread, {"name": name}
            yield "thread_sort_index", thread, place
