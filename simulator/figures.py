"""Figures of matplotlib; `zbpp.simulator.plot` has the functions that users call."""

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cycler import cycler
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from zbpp.core import Costs, Timeline, format_memory
from zbpp.simulator.boxes import (
    DARK,
    IDLE,
    Drawing,
    Memory,
    Rectangle,
    ink_on,
    legend_of,
)
from zbpp.simulator.metrics import peak_memory, waste

__all__ = ["draw_comparison", "draw_timelines", "svg_element"]

_POINTS = 72.0  # of an inch
_WIDEST = 18.0  # inches
_JOB_INCHES = 0.215  # of a typical job, if the picture is not too wide then
_MEMORY_POINTS = 80.0  # height
_LETTER = 0.6  # width of a letter, in font sizes
_THINNEST = 4.0  # points of a box that has an outline
_SMALLEST = 4.5  # points of the font of a number

_CYCLE = cycler(linestyle=["-", "--", ":"]) * cycler(
    color=["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
)
_MUTED, _LINE = "#555555", "#dddddd"
_OF_A_PAGE = {DARK: "ink", _MUTED: "muted", _LINE: "line", IDLE: "idle"}
"""Names of a page's colours, which are others in the dark."""


class _Picture(Figure):
    """A figure that notebooks show, whether pyplot is imported or not."""

    def _repr_svg_(self) -> str:
        return svg_element(self, {})


def svg_element(figure: Figure, colours: Mapping[str, str] | None = None) -> str:
    """The figure as an SVG element; by default in the colours and font of a page."""
    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "zbpp"}):
        figure.savefig(
            buffer, format="svg", transparent=colours is None, metadata={"Date": None}
        )
    text = buffer.getvalue()
    if colours is None:
        colours = {colour: f"var(--{name})" for colour, name in _OF_A_PAGE.items()}
    for colour, name in colours.items():
        text = text.replace(colour.lower(), name)
    return text[text.index("<svg") :]


def draw_timelines(
    drawings: Sequence[Drawing],
    *,
    costs: Costs | None,
    palette: Mapping[str, str],
    time_unit: str,
    font: str,
    font_size: float,
    size: tuple[float, float] | None,
    has_titles: bool,
    has_legend: bool,
) -> Figure:
    """Draw timelines, and the memory of one, for `zbpp.simulator.plot`."""
    length = max(drawing.length for drawing in drawings) or 1.0
    most = max(drawing.n_stages for drawing in drawings)
    row = min(30.0, max(10.0, 430.0 / most))  # points
    has_memory = costs is not None and len(drawings) == 1
    heights = [drawing.n_stages * row for drawing in drawings]
    heights += [_MEMORY_POINTS] * has_memory
    if size is None:
        typical = min(drawing.typical for drawing in drawings) or 1.0
        width = min(max(_JOB_INCHES * length / typical + 1.2, 8.0), _WIDEST)
        texts = 2.6 * len(drawings) * has_titles + 4.0 + 4.0 * has_legend
        size = width, (sum(heights) + texts * font_size) / _POINTS
    how: Any = {"font.family": font, "font.size": font_size, "text.color": DARK}
    with rc_context(how | {"axes.titlesize": font_size}):
        figure = _Picture(figsize=size, layout="constrained")
        panels = figure.subplots(
            len(heights), sharex=True, squeeze=False, height_ratios=heights
        )[:, 0]
        for axes, drawing in zip(panels, drawings, strict=False):
            _style(axes, length)
            _draw_rows(axes, drawing, palette)
            _label_stages(axes, drawing.n_stages, row, font_size)
            if has_titles:
                _write_title(axes, drawing.timeline, costs, font_size, size[0])
        if costs is not None and has_memory:
            _style(panels[-1], length)
            _draw_memory(panels[-1], Memory(drawings[0].timeline, costs))
        panels[-1].set_xlabel(f"time ({time_unit})" if time_unit else "time")
        panels[-1].tick_params(axis="x", length=3)
        if has_legend:
            _draw_legend(figure, drawings, palette, font_size)
        figure.draw_without_rendering()  # places the axes
        for axes, drawing in zip(panels, drawings, strict=False):
            _write_numbers(axes, drawing, palette, font_size)
    return figure


def _style(axes: Axes, length: float) -> None:
    axes.set_xlim(0, length)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, colors=DARK)


def _draw_rows(axes: Axes, drawing: Drawing, palette: Mapping[str, str]) -> None:
    axes.set_ylim(drawing.n_stages, 0)
    rectangles = list(drawing.rectangles(palette))
    ground = [x for x in rectangles if x.box is None]
    boxes = [x for x in rectangles if x.box is not None]
    styles = [x.box.style for x in boxes if x.box is not None]
    again = [x for x, style in zip(boxes, styles, strict=True) if style.recomputes]
    strips = [x.strip._replace(colour=palette["F"]) for x in again]
    width = axes.figure.get_figwidth() * _POINTS  # type: ignore[union-attr]
    is_outlined = drawing.typical * width / (drawing.length or 1.0) > _THINNEST
    for group, edge in ((ground, "none"), (boxes, "white"), (strips, "none")):
        outline = edge if is_outlined else "none"
        axes.add_collection(
            PolyCollection(
                [_corners(x) for x in group],
                facecolors=[x.colour for x in group],
                edgecolors=outline,
                linewidths=0.6,
            )
        )
    lines = [
        x
        for x, style in zip(boxes, styles, strict=True)
        if style.at_once and not x.width
    ]
    axes.vlines(
        [x.x for x in lines],
        [x.y for x in lines],
        [x.y + x.height for x in lines],
        colors=[x.colour for x in lines],
        linewidths=2.0,
    )


def _corners(at: Rectangle) -> list[tuple[float, float]]:
    left, top, right, bottom = at.x, at.y, at.x + at.width, at.y + at.height
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _label_stages(axes: Axes, n_stages: int, row: float, font_size: float) -> None:
    stages = range(0, n_stages, math.ceil(font_size / row))
    axes.set_yticks([x + 0.5 for x in stages], [f"stage {x}" for x in stages])


def _write_title(
    axes: Axes, timeline: Timeline, costs: Costs | None, font_size: float, inches: float
) -> None:
    """Name and sizes, and the figures: on one line if both fit."""
    measure, share = waste(timeline)
    facts = [f"{measure} {100 * share:.2f} %"]
    if costs is not None:
        peak = max(peak_memory(timeline, costs))
        unit = " M_B" if costs.m_b == 1.0 else ""
        facts.append(f"peak memory {format_memory(float(f'{peak:.4g}'))}{unit}")
    n_stages, m = timeline.placement.n_stages, timeline.n_microbatches
    name = f"{timeline.name}   {n_stages} stages, {m} micro-batches"
    figures = "    ".join(facts)
    n_letters = (inches * _POINTS - 7 * font_size) / (_LETTER * font_size)
    if len(name) + len(figures) < n_letters:
        axes.set_title(figures, loc="right", pad=4)
        axes.set_title(name, loc="left", pad=4, fontweight="bold")
    else:
        axes.set_title(f"{name}\n{figures}", loc="left", pad=4)


def _draw_memory(axes: Axes, memory: Memory) -> None:
    axes.set_ylim(0, memory.top)
    axes.set_yticks(list(memory.labels), list(memory.labels.values()))
    axes.set_ylabel("memory")
    axes.axhspan(0, memory.base, color=IDLE, lw=0)
    axes.axhline(0, color=_MUTED, lw=1)
    for colour, points in memory.curves.items():
        axes.plot(*zip(*points, strict=True), color=colour, lw=1.4)
    if memory.limit is not None:
        axes.axhline(memory.limit, color=DARK, lw=1, ls="--")


def _draw_legend(
    figure: Figure,
    drawings: Iterable[Drawing],
    palette: Mapping[str, str],
    font_size: float,
) -> None:
    marks = legend_of([box for x in drawings for box in x.boxes], palette)
    handles = [
        Patch(fc=x.colour, ec=palette["F"] if x.is_strip else "none", label=x.label)
        for x in marks
    ]
    widest = max(len(mark.label) for mark in marks) * _LETTER + 3.5
    n_columns = int(figure.get_figwidth() * _POINTS / (widest * font_size))
    figure.legend(
        handles=handles,
        loc="outside upper left",
        ncols=max(1, n_columns),
        frameon=False,
        handlelength=1.0,
        handleheight=1.0,
        columnspacing=1.0,
    )


def _write_numbers(
    axes: Axes, drawing: Drawing, palette: Mapping[str, str], font_size: float
) -> None:
    """Write micro-batches into the boxes that have room for them."""
    place, dpi = axes.get_window_extent(), axes.get_figure(root=True).dpi  # type: ignore[union-attr]
    left, right = axes.get_xlim()
    per_unit = place.width / dpi * _POINTS / (right - left)
    row = place.height / dpi * _POINTS / drawing.n_stages
    for x, y, width, height, colour, box in drawing.rectangles(palette):
        if box is None or not box.text:
            continue
        room = width * per_unit / max(1.15, 0.7 * len(box.text))
        size = min(font_size, 0.8 * height * row, room)
        if size >= _SMALLEST:
            axes.text(
                x + width / 2,
                y + height / 2,
                box.text,
                color=ink_on(colour),
                fontsize=size,
                ha="center",
                va="center_baseline",
                clip_on=True,
            )


# ---- Modes.


def draw_comparison(
    points: Mapping[str, tuple[float, float]],
    series: Mapping[str, Sequence[tuple[int, float]]],
    *,
    chosen: str,
    unit: str,
    limit: float | None,
) -> Figure:
    """Draw both charts for `zbpp.simulator.plot_comparison`.

    Modes at one place, or of one line, share a mark and an entry of the legend.
    """
    n_charts = bool(points) + bool(series)
    how: Any = {"font.size": 9.0, "text.color": DARK, "axes.edgecolor": DARK}
    with rc_context(how | {"axes.labelcolor": DARK}):
        figure = _Picture(figsize=(5.8 * n_charts, 4.2), layout="constrained")
        charts = list(figure.subplots(1, n_charts, squeeze=False)[0])
        for axes in charts:
            axes.set_title("bubble rate (%)", loc="left", fontsize=9)
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.grid(axis="y", color=_LINE)
            axes.set_axisbelow(True)
            axes.set_prop_cycle(_CYCLE)
            axes.tick_params(length=0, colors=DARK)
        if points:
            axes = charts.pop(0)
            _scatter(axes, points, chosen, limit)
            axes.set_xlabel("peak memory of a stage" + (f" ({unit})" if unit else ""))
            axes.set_xlim(left=0)
        if series:
            axes = charts.pop(0)
            for line, modes in _grouped(series).items():
                percent = [100 * rate for _, rate in line]
                axes.plot([m for m, _ in line], percent, label=modes, lw=1.6)
            axes.set_xscale("log", base=2)
            counts = sorted({m for line in series.values() for m, _ in line})
            axes.set_xticks(counts, [str(m) for m in counts])
            axes.set_xlabel("micro-batches in a step")
        for axes in figure.axes:
            axes.set_ylim(bottom=0)
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return figure


def _scatter(
    axes: Axes,
    points: Mapping[str, tuple[float, float]],
    chosen: str,
    limit: float | None,
) -> None:
    places = {mode: [at] for mode, at in points.items()}
    for number, ((at,), modes) in enumerate(_grouped(places).items()):
        memory, rate = at
        marker = "os^Dv"[number % 5]
        (dot,) = axes.plot(memory, 100 * rate, marker, label=modes)
        if chosen in modes.split(", "):
            dot.set(markersize=10, markeredgecolor=DARK, markeredgewidth=1.5)
    if limit is not None:
        axes.axvline(limit, color=DARK, lw=1, ls="--")


def _grouped(lines: Mapping[str, Sequence[Any]]) -> dict[tuple[Any, ...], str]:
    """Names of those whose numbers are the same, by these."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, line in lines.items():
        groups.setdefault(tuple((x, round(y, 6)) for x, y in line), []).append(name)
    return {line: ", ".join(names) for line, names in groups.items()}
