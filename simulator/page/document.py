"""The page: tables, charts and timelines in one HTML file that needs nothing else."""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from zbpp.core.files.json_text import write_file
from zbpp.simulator.charts import comparison_figure
from zbpp.simulator.page.entry import PageEntry, modes_table, unit_of_memory
from zbpp.simulator.page.panels import Panel, panels_data, panels_html
from zbpp.simulator.plot import figure_bytes

__all__ = ["write_page"]

_SCRIPTS = ("timeline.js", "view.js")
_FEWEST_POINTS = 3  # of a chart: two modes are compared in the table
_NO_CHARTS = (
    '<p class="muted">The charts of this page need matplotlib: '
    "pip install 'zbpp[viz]'.</p>"
)

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
    """Write entries as one page; without matplotlib it has no charts, and says so.

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
    panels = [Panel(entry, kind) for entry in entries for kind in entry.timelines]
    data = json.dumps(panels_data(entries, panels, time_unit), separators=(",", ":"))
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="muted">{escape(subtitle)}</p>' if subtitle else "",
        _command(command) if command else "",
        *_tables(entries, time_unit, by_microbatches or {}),
        panels_html(entries, panels) if panels else "",
        "<footer>Written by zbpp. Ctrl and wheel, or + and -: zoom. Drag, or the arrow "
        "keys: pan. Double click, or 0: everything. A click on a job lets its "
        "micro-batch stand out.</footer>",
        '<div id="tip" hidden></div>',
    ]
    harmless = data.replace("<", "\\u003c")  # cannot end the element it stands in
    script = "\n".join(map(_beside, _SCRIPTS)) if panels else ""
    text = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n<title>'
        f"{escape(title)}</title>\n<style>\n{_beside('page.css')}</style>\n</head>\n"
        f"<body>\n{chr(10).join(filter(None, body))}\n"
        f'<script type="application/json" id="data">{harmless}</script>\n'
        f'<script>\n"use strict";\n{script}</script>\n</body>\n</html>\n'
    )
    write_file(path, text)


def _command(command: str) -> str:
    return (
        f'<div class="command"><code id="command">{escape(command)}</code>'
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
    if find_spec("matplotlib") is None:
        return _NO_CHARTS
    limits = {entry.limit for entry in entries if entry.limit is not None}
    figure = comparison_figure(
        points,
        series,
        unit=unit,
        limit=limits.pop() / size if len(limits) == 1 else None,
    )
    picture = base64.b64encode(figure_bytes(figure, "svg")).decode("ascii")
    return (
        '<div class="wide"><img class="charts" alt="bubble rates of the modes against '
        'their memory, and against micro-batches" '
        f'src="data:image/svg+xml;base64,{picture}"></div>'
    )


def _beside(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
