"""One HTML file with tables, charts and timelines that needs no network.

page.js zooms, and highlights the micro-batch under the pointer; page.css has the
colours in light and in dark.
"""

import base64
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from zbpp.core import RequestError, Timeline
from zbpp.core.files.json_text import write_file
from zbpp.simulator.boxes import (
    LOOKS,
    PALETTE,
    Drawing,
    Memory,
    Rectangle,
    ink_on,
    legend_of,
)
from zbpp.simulator.entries import PageEntry, modes_table, unit_of_memory
from zbpp.simulator.metrics import step_time, waste
from zbpp.simulator.plot import plot_comparison
from zbpp.simulator.svg import area, bars, curve

__all__ = ["charts_html", "tables_html", "timelines_html", "write_page"]

_FEWEST_POINTS = 3  # of a chart: two modes are compared in the table
_COLOURS = PALETTE | {"idle": "var(--idle)"}
_MEMORY_HEIGHT = 84  # pixels, as in page.css
_MICROBATCH = re.compile(r"(?<=[A-Z])\d+")  # in the name of a job

Series = Mapping[str, Sequence[tuple[int, float]]]


def write_page(
    entries: Sequence[PageEntry],
    path: str | Path,
    *,
    title: str = "Pipeline schedules",
    subtitle: str = "",
    command: str = "",
    time_unit: str = "",
    by_microbatches: Series | None = None,
) -> None:
    """Write entries as one page.

    Args:
        entries: rows of the table; of the timelines, simulated stands above measured.
        path: the file to write.
        title: the heading.
        subtitle: what was compared, such as sizes, costs, hardware and versions.
        command: what repeats the page, to be copied from it.
        time_unit: of all times.
        by_microbatches: for each mode pairs of m and bubble rate, for a chart.

    Raises:
        RequestError: the file cannot be written, or the costs of an entry do not
            fit its placement.
    """
    timelines = timelines_html(entries)
    packed = base64.b64encode(zlib.compress(timelines.encode(), 9)).decode("ascii")
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="muted">{escape(subtitle)}</p>' if subtitle else "",
        _command(command) if command else "",
        *tables_html(entries, time_unit, by_microbatches or {}),
        '<div id="timelines"></div>',
        '<footer>Written by zbpp.</footer><div id="tip" hidden></div>',
        f'<script type="text/plain" id="packed">{packed}</script>' if timelines else "",
    ]
    text = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n<title>'
        f"{escape(title)}</title>\n<style>\n{_resource('page.css')}</style>\n</head>\n"
        f'<body data-unit="{escape(time_unit)}">\n'
        f"{chr(10).join(filter(None, body))}\n"
        f'<script>\n"use strict";\n{_resource("page.js")}</script>\n</body>\n</html>\n'
    )
    write_file(path, text)


def _command(command: str) -> str:
    return (
        f'<div class="tools"><code id="command">{escape(command)}</code>'
        '<button type="button" id="copy">copy</button></div>'
    )


def tables_html(
    entries: Sequence[PageEntry], time_unit: str = "", series: Series | None = None
) -> Iterator[str]:
    """Write a table and the charts of each group; those over m stand with the first."""
    for group in dict.fromkeys(entry.group for entry in entries):
        members = [entry for entry in entries if entry.group == group]
        yield f"<h2>{escape(group) or 'Modes'}</h2>"
        table = modes_table(members, time_unit=time_unit)
        yield f'<div class="wide">{table.html()}</div>'
        yield _charts(members, (series or {}) if group == entries[0].group else {})


def _charts(entries: Sequence[PageEntry], series: Series) -> str:
    """Both charts as one picture, if there is enough to be seen."""
    unit, size = unit_of_memory(entries)
    points = {
        entry.name: (entry.peak / size, entry.bubble)
        for entry in entries
        if entry.peak is not None and entry.bubble is not None
    }
    if len(points) < _FEWEST_POINTS:
        points = {}
    if not points and not series:
        return ""
    limits = {entry.limit for entry in entries if entry.limit is not None}
    limit = limits.pop() / size if len(limits) == 1 else None
    return charts_html(points, series, unit=unit, limit=limit)


def charts_html(
    points: Mapping[str, tuple[float, float]],
    series: Series,
    *,
    unit: str = "",
    limit: float | None = None,
) -> str:
    """Write what `plot_comparison` draws; without matplotlib, what is missing."""
    try:
        figure = plot_comparison(points, series, unit=unit, limit=limit)
    except RequestError as error:
        return f'<p class="muted">No charts: {escape(str(error))}.</p>'
    from zbpp.simulator.figures import svg_element

    return f'<div class="wide">{svg_element(figure)}</div>'


def timelines_html(entries: Sequence[PageEntry]) -> str:
    """Write legend, buttons, and the timelines of entries, which page.js reads.

    Raises:
        RequestError: the costs of an entry do not fit its placement.
    """
    panels = [
        (entry, kind, Drawing(timeline))
        for entry in entries
        for kind, timeline in entry.timelines.items()
    ]
    if not panels:
        return ""
    boxes = [box for _, _, drawing in panels for box in drawing.boxes]
    length = max(drawing.length for _, _, drawing in panels) or 1.0
    legend = "".join(
        f'<span><i style="background:{_ground(mark.colour, mark.is_strip)}"></i>'
        f"{escape(mark.label)}</span>"
        for mark in legend_of(boxes, _COLOURS)
    )
    sections = (_panel(*panel, length) for panel in panels)
    return (
        '<h2>Timelines</h2><p class="muted">Ctrl and wheel, or + and -: zoom. Drag: '
        "pan. Double click, or 0: everything.</p>"
        f'<div class="tools"><span class="legend">{legend}</span>'
        '<button type="button" id="trace" title="sends the jobs to ui.perfetto.dev in '
        'a new tab">open in Perfetto</button></div>' + "".join(sections)
    )


def _ground(colour: str, is_strip: bool) -> str:
    return f"linear-gradient({colour} 75%, {PALETTE['F']} 75%)" if is_strip else colour


def _panel(entry: PageEntry, kind: str, drawing: Drawing, length: float) -> str:
    timeline, n_stages = drawing.timeline, drawing.n_stages
    row = (
        24 if n_stages <= 8 else 19 if n_stages <= 16 else 15 if n_stages <= 32 else 11
    )
    height = n_stages * row
    labels = [
        _label(4 + (stage + 0.5) * row, f"stage {stage}") for stage in range(n_stages)
    ]
    lanes = area("lanes", length, n_stages, _shapes(drawing), f"height:{height}px")
    below = ""
    if entry.costs is not None:
        memory = Memory(timeline, entry.costs)
        below = area("memory", length, memory.top, _curves(memory))
        labels += [
            _label(14 + height + (1 - amount / memory.top) * _MEMORY_HEIGHT, text)
            for amount, text in memory.labels.items()
        ]
    return (
        f'<details class="panel" data-stages="{n_stages}" data-length="{length:.7g}"'
        f"{' open' * entry.shown}><summary><b>{escape(entry.title)}</b> "
        f"{escape(_facts(entry, kind, timeline))}</summary>"
        f'<div class="plot">{"".join(labels)}{lanes}{below}'
        '<svg class="over"></svg></div></details>'
    )


def _shapes(drawing: Drawing) -> Iterator[str]:
    """The rows of a timeline; boxes of one name are one shape.

    Its data are the name with * for micro-batches, these, and the colour of letters.
    """
    groups: dict[tuple[str, object], list[Rectangle]] = defaultdict(list)
    for rectangle in drawing.rectangles(_COLOURS):
        box = rectangle.box
        name = "" if box is None else _MICROBATCH.sub("*", box.name)
        groups[name, box and (box.style, box.lane)].append(rectangle)
    for key, group in groups.items():
        (name, _), (*_, colour, box) = key, group[0]
        rows = [rectangle[:4] for rectangle in group]
        if box is None:
            yield bars(colour, rows)
            continue
        numbers = (" ".join(map(str, x.box.microbatches)) for x in group if x.box)
        labels = {
            "name": name,
            "numbers": ",".join(numbers),
            "about": LOOKS[box.style.role].summary,
            "ink": ink_on(colour) if box.text else "",
        }
        yield bars(colour, rows, labels)
        if box.style.recomputes:
            yield bars(PALETTE["F"], [rectangle.strip[:4] for rectangle in group])
        if box.style.at_once:
            for x, y, width, height in rows:
                if not width:
                    yield curve(colour, [(x, y), (x, y + height)], 2.0)


def _curves(memory: Memory) -> Iterator[str]:
    if memory.base:
        ground = 0.0, memory.top - memory.base, memory.length, memory.base
        yield bars("var(--idle)", [ground])
    for colour, points in memory.curves.items():
        yield curve(colour, [(time, memory.top - held) for time, held in points])
    if memory.limit is not None:
        y = memory.top - memory.limit
        yield curve("var(--ink)", [(0.0, y), (memory.length, y)], 1.0, "5 4")


def _label(top: float, text: str) -> str:
    return f'<span class="label" style="top:{top:.5g}px">{escape(text)}</span>'


def _facts(entry: PageEntry, kind: str, timeline: Timeline) -> str:
    of, share = waste(timeline)
    facts = [f"{of} {share:.2%}", f"{step_time(timeline):.6g} from start to end"]
    if len(entry.timelines) > 1:
        facts.insert(0, kind)
    if kind == "measured" and entry.simulated is not None:
        simulated, measured = map(_times_by_kind, (entry.simulated, timeline))
        ratios = (
            f"{name} {measured[name] / time:.3f}"
            for name, time in simulated.items()
            if time > 0 and name in measured
        )
        facts.append(f"measured / simulated: {', '.join(ratios)}")
    return " \N{MIDDLE DOT} ".join(facts)


def _times_by_kind(timeline: Timeline) -> dict[str, float]:
    """Time of all jobs of each kind."""
    times: dict[str, float] = {}
    for row in timeline.rows:
        for slot in row:
            kind = str(slot.job.kind)
            times[kind] = times.get(kind, 0.0) + slot.duration
    return times


def _resource(name: str) -> str:
    return files("zbpp.simulator").joinpath(name).read_text(encoding="utf-8")
