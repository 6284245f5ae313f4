"""Pictures of timelines and of modes, by matplotlib: svg, png, pdf, and in notebooks.

    ZBH1   2 stages, 3 micro-batches        bubble rate 9.09 %
    stage 0  |F F F B W B ...
    stage 1  |  F B F B W ...
              0    5    10

One row a stage, one box a job with its micro-batch number where it fits. Grey is idle
time within a stage's span: the bubble. Memory over time goes below.
"""

import io
import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zbpp.core import Costs, RequestError, Timeline, format_memory
from zbpp.core.files import write_file
from zbpp.simulator.boxes import (
    DARK,
    PALETTE,
    Drawing,
    Memory,
    drawings_of,
    ink_on,
    legend_of,
)
from zbpp.simulator.metrics import takes_timelines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")

Points = Mapping[str, tuple[float, float]]
Series = Mapping[str, Sequence[tuple[int, float]]]

_POINTS = 72.0  # of an inch
_WIDEST = 18.0  # inches
_JOB_INCHES = 0.215  # of a typical job, if the picture is not too wide then
_MEMORY_POINTS = 80.0  # height
_LETTER = 0.6  # width of a letter, in font sizes
_THINNEST = 4.0  # points of a box that has an outline
_SMALLEST = 4.5  # points of the font of a number
_AT_ONCE = 0.002  # of a picture's width: a validation that takes no time

_MUTED, _LINE = "#555555", "#dddddd"
_OF_A_PAGE = {DARK: "ink", _MUTED: "muted", _LINE: "line", PALETTE["idle"]: "idle"}
"""Names of a page's colours, which are others in the dark."""
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_SVG: Any = {"svg.fonttype": "none", "svg.hashsalt": "zbpp"}


@takes_timelines
def plot(
    timeline: Timeline | Sequence[Timeline],
    path: str | Path | None = None,
    *,
    costs: Costs | None = None,
    time_unit: str = "",
    colors: Mapping[str, str] | None = None,
    font: str = "sans-serif",
    font_size: float = 9.0,
    size: tuple[float, float] | None = None,
) -> "Figure":
    """Draw timelines below one another on one time axis.

    Above each stand its mode, sizes, bubble rate and peak; at the top a legend.

    Args:
        timeline: simulated or measured.
        path: of a file to write: .svg, .png or .pdf.
        costs: of the schedule; adds the peak of the memory to the title and, for one
            timeline, memory over time below.
        time_unit: for the label of the time axis.
        colors: as ``#rrggbb``, by kind of job (``F``, ``B``, ``W``, ``BW``, ``O``,
            ``V``, ...) and for ``idle``; later chunks of a stage are lighter.
        font: family of all texts.
        font_size: in points.
        size: width and height in inches; None: wide enough for the numbers in boxes.

    Returns:
        A figure of matplotlib, with axes for each timeline and for the memory;
        notebooks show it.

    Raises:
        RequestError: matplotlib is missing, the suffix names no known format, the file
            cannot be written, or a colour is for no kind of job.
    """
    _check_matplotlib()
    if path is not None:
        check_suffix(path)
    from matplotlib import rc_context

    drawings, palette = drawings_of(timeline, costs), _palette(colors)
    length = max(drawing.length for drawing in drawings) or 1.0
    most = max(drawing.n_stages for drawing in drawings)
    row = min(30.0, max(10.0, 430.0 / most))  # points
    heights = [drawing.n_stages * row for drawing in drawings]
    memory = drawings[0].memory if len(drawings) == 1 else None
    heights += [_MEMORY_POINTS] * (memory is not None)
    if size is None:
        typical = min(drawing.typical for drawing in drawings) or 1.0
        width = min(max(_JOB_INCHES * length / typical + 1.2, 8.0), _WIDEST)
        texts = 3.8 * len(drawings) + 8.0
        size = width, (sum(heights) + texts * font_size) / _POINTS
    how: Any = {"font.family": font, "font.size": font_size, "text.color": DARK}
    with rc_context(how | {"axes.titlesize": font_size}):
        figure = _figure(size)
        panels = figure.subplots(
            len(heights), sharex=True, squeeze=False, height_ratios=heights
        )[:, 0]
        for axes in panels:
            axes.set_xlim(0, length)
            axes.spines[:].set_visible(False)
            axes.tick_params(length=0, colors=DARK)
        for axes, drawing in zip(panels, drawings, strict=False):
            _draw_rows(axes, drawing, palette, inches=size[0])
            stages = range(0, drawing.n_stages, math.ceil(font_size / row))
            axes.set_yticks([x + 0.5 for x in stages], [f"stage {x}" for x in stages])
            axes.set_title(_title(drawing), loc="left", pad=4)
        if memory is not None:
            _draw_memory(panels[-1], memory)
        panels[-1].set_xlabel(f"time ({time_unit})" if time_unit else "time")
        panels[-1].tick_params(axis="x", length=3)
        _draw_legend(figure, drawings, palette, font_size)
        figure.draw_without_rendering()  # places the axes
        for axes, drawing in zip(panels, drawings, strict=False):
            _write_numbers(axes, drawing, palette, font_size)
    if path is not None:
        _write(figure, path)
    return figure


def _palette(colors: Mapping[str, str] | None) -> dict[str, str]:
    for kind, colour in (colors or {}).items():
        if kind not in PALETTE:
            raise RequestError(
                f"colors has {kind!r}; the kinds are {', '.join(PALETTE)}"
            )
        if not re.fullmatch(r"#[0-9a-fA-F]{6}", colour):
            raise RequestError(f"colors has {colour!r} for {kind}; write #rrggbb")
    return PALETTE | dict(colors or {})


def _draw_rows(
    axes: "Axes", drawing: Drawing, palette: Mapping[str, str], *, inches: float
) -> None:
    """Draw the idle time within each stage's span, and above it the boxes."""
    axes.set_ylim(drawing.n_stages, 0)
    top, height = drawing.lanes[0]
    for stage, (start, end) in drawing.spans.items():
        axes.broken_barh(
            [(start, end - start)], (stage + top, height), color=palette["idle"], lw=0
        )
    length = drawing.length or 1.0
    is_outlined = drawing.typical * inches * _POINTS / length > _THINNEST
    lines = groupby(drawing.boxes, key=lambda box: (box.stage, box.lane))
    for (stage, lane), line in lines:
        boxes = list(line)
        top, height = drawing.lanes[lane]
        axes.broken_barh(
            [
                (x.start, max(x.duration, _AT_ONCE * length * x.style.at_once))
                for x in boxes
            ],
            (stage + top, height),
            facecolors=[box.style.colour_in(palette) for box in boxes],
            edgecolors="white" if is_outlined else "none",
            linewidths=0.6,
        )


def _title(drawing: Drawing) -> str:
    timeline, n_stages = drawing.timeline, drawing.n_stages
    sizes = f"{n_stages} stages, {timeline.n_microbatches} micro-batches"
    return f"{timeline.name}   {sizes}\n{drawing.facts}"


def _draw_memory(axes: "Axes", memory: Memory) -> None:
    axes.set_ylim(0, memory.top)
    axes.set_yticks(list(memory.labels), list(memory.labels.values()))
    axes.set_ylabel("memory")
    axes.axhspan(0, memory.base, color=PALETTE["idle"], lw=0)
    axes.axhline(0, color=_MUTED, lw=1)
    for colour, points in memory.curves.items():
        axes.plot(*zip(*points, strict=True), color=colour, lw=1.4)
    if memory.limit is not None:
        axes.axhline(memory.limit, color=DARK, lw=1, ls="--")


def _draw_legend(
    figure: "Figure",
    drawings: Sequence[Drawing],
    palette: Mapping[str, str],
    font_size: float,
) -> None:
    from matplotlib.patches import Patch

    marks = legend_of([box for x in drawings for box in x.boxes], palette)
    widest = max(map(len, marks)) * _LETTER + 3.5
    n_columns = int(figure.get_figwidth() * _POINTS / (widest * font_size))
    figure.legend(
        handles=[Patch(color=colour, label=text) for text, colour in marks.items()],
        loc="outside upper left",
        ncols=max(1, n_columns),
        frameon=False,
        handlelength=1.0,
        handleheight=1.0,
        columnspacing=1.0,
    )


def _write_numbers(
    axes: "Axes", drawing: Drawing, palette: Mapping[str, str], font_size: float
) -> None:
    """Write micro-batches into the boxes that have room for them."""
    place, dpi = axes.get_window_extent(), axes.get_figure(root=True).dpi  # type: ignore[union-attr]
    left, right = axes.get_xlim()
    per_unit = place.width / dpi * _POINTS / (right - left)
    top, height = drawing.lanes[0]
    highest = 0.8 * height * place.height / dpi * _POINTS / drawing.n_stages
    for box in drawing.boxes:
        if not box.text:
            continue
        room = box.duration * per_unit / max(1.15, 0.7 * len(box.text))
        size = min(font_size, highest, room)
        if size >= _SMALLEST:
            axes.text(
                (box.start + box.end) / 2,
                box.stage + top + height / 2,
                box.text,
                color=ink_on(box.style.colour_in(palette)),
                fontsize=size,
                ha="center",
                va="center_baseline",
                clip_on=True,
            )


def plot_comparison(
    points: Points,
    series: Series,
    path: str | Path | None = None,
    *,
    limit: float | None = None,
) -> "Figure":
    """Draw bubble against memory and against micro-batches, side by side.

    Modes at one place, or of one line, share a mark and an entry of the legend.

    Args:
        points: for each mode its peak memory and bubble rate (0 to 1).
        series: for each mode pairs of micro-batches and bubble rate.
        path: of a file to write: .svg, .png or .pdf.
        limit: of the memory, a dashed line.

    Returns:
        A figure of matplotlib with axes for each chart that has data.

    Raises:
        RequestError: matplotlib is missing, the suffix names no known format, or
            the file cannot be written.
    """
    _check_matplotlib()
    if path is not None:
        check_suffix(path)
    from matplotlib import rc_context

    n_charts = bool(points) + bool(series)
    how: Any = {"font.size": 9.0, "text.color": DARK, "axes.edgecolor": DARK}
    with rc_context(how | {"axes.labelcolor": DARK}):
        figure = _figure((5.8 * n_charts, 4.2))
        charts = list(figure.subplots(1, n_charts, squeeze=False)[0])
        for axes in charts:
            axes.set_title("bubble rate (%)", loc="left", fontsize=9)
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.grid(axis="y", color=_LINE)
            axes.set_axisbelow(True)
            axes.tick_params(length=0, colors=DARK)
        if points:
            axes = charts[0]
            axes.set_prop_cycle(color=_COLOURS * 5, marker=list("os^Dv") * 6)
            for ((memory, rate),), modes in _grouped(
                {mode: [point] for mode, point in points.items()}
            ):
                axes.plot(memory, 100 * rate, ls="", label=modes)
            if limit is not None:
                axes.axvline(limit, color=DARK, lw=1, ls="--")
            axes.set_xlabel("peak memory of a stage")
            axes.set_xlim(left=0)
            axes.xaxis.set_major_formatter(lambda amount, _: format_memory(amount))
        if series:
            axes = charts[-1]
            dashes = [dash for dash in ("-", "--", ":") for _ in _COLOURS]
            axes.set_prop_cycle(color=_COLOURS * 3, linestyle=dashes)
            for line, modes in _grouped(series):
                percent = [100 * rate for _, rate in line]
                axes.plot([m for m, _ in line], percent, label=modes, lw=1.6)
            axes.set_xscale("log", base=2)
            counts = sorted({m for line in series.values() for m, _ in line})
            axes.set_xticks(counts, [str(m) for m in counts])
            axes.set_xlabel("micro-batches in a step")
        for axes in charts:
            axes.set_ylim(bottom=0)
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    if path is not None:
        _write(figure, path)
    return figure


def _grouped(
    lines: Mapping[str, Sequence[tuple[float, float]]],
) -> list[tuple[tuple[tuple[float, float], ...], str]]:
    """Different lines, and the names of those whose numbers are these."""
    groups: dict[tuple[tuple[float, float], ...], list[str]] = {}
    for name, line in lines.items():
        groups.setdefault(tuple((x, round(y, 6)) for x, y in line), []).append(name)
    return [(line, ", ".join(names)) for line, names in groups.items()]


def _figure(size: tuple[float, float]) -> "Figure":
    """A figure that notebooks show, whether pyplot is imported or not."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    figure._repr_svg_ = partial(svg_element, figure, {})  # type: ignore[attr-defined]
    return figure


def svg_element(figure: "Figure", colours: Mapping[str, str] | None = None) -> str:
    """The figure as an SVG element; by default in the colours and font of a page."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context(_SVG):
        figure.savefig(
            buffer, format="svg", transparent=colours is None, metadata={"Date": None}
        )
    text = buffer.getvalue()
    if colours is None:
        colours = {colour: f"var(--{name})" for colour, name in _OF_A_PAGE.items()}
    for colour, name in colours.items():
        text = text.replace(colour.lower(), name)
    return text[text.index("<svg") :]


def _check_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise RequestError(
            f"pictures need matplotlib ({error}); install it: pip install "
            "'zbpp[viz]', or write .html, which needs nothing"
        ) from None


def check_suffix(path: str | Path) -> None:
    """Check the name of a picture's file.

    Raises:
        RequestError: it ends like none of `FORMATS`, or matplotlib is missing.
    """
    if Path(path).suffix.lower().lstrip(".") not in FORMATS:
        endings = ", ".join(f".{name}" for name in FORMATS)
        raise RequestError(
            f"{path}: the name of a picture must end in {endings}; the commands also "
            "write pages (.html)"
        )
    _check_matplotlib()


def _write(figure: "Figure", path: str | Path) -> None:
    """Write a figure into a file, the same bytes each time."""
    from matplotlib import rc_context

    suffix = Path(path).suffix.lower().lstrip(".")
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    buffer = io.BytesIO()
    with rc_context(_SVG):
        figure.savefig(buffer, format=suffix, dpi=160, metadata=dates.get(suffix))
    write_file(path, buffer.getvalue())
