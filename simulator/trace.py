"""A timeline as Chrome trace JSON, for Perfetto (ui.perfetto.dev) and chrome://tracing.

One process (``pid``) a run, one thread (``tid``) a stage, and one for its collectives
where it has any (``tid`` of the stage + number of stages). Events by phase (``ph``):
``X`` a job with its start and duration in microseconds (what it only sends at its end
is an event of its own), ``s`` and ``f`` the two ends of
a message's arrow, ``C`` a stage's memory, ``M`` the names of runs and stages. Simulated
and measured runs have the same events. Format: "Trace Event Format", Chromium project.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from zbpp.core import Collective, MemoryModel, Pass, RequestError, Slot, Timeline
from zbpp.simulator.messages import messages
from zbpp.simulator.metrics import memory_over_time, waste
from zbpp.simulator.palette import letter_of

__all__ = ["trace_events", "write_trace"]

_PER_UNIT = 1000.0  # microseconds; the unit of costs is then a millisecond
_MOMENT = 0.001  # microseconds: the finest time that is written

Event = dict[str, Any]


def write_trace(
    timelines: Timeline | Sequence[Timeline],
    path: str | Path,
    *,
    memory: MemoryModel | Sequence[MemoryModel | None] | None = None,
    microseconds_per_unit: float = _PER_UNIT,
) -> None:
    """Write one or more timelines, simulated or measured, into one trace file.

    Args:
        timelines: each becomes one process of the trace.
        path: the file to write.
        memory: adds one counter a stage, in the unit of the model; a sequence has one
            for each timeline.
        microseconds_per_unit: what one unit of the timelines is: 1000 for
            milliseconds, 1e6 for seconds.

    Raises:
        RequestError: the file cannot be written.
    """
    runs = [timelines] if isinstance(timelines, Timeline) else timelines
    if memory is None or isinstance(memory, MemoryModel):
        memory = [memory] * len(runs)
    events = [
        event
        for run, (timeline, held) in enumerate(zip(runs, memory, strict=True))
        for event in trace_events(
            timeline,
            run=run,
            memory=held,
            microseconds_per_unit=microseconds_per_unit,
        )
    ]
    lines = ",\n".join(json.dumps(event) for event in events)
    text = f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{path}: cannot be written: {error.strerror}") from None


def trace_events(
    timeline: Timeline,
    *,
    run: int = 0,
    memory: MemoryModel | None = None,
    microseconds_per_unit: float = _PER_UNIT,
) -> list[Event]:
    """List the events of one timeline; times count from its first start."""
    every = (*timeline.rows, *timeline.collectives)
    slots = [slot for row in every for slot in row]
    origin = min((slot.start for slot in slots), default=0.0)

    def microseconds(time: float) -> float:
        return round((time - origin) * microseconds_per_unit, 3)

    events = list(_names(timeline, run, microseconds_per_unit))
    for thread, row in enumerate(every):
        for slot in row:
            sends = timeline.sending_of(slot.job)
            parts = [(str(slot.job), _category(slot), slot.start, slot.end - sends)]
            if sends:
                name = f"send of {slot.job}"
                parts.append((name, "SEND", slot.end - sends, slot.end))
            for name, category, first, last in parts:
                start, end = microseconds(first), microseconds(last)
                events.append(
                    {
                        "name": name,
                        "cat": category,
                        "ph": "X",
                        "pid": run,
                        "tid": thread,
                        "ts": start,
                        "dur": round(end - start, 3),
                        "args": _arguments(slot),
                    }
                )
    events += _arrows(timeline, run, microseconds)
    for stage, curve in enumerate(memory_over_time(timeline, memory) if memory else []):
        events += [
            {
                "name": f"memory of stage {stage}",
                "ph": "C",
                "pid": run,
                "ts": microseconds(time),
                "args": {"held": held},
            }
            for time, held in curve
        ]
    return events


def _arrows(
    timeline: Timeline, run: int, microseconds: Callable[[float], float]
) -> Iterator[Event]:
    """Two events a message; viewers bind each to the job in which its time lies."""
    for number, message in enumerate(messages(timeline)):
        slots = [
            timeline.rows[stage][index]
            for stage, index in (message.source, message.target)
        ]
        sent, awaited = microseconds(slots[0].end), microseconds(slots[1].start)
        shared = {
            "name": str(message.value.what),
            "cat": "message",
            "id": f"{run}.{number}",
            "pid": run,
        }
        last = max(microseconds(slots[0].start), round(sent - _MOMENT, 3))
        yield shared | {"ph": "s", "tid": message.source[0], "ts": last}
        yield shared | {"ph": "f", "bp": "e", "tid": message.target[0], "ts": awaited}


def _names(timeline: Timeline, run: int, unit: float) -> Iterator[Event]:
    of, share = waste(timeline)
    name = f"{timeline.name}, {of} {share:.4f}"
    if timeline.clock_error:
        error = timeline.clock_error * unit
        name += f", clocks of the stages within {error:.3g} us"
    about: Event = {  # what `read_trace` cannot see in the jobs
        "timeline": timeline.name,
        "n_stages": timeline.placement.n_stages,
        "recomputing": sorted(timeline.recomputing),
        "clock_error": timeline.clock_error * unit,
    }
    if timeline.sending:
        about["sending"] = [one * unit for one in timeline.sending]
    yield _metadata("process_name", run, 0, {"name": name, **about})
    yield _metadata("process_sort_index", run, 0, {"sort_index": run})
    n_stages, each = timeline.placement.n_stages, 1 + bool(timeline.collectives)
    for stage in range(n_stages):
        place = {"sort_index": each * stage}
        yield _metadata("thread_name", run, stage, {"name": f"stage {stage}"})
        yield _metadata("thread_sort_index", run, stage, place)
        if timeline.collectives:
            name, place = f"collectives of stage {stage}", {"sort_index": 2 * stage + 1}
            yield _metadata("thread_name", run, n_stages + stage, {"name": name})
            yield _metadata("thread_sort_index", run, n_stages + stage, place)


def _metadata(name: str, run: int, stage: int, args: Event) -> Event:
    return {"name": name, "ph": "M", "pid": run, "tid": stage, "args": args}


def _category(slot: Slot) -> str:
    return letter_of(slot.job)


def _arguments(slot: Slot) -> Event:
    if isinstance(slot.job, Collective):
        return {"chunk": slot.job.chunk}
    if not isinstance(slot.job, Pass):
        return {}
    return {"chunk": slot.job.chunk, "microbatch": slot.job.microbatch}
