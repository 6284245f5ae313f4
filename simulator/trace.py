"""A timeline as Chrome trace JSON, for Perfetto (ui.perfetto.dev) and chrome://tracing.

One process (``pid``) a run, one thread (``tid``) a stage, and one more for a stage's
network (``tid`` of the stage + number of stages). Events by phase (``ph``): ``X`` a job
with its start and duration in microseconds, ``s`` and ``f`` the two ends of a message's
arrow, ``C`` a stage's memory, ``M`` the names of runs and stages. Simulated and
measured runs have the same events. Format: "Trace Event Format", Chromium project.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zbpp.core import Costs, Part, Slot, Timeline, Value, input_of, output_of, passes_in
from zbpp.core.files import write_file
from zbpp.simulator.boxes import Drawing, drawings_of, origin_of
from zbpp.simulator.metrics import memory_over_time, takes_timelines

_MOMENT = 0.001  # microseconds: the finest time that is written


@takes_timelines
def write_trace(
    timelines: Timeline | Sequence[Timeline],
    path: str | Path,
    *,
    costs: Costs | Sequence[Costs | None] | None = None,
    microseconds_per_unit: float = 1000.0,
) -> None:
    """Write one or more timelines, simulated or measured, into one trace file.

    Args:
        timelines: each becomes one process of the trace; times count from its first
            start.
        path: the file to write.
        costs: add a counter of the memory for each stage, in their unit; a sequence
            has costs, or None, for each timeline.
        microseconds_per_unit: what one unit of the timelines is: 1000 for
            milliseconds, 1e6 for seconds.

    Raises:
        RequestError: the file cannot be written.
    """
    lines = [
        json.dumps({**event, "pid": run})
        for run, drawing in enumerate(drawings_of(timelines, costs))
        for event in _events(drawing, run, microseconds_per_unit)
    ]
    text = ",\n".join(lines)
    write_file(path, f'{{"displayTimeUnit": "ms", "traceEvents": [\n{text}\n]}}\n')


def _events(drawing: Drawing, run: int, per_unit: float) -> Iterator[dict[str, Any]]:
    timeline, n_stages, costs = drawing.timeline, drawing.n_stages, drawing.costs
    origin = origin_of(timeline)

    def event(phase: str, name: str, thread: int, **more: Any) -> dict[str, Any]:
        return {"name": name, "ph": phase, "tid": thread, **more}

    def microseconds(time: float) -> float:
        return round(time * per_unit, 3)

    title = f"{timeline.name}, {drawing.facts}"
    yield event("M", "process_name", 0, args={"name": title})
    yield event("M", "process_sort_index", 0, args={"sort_index": run})
    second_lane = "network" if timeline.has_parts else "collectives"
    for stage in range(n_stages):
        for lane in range(len(drawing.lanes)):
            thread = lane * n_stages + stage
            name = f"{second_lane} of stage {stage}" if lane else f"stage {stage}"
            place = len(drawing.lanes) * stage + lane
            yield event("M", "thread_name", thread, args={"name": name})
            yield event("M", "thread_sort_index", thread, args={"sort_index": place})
    for box in drawing.boxes:
        start, end = microseconds(box.start), microseconds(box.end)
        thread, duration = box.lane * n_stages + box.stage, round(end - start, 3)
        yield event("X", box.name, thread, cat=box.style.role, ts=start, dur=duration)
    for number, (value, sender, reader) in enumerate(_messages(timeline)):
        (source, sends), (target, reads) = sender, reader
        # Viewers bind each end of an arrow to the job in which its time lies.
        sent = round(microseconds(sends.end - origin) - _MOMENT, 3)
        sent = max(microseconds(sends.start - origin), sent)
        arrow = {"cat": "message", "id": f"{run}.{number}"}
        name, read_at = str(value.what), microseconds(reads.start - origin)
        yield event("s", name, source, ts=sent, **arrow)
        yield event("f", name, target, ts=read_at, bp="e", **arrow)
    for stage, curve in enumerate(memory_over_time(timeline, costs) if costs else []):
        for time, memory in curve:
            name, ts = f"memory of stage {stage}", microseconds(time - origin)
            yield event("C", name, stage, ts=ts, args={"memory": memory})


_Place = tuple[int, Slot]
"""A line of a timeline, and a slot on it."""


def _messages(timeline: Timeline) -> Iterator[tuple[Value, _Place, _Place]]:
    """The values that go from stage to stage: their writers and their readers.

    By the starts of the readers. A pass in parts reads with the first of them; what it
    writes is there after the last, which starts later than the others.
    """
    placement = timeline.placement
    places = [(line, slot) for line, row in enumerate(timeline.lines) for slot in row]
    places.sort(key=lambda place: place[1].start)
    writers: dict[Value, _Place] = {}
    for place in places:
        line, slot = place
        for part in passes_in(slot.job):
            value = input_of(part, placement.n_chunks)
            begins = not isinstance(slot.job, Part) or slot.job.index == 0
            writer = writers.get(value) if value is not None and begins else None
            if value and writer and (writer[0] - line) % placement.n_stages:
                yield value, writer, place
            output = output_of(part, placement.n_chunks)
            if output is not None:
                writers[output] = place
