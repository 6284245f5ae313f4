"""Timelines on a page: what the scripts draw, and the elements they draw in.

A timeline is a list of boxes in ten columns of four bytes a box, one after the other,
deflated and in base64:

    wait         f32   time from the end of the box before on the line, or from 0
    lasts        f32   duration
    during       f32   most memory that the stage holds in the job
    after        f32   memory that it holds from the end on
    chunk        i32   -1: none
    microbatch   i32   -1: none
    chunk2       i32   of a pair, that of its backward; -1: it is no pair
    microbatch2  i32   likewise
    awaits       i32   number of the box whose message it awaits, less its own; or 0
    style        i32   place among the styles of the page

A pair awaits up to two messages: the second one stands with its box on the next lane.

Ends that are added up again are within a rounding error of the durations: single
precision tells times apart that are a ten-millionth of a job, and no zoom does.
"""

import base64
import struct
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import groupby
from typing import Any

from zbpp.core import PassKind, Timeline, passes_in
from zbpp.core.timeline import Place
from zbpp.simulator.boxes import (
    LOOKS,
    SEND,
    Box,
    Drawing,
    Style,
    legend_of,
)
from zbpp.simulator.critical_path import Message, critical_places, messages
from zbpp.simulator.metrics import memory_by_job, step_time, waste
from zbpp.simulator.page.entry import PageEntry, unit_of_memory

__all__ = ["Panel", "panels_data", "panels_html"]


@dataclass(frozen=True)
class Panel:
    """One timeline of an entry, ``simulated`` or ``measured``."""

    entry: PageEntry
    kind: str

    @property
    def timeline(self) -> Timeline:
        """The boxes to draw."""
        return self.entry.timelines[self.kind]

    @cached_property
    def drawing(self) -> Drawing:
        """The timeline as boxes."""
        return Drawing(self.timeline)

    @cached_property
    def messages(self) -> list[Message]:
        """Of the timeline."""
        return list(messages(self.timeline))


def panels_data(
    entries: Sequence[PageEntry], panels: Sequence[Panel], time_unit: str
) -> dict[str, Any]:
    """Collect what the scripts read: units, styles, and a timeline a panel.

    Raises:
        RequestError: the costs of an entry do not fit its placement.
    """
    name, size = unit_of_memory(entries)
    examples = {_look(box): box for panel in panels for box in panel.drawing.boxes}
    return {
        "timeUnit": time_unit,
        "memory": {"size": size, "name": name},
        "styles": [_style(box) for box in examples.values()],
        "panels": [_panel_data(panel, list(examples)) for panel in panels],
    }


_Look = tuple[Style, tuple[PassKind, ...]]
"""A style, and the kinds of the passes that its boxes compute."""


def _look(box: Box) -> _Look:
    return box.style, tuple(part.kind for part in passes_in(box.job))


def _style(box: Box) -> dict[str, Any]:
    style, kinds = _look(box)
    return {
        "role": style.role,
        "what": LOOKS[style.role].summary,
        "colour": style.colour,
        "ink": style.ink,
        "hatched": style.is_hatched,
        "work": box.is_work,
        "once": style.at_once,
        "kinds": kinds,
        "text": "" if style.role == SEND else None if kinds else str(box.job),
    }


def _panel_data(panel: Panel, looks: Sequence[_Look]) -> dict[str, Any]:
    entry, timeline, drawing = panel.entry, panel.timeline, panel.drawing
    n_stages = timeline.placement.n_stages
    numbers: dict[Place, list[int]] = {}
    for number, box in enumerate(drawing.boxes):
        numbers.setdefault(box.place, []).append(number)
    per_line = Counter((box.lane, box.stage) for box in drawing.boxes)
    costs = entry.costs if panel.kind == "simulated" else None
    path = critical_places(timeline, costs, sent=panel.messages)
    costs = entry.costs
    fixed = None if costs is None else list(costs.on(timeline.placement).fixed)
    return {
        "name": entry.name,
        "group": entry.group,
        "of": panel.kind,
        "stages": n_stages,
        "microbatches": timeline.n_microbatches,
        "length": step_time(timeline),
        "typical": drawing.typical,
        "spans": drawing.spans,
        "lines": [
            per_line[lane, stage]
            for lane in range(drawing.n_lanes)
            for stage in range(n_stages)
        ],
        "path": [number for place in path for number in numbers[place]],
        "fixed": fixed,
        "peak": entry.peak,
        "limit": entry.limit,
        "columns": _columns(panel, numbers, looks),
    }


def _columns(
    panel: Panel, numbers: Mapping[Place, Sequence[int]], looks: Sequence[_Look]
) -> str:
    """The columns of a timeline's boxes, as text."""
    boxes, costs = panel.drawing.boxes, panel.entry.costs
    wait, lasts = _times(boxes)
    held = [(0.0, 0.0)] * len(boxes)
    awaits = [0] * len(boxes)
    for stage, jobs in enumerate(memory_by_job(panel.timeline, costs) if costs else []):
        for index, amounts in enumerate(jobs):
            for number in numbers[stage, index]:
                held[number] = amounts
    for message in panel.messages:
        readers = numbers[message.target]
        reader = next((x for x in readers if not awaits[x]), readers[-1])
        awaits[reader] = numbers[message.source][-1] - reader
    place = {look: number for number, look in enumerate(looks)}
    floats = (wait, lasts, [h for h, _ in held], [h for _, h in held])
    of_job = [box.numbers for box in boxes]
    backwards = [next(iter(passes_in(box.job)[1:]), None) for box in boxes]
    integers = (
        [numbers.get("chunk", -1) for numbers in of_job],
        [numbers.get("microbatch", -1) for numbers in of_job],
        [part.chunk if part else -1 for part in backwards],
        [part.microbatch if part else -1 for part in backwards],
        awaits,
        [place[_look(box)] for box in boxes],
    )
    data = [struct.pack(f"<{len(boxes)}f", *column) for column in floats]
    data += [struct.pack(f"<{len(boxes)}i", *column) for column in integers]
    return base64.b64encode(zlib.compress(b"".join(data), 6)).decode("ascii")


def _times(boxes: Sequence[Box]) -> "tuple[array[float], array[float]]":
    """The first two columns; each wait makes up for the rounding before it."""
    wait, lasts = array("f"), array("f")
    for _, line in groupby(boxes, key=lambda box: (box.lane, box.stage)):
        end = 0.0
        for box in line:
            wait.append(box.start - end)
            lasts.append(box.end - box.start)
            end = (end + wait[-1]) + lasts[-1]
    return wait, lasts


def panels_html(entries: Sequence[PageEntry], panels: Sequence[Panel]) -> str:
    """Write switches, legend, time axis, and an empty canvas a panel."""
    drawn = [entry for entry in entries if entry.timelines]
    buttons = "".join(
        f'<button type="button" data-entry="{number}" '
        f'aria-pressed="{str(entry.shown).lower()}">{escape(_full_name(entry))}</button>'
        for number, entry in enumerate(drawn)
    )
    sections = []
    for number, panel in enumerate(panels):
        entry, hidden = panel.entry, "" if panel.entry.shown else " hidden"
        sections.append(
            f'<section class="panel" data-panel="{number}" '
            f'data-of="{drawn.index(entry)}"{hidden}>'
            f"<header><h3>{escape(_full_name(entry))}</h3>"
            f"<span>{escape(_facts(panel))}</span>"
            '<span class="note"></span></header>'
            '<div class="box"><canvas class="lanes"></canvas>'
            '<div class="frame" hidden></div></div></section>'
        )
    return (
        '<section id="timelines" tabindex="0"><h2>Timelines</h2><div class="tools">'
        + (f"<div>{buttons}</div>" if len(drawn) > 1 else "")
        + f'<div><span class="legend">{_legend(panels)}</span>'
        '<span class="keys">'
        '<button type="button" data-show="path" aria-pressed="false">critical path'
        "</button>"
        '<button type="button" data-show="messages" aria-pressed="false">messages'
        "</button>"
        '<button type="button" data-show="memory" aria-pressed="true">memory</button>'
        '<button type="button" data-zoom="-" aria-label="zoom out">&minus;</button>'
        '<button type="button" data-zoom="+" aria-label="zoom in">+</button>'
        '<button type="button" data-zoom="0">all</button></span></div>'
        '<div><canvas id="axis" height="24"></canvas></div></div>'
        f"{''.join(sections)}</section>"
    )


def _facts(panel: Panel) -> str:
    entry, kind, timeline = panel.entry, panel.kind, panel.timeline
    of, share = waste(timeline)
    facts = [f"{of} {share:.2%}", f"{step_time(timeline):.6g} from start to end"]
    if len(entry.timelines) > 1:
        facts.insert(0, kind)
    if kind == "measured" and (times := entry.times_by_kind()):
        ratios = (
            f"{name} {measured / simulated:.3f}"
            for name, (simulated, measured) in times.items()
        )
        facts.append(f"measured / simulated: {', '.join(ratios)}")
        errors = entry.errors_by_kind().items()
        parts = (f"{name} {time:.3g} and {start:.3g}" for name, (time, start) in errors)
        facts.append(f"mean error of times and of starts: {', '.join(parts)}")
    return " \N{MIDDLE DOT} ".join(facts)


def _legend(panels: Iterable[Panel]) -> str:
    marks = legend_of(box for panel in panels for box in panel.drawing.boxes)
    return "".join(
        f'<span><i class="{mark.pattern}" style="background-color:{mark.colour}"></i>'
        f"{escape(mark.label)}</span>"
        for mark in marks
    )


def _full_name(entry: PageEntry) -> str:
    return f"{entry.name}, {entry.group}" if entry.group else entry.name
