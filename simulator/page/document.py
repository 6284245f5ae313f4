"""The page: table, charts and timelines in one HTML file that needs nothing else."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from zbpp.core import RequestError
from zbpp.simulator.page.charts import bubble_and_memory, bubble_and_microbatches
from zbpp.simulator.page.entry import PageEntry, memory_unit
from zbpp.simulator.page.panels import panels_data, panels_html
from zbpp.simulator.page.table import modes_table

__all__ = ["page_data", "page_text", "write_page"]

_SCRIPTS = ("data.js", "draw.js", "view.js", "controls.js")
_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.S)

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
    """Write entries as one page; `page_text` tells of the arguments.

    Raises:
        RequestError: the file cannot be written, or costs or memory of an entry do not
            fit its placement.
    """
    text = page_text(
        entries,
        title=title,
        subtitle=subtitle,
        command=command,
        time_unit=time_unit,
        by_microbatches=by_microbatches,
    )
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{path}: cannot be written: {error.strerror}") from None


def page_text(
    entries: Sequence[PageEntry],
    *,
    title: str = "Pipeline schedules",
    subtitle: str = "",
    command: str = "",
    time_unit: str = "",
    by_microbatches: Series | None = None,
) -> str:
    """Build the page.

    Args:
        entries: rows of the table; of the timelines, simulated stands above measured.
        title: the heading.
        subtitle: what was compared, such as sizes, costs, hardware and versions.
        command: what repeats the page, to be copied from it.
        time_unit: of all times.
        by_microbatches: for each mode pairs of m and bubble rate, for a chart.

    Raises:
        RequestError: costs or memory of an entry do not fit its placement.
    """
    panels = [(entry, name) for entry in entries for name in entry.timelines]
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
    style = _beside("page.css")
    script = "\n".join(map(_beside, _SCRIPTS)) if panels else ""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n{chr(10).join(filter(None, body))}\n"
        f'<script type="application/json" id="data">{_harmless(data)}</script>\n'
        f'<script>\n"use strict";\n{script}</script>\n</body>\n</html>\n'
    )


def page_data(text: str) -> dict[str, Any]:
    """Read back what a page was written from; `decode` reads its timelines.

    Raises:
        RequestError: the text is no page of ours.
    """
    match = _DATA.search(text)
    if match is None:
        raise RequestError("the text holds no page: there is no <script id=data>")
    data: dict[str, Any] = json.loads(match[1])
    return data


def _command(command: str) -> str:
    return (
        f'<div class="command"><code id="command">{escape(command)}</code>'
        '<button type="button" id="copy">copy</button></div>'
    )


def _tables(
    entries: Sequence[PageEntry], time_unit: str, series: Series
) -> Iterable[str]:
    for group in dict.fromkeys(entry.group for entry in entries):
        own = [entry for entry in entries if entry.group == group]
        yield f"<h2>{escape(group) or 'Modes'}</h2>"
        yield modes_table(own, time_unit=time_unit)
        charts = {"Bubble against memory": _memory_chart(own)}
        if group == entries[0].group and series:
            chart = bubble_and_microbatches(series, at=_microbatches(own))
            charts["Bubble against micro-batches"] = chart
        figures = "".join(
            f"<figure><h2>{name}</h2>{chart}</figure>"
            for name, chart in charts.items()
            if chart
        )
        if figures:
            yield f'<section class="charts">{figures}</section>'


def _memory_chart(entries: Sequence[PageEntry]) -> str:
    points = {
        entry.name: (entry.peak, entry.bubble)
        for entry in entries
        if entry.peak is not None and entry.bubble is not None
    }
    if len(points) < 3:
        return ""
    name, size = memory_unit(entries)
    limits = {entry.limit for entry in entries if entry.limit is not None}
    limit = limits.pop() / size if len(limits) == 1 else None
    scaled = {mode: (peak / size, rate) for mode, (peak, rate) in points.items()}
    return bubble_and_memory(scaled, unit=name, limit=limit)


def _microbatches(entries: Iterable[PageEntry]) -> int | None:
    found = {one.any_timeline.n_microbatches for one in entries if one.any_timeline}
    return found.pop() if len(found) == 1 else None


def _harmless(data: str) -> str:
    """JSON that cannot end the element it stands in."""
    return data.replace("<", "\\u003c")


def _beside(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
