"""One HTML file with tables, charts and timelines that needs no network.

page.js draws the timelines, zooms, and highlights the micro-batch under the pointer;
page.css has the colours in light and in dark.
"""

import base64
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from zbpp.core import Costs, RequestError, Timeline
from zbpp.core.files import write_file
from zbpp.simulator.boxes import (
    LOOKS,
    PALETTE,
    Drawing,
    drawings_of,
    ink_on,
    legend_of,
)
from zbpp.simulator.metrics import takes_timelines
from zbpp.simulator.plot import plot_comparison, svg_element

if TYPE_CHECKING:
    import rich.table

_COLOURS = PALETTE | {"idle": "var(--idle)"}
_DIGITS = 6  # of a time, as a share of the longest timeline


@takes_timelines
def write_page(
    timelines: Timeline | Sequence[Timeline],
    path: str | Path,
    *,
    costs: Costs | Sequence[Costs | None] | None = None,
    above: Sequence[str] = (),
    title: str = "Pipeline schedules",
    subtitle: str = "",
    command: str = "",
    time_unit: str = "",
) -> None:
    """Write timelines, simulated or measured, as one page.

    Args:
        timelines: on one time axis; the first four are open.
        path: the file to write.
        costs: add the memory of the stages below; a sequence has costs, or None, for
            each timeline.
        above: elements above the timelines, such as tables (`Table.html`) and charts
            (`charts_html`).
        title: the heading.
        subtitle: the comparison, such as sizes, costs, hardware and versions.
        command: the command that repeats the page.
        time_unit: of all times.

    Raises:
        RequestError: the file cannot be written, or costs do not fit the placement of
            their timeline.
    """
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="muted">{escape(subtitle)}</p>' * bool(subtitle),
        f'<div class="tools"><code id="command">{escape(command)}</code>'
        '<button type="button" id="copy">copy</button></div>' * bool(command),
        *above,
        timelines_html(timelines, costs),
        '<footer>Written by zbpp.</footer><div id="tip" hidden></div>',
    ]
    style, script = map(_resource, ("page.css", "page.js"))
    text = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n<title>'
        f"{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n"
        f'<body data-unit="{escape(time_unit)}">\n{chr(10).join(filter(None, body))}\n'
        f'<script>\n"use strict";\n{script}showTimelines();\n</script>\n'
        "</body>\n</html>\n"
    )
    write_file(path, text)


def charts_html(
    points: Mapping[str, tuple[float, float]],
    series: Mapping[str, Sequence[tuple[int, float]]],
    *,
    limit: float | None = None,
) -> str:
    """Write the charts of `plot_comparison`, or a note that matplotlib is missing."""
    try:
        figure = plot_comparison(points, series, limit=limit)
    except RequestError as error:
        return f'<p class="muted">No charts: {escape(str(error))}.</p>'
    return f'<div class="wide">{svg_element(figure)}</div>'


def timelines_html(
    timelines: Timeline | Sequence[Timeline],
    costs: Costs | Sequence[Costs | None] | None = None,
) -> str:
    """Write legend and buttons, and the timelines as data that page.js draws.

    Raises:
        RequestError: costs do not fit the placement of their timeline.
    """
    drawings = drawings_of(timelines, costs)
    if not drawings:
        return ""
    length = max(drawing.length for drawing in drawings) or 1.0
    unit = 10.0 ** (math.floor(math.log10(length)) - _DIGITS)
    data = {
        "unit": unit,
        "length": length,
        "panels": [_panel(drawing, unit) for drawing in drawings],
    }
    packed = zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 9)
    boxes = [box for drawing in drawings for box in drawing.boxes]
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{escape(text)}</span>'
        for text, colour in legend_of(boxes, _COLOURS).items()
    )
    return (
        '<h2>Timelines</h2><p class="muted">Ctrl and wheel, or + and -: zoom. Drag: '
        "pan. Double click, or 0: everything.</p>"
        f'<div class="tools"><span class="legend">{legend}</span>'
        '<button type="button" id="trace" title="sends the jobs to ui.perfetto.dev in '
        'a new tab">open in Perfetto</button></div><div id="timelines"></div>'
        f'<script type="text/plain" id="packed">{base64.b64encode(packed).decode()}'
        "</script>"
    )


def _panel(drawing: Drawing, unit: float) -> dict[str, Any]:
    """A timeline as values for JSON; times in multiples of a unit."""
    styles = sorted({box.style for box in drawing.boxes})
    colours = [style.colour_in(PALETTE) for style in styles]
    panel: dict[str, Any] = {
        "name": drawing.timeline.name,
        "facts": f"{drawing.facts}, {drawing.length:.6g} from start to end",
        "stages": drawing.n_stages,
        "lanes": drawing.lanes,
        "spans": [[stage, *span] for stage, span in drawing.spans.items()],
        "styles": [
            {
                "colour": colour,
                "ink": ink_on(colour),
                "about": LOOKS[style.role].summary,
                "least": 2 * style.at_once,  # pixels
            }
            for style, colour in zip(styles, colours, strict=True)
        ],
        "lines": [],
    }
    for (lane, stage), line in groupby(drawing.boxes, lambda x: (x.lane, x.stage)):
        boxes, end, gaps, times = list(line), 0, [], []
        for box in boxes:
            gaps.append(round(box.start / unit) - end)
            times.append(round(box.duration / unit))
            end += gaps[-1] + times[-1]
        panel["lines"].append(
            {
                "stage": stage,
                "lane": lane,
                "gaps": gaps,
                "times": times,
                "styles": [styles.index(box.style) for box in boxes],
                "names": [box.name for box in boxes],
            }
        )
    memory = drawing.memory
    if memory is not None:
        panel["memory"] = {
            "top": memory.top,
            "base": memory.base,
            "limit": memory.limit,
            "labels": [*memory.labels.items()],
            "curves": [
                (colour, [(_rounded(time), _rounded(size)) for time, size in points])
                for colour, points in memory.curves.items()
            ],
        }
    return panel


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _resource(name: str) -> str:
    return files("zbpp.simulator").joinpath(name).read_text(encoding="utf-8")


# ---- Tables.


@dataclass(frozen=True)
class _Row:
    """The cells of a row; a note replaces all but the first of them."""

    cells: Sequence[str]
    look: Literal["", "bold", "dim"] = ""
    note: str = ""


@dataclass
class Table:
    """Texts under heads; all columns but the first ``left`` are justified right."""

    heads: Sequence[str]
    title: str = ""
    caption: str = ""
    left: int = 1
    rows: list[_Row] = field(default_factory=list)

    def add(
        self, *cells: str, look: Literal["", "bold", "dim"] = "", note: str = ""
    ) -> None:
        """Append a row."""
        self.rows.append(_Row(cells, look, note))

    def for_terminal(self) -> "rich.table.Table":
        """The table as rich prints it; a row with a note has dashes, and no note."""
        from rich.table import Table as RichTable

        table = RichTable(
            title=self.title or None,
            caption=self.caption or None,
            title_justify="left",
            caption_justify="left",
        )
        for number, head in enumerate(self.heads):
            table.add_column(head, overflow="fold", no_wrap=number < self.left)
            if number >= self.left:
                table.columns[-1].justify = "right"
        for row in self.rows:
            missing = len(self.heads) - len(row.cells)
            filled = ["-" if row.note else ""] * missing
            table.add_row(*row.cells, *filled, style=row.look or None)
        return table

    def html(self) -> str:
        """The table as elements of a page, its title above it."""
        head = "".join(f'<th scope="col">{escape(name)}</th>' for name in self.heads)
        body = "".join(map(self._html_row, self.rows))
        return (
            f'<h2>{escape(self.title)}</h2><div class="wide"><table>'
            f"<caption>{escape(self.caption)}</caption>"
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )

    def _html_row(self, row: _Row) -> str:
        name, *others = map(escape, row.cells)
        cells = "".join(f"<td>{cell}</td>" for cell in others)
        if row.note:
            short = escape(row.note.partition(";")[0])
            cells = (
                f'<td class="why" colspan="{len(self.heads) - 1}" '
                f'title="{escape(row.note)}">{short}</td>'
            )
        look = f' class="{row.look}"' if row.look else ""
        return f'<tr{look}><th scope="row">{name}</th>{cells}</tr>'
