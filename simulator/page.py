"""One HTML file with tables, charts and timelines that needs no network.

page.js zooms, and highlights the micro-batch under the pointer; page.css has the
colours in light and in dark.
"""

import base64
import zlib
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from zbpp.core import Timeline
from zbpp.core.files.json_text import write_file
from zbpp.simulator.boxes import PALETTE, Drawing, legend_of
from zbpp.simulator.charts import plot_comparison
from zbpp.simulator.entries import PageEntry, modes_table, unit_of_memory
from zbpp.simulator.metrics import step_time, waste
from zbpp.simulator.plot import memory_labels, memory_shapes, timeline_shapes
from zbpp.simulator.svg import PAGE, Area, area

__all__ = ["timelines_html", "write_page"]

_FEWEST_POINTS = 3  # of a chart: two modes are compared in the table
_COLOURS = PALETTE | {"idle": "idle"}  # that of the page's style
_MEMORY_HEIGHT = 84  # pixels, as in page.css

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
        *_tables(entries, time_unit, by_microbatches or {}),
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


def _tables(
    entries: Sequence[PageEntry], time_unit: str, series: Series
) -> Iterator[str]:
    """A table and the charts of each group; those over m stand with the first one."""
    for group in dict.fromkeys(entry.group for entry in entries):
        members = [entry for entry in entries if entry.group == group]
        yield f"<h2>{escape(group) or 'Modes'}</h2>"
        table = modes_table(members, time_unit=time_unit)
        yield f'<div class="wide">{table.html()}</div>'
        yield _charts(members, series if group == entries[0].group else {})


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
    picture = plot_comparison(points, series, unit=unit, limit=limit)
    return f'<div class="wide">{picture.svg(PAGE, "inherit")}</div>'


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
    length = max(step_time(drawing.timeline) for _, _, drawing in panels) or 1.0
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
    colour = PAGE.get(colour, colour)
    return f"linear-gradient({colour} 75%, {PALETTE['F']} 75%)" if is_strip else colour


def _panel(entry: PageEntry, kind: str, drawing: Drawing, length: float) -> str:
    timeline = drawing.timeline
    n_stages = timeline.placement.n_stages
    row = (
        24 if n_stages <= 8 else 19 if n_stages <= 16 else 15 if n_stages <= 32 else 11
    )
    shapes = timeline_shapes(drawing, _COLOURS)
    height = n_stages * row
    labels = [
        _label(4 + (stage + 0.5) * row, f"stage {stage}") for stage in range(n_stages)
    ]
    view = (0.0, 0.0, length, float(n_stages))
    lanes = area(Area(0, 0, 0, 0, view, shapes), PAGE, "lanes")
    lanes = lanes.replace("<svg", f'<svg style="height:{height}px"', 1)
    memory = ""
    if entry.costs is not None:
        top, curves = memory_shapes(timeline, entry.costs)
        memory = area(Area(0, 0, 0, 0, (0.0, 0.0, length, top), curves), PAGE, "memory")
        labels += [
            _label(14 + height + (1 - amount / top) * _MEMORY_HEIGHT, text)
            for text, amount in memory_labels(timeline, entry.costs)
        ]
    return (
        f'<details class="panel" data-stages="{n_stages}" data-length="{length:.7g}"'
        f"{' open' * entry.shown}><summary><b>{escape(entry.title)}</b> "
        f"{escape(_facts(entry, kind, timeline))}</summary>"
        f'<div class="plot">{"".join(labels)}{lanes}{memory}'
        '<svg class="over"></svg></div></details>'
    )


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
