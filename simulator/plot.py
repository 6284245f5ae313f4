"""A timeline as a picture by matplotlib: png, svg or pdf.

One row a stage, one box a job with its micro-batch number where it fits. Grey is idle
time within a stage's span: the bubble. Boxes too thin to be seen give way to bands:
the share of each kind in a moving window of several jobs, so that the phases of a
schedule are seen, and no moire of its bars. Memory over time goes below.

    F F F F F F B W F B W F B W      FFFFFFFFF\\___FFFFFFF
                                              \\__BBBBBBB
                                               \\_WWWWWWW
"""

import io
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from zbpp.core import Costs, RequestError, Timeline, format_memory, passes_in
from zbpp.core.files.json_text import write_file
from zbpp.simulator.arguments import takes_timelines
from zbpp.simulator.boxes import (
    DARK,
    PALETTE,
    Box,
    Drawing,
    Style,
    by_style,
    ink_on,
    legend_of,
    origin_of,
)
from zbpp.simulator.metrics import (
    memory_over_time,
    memory_scale,
    peak_memory,
    step_time,
    waste,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

__all__ = ["FORMATS", "figure_bytes", "picture_suffix", "plot"]

FORMATS = ("png", "svg", "pdf")

# Sizes are in inches, but for those in points (72 of an inch) and in rows.
_MEMORY_HEIGHT = 1.5
_WIDEST = 18.0
_POINTS = 72.0
_HALF_ROW = 0.43  # rows; what is left is the space between stages
_JOBS_SHARE = 0.71  # of a row, for lane 0 where a stage has others too
_LARGEST_FONT, _SMALLEST_FONT = 9.0, 4.5  # points
_DIGIT_WIDTH = 0.7  # of the font size, with some air
_THINNEST = 2.5  # points; where the typical box is thinner, bands take its place
_BAND_JOBS = 12  # typical jobs in the window of a band: whole rounds of 2, 3, 4 or 6
_BAND_POINTS = 901  # of a band's outline, along its row
_HATCH = "////"
_TITLE_PAD = 6.0  # points
_NUMBER = "_number"  # label of the texts in boxes


@takes_timelines
def plot(
    timeline: Timeline | Sequence[Timeline],
    target: "str | Path | Axes | Iterable[Axes]",
    *,
    costs: Costs | None = None,
    time_unit: str = "",
    colors: Mapping[str, Any] | None = None,
    title: bool = True,
    legend: bool = True,
    bands: bool | None = None,
) -> "Figure":
    """Draw a timeline into a file (png, svg, pdf by its suffix) or on axes.

    Fonts follow matplotlib's ``font.family`` and ``font.size``. The patches of each
    kind of job are one collection, whose ``gid`` is the kind and the place of the
    chunk on its stage: ``F 0``. `zbpp.simulator.page` writes pages to zoom in.

    Args:
        timeline: simulated or measured; several are drawn below one another on one
            time axis.
        target: the file to write, or axes to draw on: one for each timeline. Axes that
            share their time axis show the longest timeline whole.
        costs: of the schedule; adds the peak of the memory to the title and, for one
            timeline in a file, memory over time below.
        time_unit: for the label of the time axis.
        colors: in matplotlib's notation, by kind of job (``F``, ``B``, ``W``, ``BW``,
            ``O``, ``V``, ...) and for ``idle``; later chunks of a stage are lighter.
        title: write mode, sizes, bubble rate and peak above each timeline.
        legend: explain the colours above the first timeline.
        bands: draw shares of a moving window instead of boxes; None: where boxes are
            too thin.

    Returns:
        The figure, for further changes.

    Raises:
        RequestError: matplotlib is missing, the suffix names no known format, the file
            cannot be written, axes and timelines differ in number, or a colour is for
            no kind of job.
    """
    suffix = picture_suffix(target) if isinstance(target, str | Path) else ""
    timelines = [timeline] if isinstance(timeline, Timeline) else timeline
    look = _Look(_palette(colors), title, legend, bands)
    drawings = [Drawing(line) for line in timelines]
    if not isinstance(target, str | Path):
        panels = _panels(target)
        if len(panels) != len(drawings):
            raise RequestError(
                f"{len(drawings)} timelines cannot be drawn on {len(panels)} axes; "
                "give each timeline its axes, or the name of a file"
            )
        if time_unit:
            panels[-1].set_xlabel(f"time ({time_unit})")
        return _draw_on(panels, drawings, costs, look)
    with_memory = costs is not None and len(drawings) == 1
    figure, panels = _layout(drawings, look, with_memory=with_memory)
    if costs is not None and with_memory:
        _draw_memory(panels[-1], timelines[0], costs)
    for axes in panels[:-1]:
        axes.tick_params(axis="x", length=0)
        axes.spines["bottom"].set_visible(False)
    panels[-1].set_xlabel(f"time ({time_unit})" if time_unit else "time")
    _draw_on(panels[: len(drawings)], drawings, costs, look)
    write_file(target, figure_bytes(figure, suffix))
    return figure


class _Look(NamedTuple):
    """What the caller may choose."""

    palette: Mapping[str, str]
    title: bool
    legend: bool
    bands: bool | None

    def of(self, style: Style) -> str:
        return style.colour_in(self.palette)


def _palette(colors: Mapping[str, Any] | None) -> dict[str, str]:
    if not colors:
        return PALETTE
    from matplotlib.colors import to_hex

    for kind in colors:
        if kind not in PALETTE:
            raise RequestError(
                f"colors has {kind!r}; the kinds are {', '.join(PALETTE)}"
            )
    return PALETTE | {kind: to_hex(colour) for kind, colour in colors.items()}


def _panels(target: "Axes | Iterable[Axes]") -> "list[Axes]":
    from matplotlib.axes import Axes

    return [target] if isinstance(target, Axes) else list(target)


def _layout(
    drawings: Sequence[Drawing], look: _Look, *, with_memory: bool
) -> "tuple[Figure, list[Axes]]":
    """Lay out a figure whose boxes are wide enough for their numbers, if it can."""
    from matplotlib.figure import Figure

    length = max(step_time(drawing.timeline) for drawing in drawings)
    typical = min(drawing.typical for drawing in drawings) or 1.0
    labels = [str(entry.get_label()) for entry in _legend(drawings, look)]
    legend = 1.2 + sum(0.37 + 0.065 * len(label) for label in labels) * _font_scale()
    width = min(max(0.215 * length / typical + 1.2, 8.0, legend), _WIDEST)
    stages = [drawing.timeline.placement.n_stages for drawing in drawings]
    heights = [max(n * min(0.42, max(0.16, 6.0 / n)), 0.8) for n in stages]
    heights += [_MEMORY_HEIGHT] * with_memory
    height = sum(heights) + 0.55 * len(drawings) + 0.6
    figure = Figure((width, height), layout="constrained")
    panels = figure.subplots(
        len(heights), 1, sharex=True, height_ratios=heights, squeeze=False
    )
    return figure, list(panels[:, 0])


def _draw_on(
    panels: "Sequence[Axes]",
    drawings: Sequence[Drawing],
    costs: Costs | None,
    look: _Look,
) -> "Figure":
    figure = panels[0].get_figure(root=True)
    assert figure is not None
    length = max(step_time(drawing.timeline) for drawing in drawings) or 1.0
    for axes, drawing in zip(panels, drawings, strict=True):
        _set_limits(axes, drawing, length)
    _run_layout(figure)  # how wide a box is decides how it is drawn
    for axes, drawing in zip(panels, drawings, strict=True):
        _draw_timeline(axes, drawing, look)
    above = 0.0
    if look.legend:
        above = _write_legend(panels[0], _legend(drawings, look))
    if look.title:
        for axes, drawing in zip(panels, drawings, strict=True):
            pad = above if axes is panels[0] else 0.0
            _write_title(axes, drawing.timeline, costs, pad=pad + _TITLE_PAD)
    _run_layout(figure)
    for axes, drawing in zip(panels, drawings, strict=True):
        _write_texts(axes, drawing, look)
    return figure


def _run_layout(figure: "Figure") -> None:
    """Move the axes to where they will be drawn."""
    if engine := figure.get_layout_engine():
        engine.execute(figure)


def _set_limits(axes: "Axes", drawing: Drawing, length: float) -> None:
    """Show a timeline whole, and what is drawn already on the same time axis."""
    n_stages = drawing.timeline.placement.n_stages
    same = axes.get_shared_x_axes().get_siblings(axes)
    shown = [other.get_xlim() for other in same if other.has_data()]
    lefts, rights = zip((0.0, length), *shown, strict=True)
    left, right = min(lefts), max(rights)
    for other in same:
        before = other.get_xlim()
        _shrink_texts(other, (before[1] - before[0]) / (right - left))
    axes.set_xlim(left, right)
    axes.set_ylim(n_stages - 0.5, -0.5)
    axes.set_yticks(range(n_stages), [f"stage {stage}" for stage in range(n_stages)])


def _shrink_texts(axes: "Axes", ratio: float) -> None:
    """Let the texts of boxes fit when their boxes become less wide."""
    for text in axes.texts:
        if text.get_label() == _NUMBER and ratio < 1.0:
            size = float(text.get_fontsize()) * ratio
            text.set_fontsize(size)
            text.set_visible(size >= _SMALLEST_FONT)


def _write_legend(axes: "Axes", handles: "Sequence[Patch]") -> float:
    """Write the legend above the axes, and return its height in points.

    It takes as many rows as fit the width of the axes.
    """
    from matplotlib.transforms import offset_copy

    figure = axes.get_figure(root=True)
    font = 9 * _font_scale()
    above = offset_copy(axes.transAxes, figure, y=5, units="points")
    for n_columns in range(len(handles), 0, -1):
        legend = axes.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(0.0, 1.0),
            bbox_transform=above,
            borderpad=0,
            borderaxespad=0,
            ncols=n_columns,
            frameon=False,
            fontsize=font,
            handlelength=1.0,
            handleheight=1.0,
            columnspacing=1.4,
            handletextpad=0.5,
        )
        if legend.get_window_extent().width <= axes.get_window_extent().width:
            break
    n_rows = -(-len(handles) // n_columns)
    return font * (2.0 + 1.5 * (n_rows - 1))


def _draw_timeline(axes: "Axes", drawing: Drawing, look: _Look) -> None:
    """Draw one row a stage and one box a job, or bands; grey is idle time."""
    top, bottom = _extent(0, drawing.n_lanes)
    idle = [
        _rectangle(*span, stage + top, stage + bottom)
        for stage, span in enumerate(drawing.spans)
        if span is not None
    ]
    _add_shapes(axes, idle, facecolors=look.palette["idle"], linewidths=0, gid="idle")
    boxes: list[Box] = drawing.boxes
    in_bands = 0 < drawing.typical * _points(axes)[0] < _THINNEST
    if in_bands if look.bands is None else look.bands:
        work = [box for box in boxes if box.lane == 0 and box.is_work]
        _draw_bands(axes, drawing, work, look)
        boxes = [box for box in boxes if box.lane or not box.is_work]
    _draw_boxes(axes, boxes, drawing.n_lanes, look)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_boxes(axes: "Axes", boxes: Sequence[Box], n_lanes: int, look: _Look) -> None:
    """Draw boxes of one style as one thing: ten thousand then draw in seconds."""
    shortest = min((box.duration for box in boxes if box.end > box.start), default=1.0)
    edge = min(0.8, 0.1 * _points(axes)[0] * shortest)
    extents = [_extent(lane, n_lanes) for lane in range(n_lanes)]
    for style, members in by_style(boxes).items():
        shapes = [
            _rectangle(box.start, box.end, box.stage + top, box.stage + bottom)
            for box in members
            for top, bottom in [extents[box.lane]]
        ]
        _add_shapes(
            axes,
            shapes,
            facecolors=look.of(style),
            edgecolors="white",
            linewidths=edge,
            hatch=_HATCH if style.is_hatched else None,
            gid=f"{style.role} {style.leg}{' recomputed' if style.is_hatched else ''}",
        )
        instants = [box for box in members if box.end == box.start]
        if instants and style.at_once:
            axes.vlines(
                [box.start for box in instants],
                [box.stage - 0.5 for box in instants],
                [box.stage + 0.5 for box in instants],
                colors=look.of(style),
                linewidths=2,
                gid=f"{style.role} instants",
            )


def _draw_bands(
    axes: "Axes", drawing: Drawing, boxes: Sequence[Box], look: _Look
) -> None:
    """Draw the share of each style in a moving window; what is left is idle."""
    import numpy as np  # comes with matplotlib

    window = _BAND_JOBS * drawing.typical
    top, bottom = _extent(0, drawing.n_lanes)
    members: dict[tuple[int, Style], list[Box]] = defaultdict(list)
    for box in boxes:
        members[box.stage, box.style].append(box)
    shapes: dict[Style, list[Any]] = {style: [] for style in by_style(boxes)}
    for stage, span in enumerate(drawing.spans):
        if span is None or span[0] == span[1]:
            continue
        times = np.linspace(*span, _BAND_POINTS)
        low, high = (np.clip(times + d, *span) for d in (-window / 2, window / 2))
        upper = np.full_like(times, stage + top)
        for style, outlines in shapes.items():
            style_boxes = members[stage, style]
            ends = np.array([(b.start, b.end) for b in style_boxes] or [span]).ravel()
            spent = np.cumsum([(0.0, b.duration) for b in style_boxes] or [(0.0, 0.0)])
            in_window = np.interp(high, ends, spent) - np.interp(low, ends, spent)
            lower = upper + in_window / (high - low) * (bottom - top)
            edges = [np.column_stack((times, y)) for y in (upper, lower)]
            outlines.append(np.concatenate((edges[0], edges[1][::-1])))
            upper = lower
    for style, outlines in shapes.items():
        gid = f"{style.role} {style.leg} bands"
        _add_shapes(axes, outlines, facecolors=look.of(style), linewidths=0, gid=gid)


def _add_shapes(axes: "Axes", shapes: Sequence[Any], **look: Any) -> None:
    from matplotlib.collections import PolyCollection

    axes.add_collection(PolyCollection(shapes, **look))


def _rectangle(
    start: float, end: float, top: float, bottom: float
) -> list[tuple[float, float]]:
    return [(start, top), (end, top), (end, bottom), (start, bottom)]


def _extent(lane: int, n_lanes: int) -> tuple[float, float]:
    """Top and bottom of a lane in its row, whose middle is 0; lane 0 is the widest."""
    if n_lanes == 1:
        return -_HALF_ROW, _HALF_ROW
    jobs = 2 * _HALF_ROW * _JOBS_SHARE
    if lane == 0:
        return -_HALF_ROW, jobs - _HALF_ROW
    each = (2 * _HALF_ROW - jobs) / (n_lanes - 1)
    top = jobs - _HALF_ROW + (lane - 1) * each
    return top + 0.05, top + each


def _write_texts(axes: "Axes", drawing: Drawing, look: _Look) -> None:
    """Write its text into every box that is wide enough for it."""
    per_unit, per_row = _points(axes)
    digits = len(str(drawing.timeline.n_microbatches - 1))
    top, bottom = _extent(0, drawing.n_lanes)
    largest = min(_LARGEST_FONT * _font_scale(), 0.7 * (bottom - top) * per_row)
    boxes = [box for box in drawing.boxes if box.text]
    for style, members in by_style(boxes).items():
        durations = sorted(box.duration for box in members)
        n_numbers = max(1, len(passes_in(members[0].job)))  # two in a pair
        letters = n_numbers * (digits + 1) - 1
        font = durations[len(durations) // 2] * per_unit / (_DIGIT_WIDTH * letters)
        if font < _SMALLEST_FONT:
            continue
        font, ink = min(font, largest), ink_on(look.of(style))
        for box in members:
            if box.duration * per_unit < 0.99 * _DIGIT_WIDTH * font * len(box.text):
                continue
            axes.text(
                (box.start + box.end) / 2,
                box.stage + (top + bottom) / 2,
                box.text,
                color=ink,
                fontsize=font,
                ha="center",
                va="center_baseline",
                clip_on=True,
                label=_NUMBER,
            )


def _write_title(
    axes: "Axes", timeline: Timeline, costs: Costs | None, *, pad: float
) -> None:
    measure, share = waste(timeline)
    facts = [f"{measure} {100 * share:.2f} %"]
    if costs is not None:
        peak = max(peak_memory(timeline, costs))
        unit = " M$_B$" if costs.m_b == 1.0 else ""
        amount = format_memory(float(f"{peak:.4g}"))
        facts.append(f"peak memory {amount}{unit}")
    sizes = (
        f"{timeline.placement.n_stages} stages, {timeline.n_microbatches} micro-batches"
    )
    left = f"{timeline.name}   {sizes}"
    font = 11 * _font_scale()
    name = axes.set_title(left, loc="left", fontsize=font, fontweight="bold", pad=pad)
    numbers = axes.set_title("    ".join(facts), loc="right", fontsize=font, pad=pad)
    if name.get_window_extent().x1 + font > numbers.get_window_extent().x0:
        name.set_text(f"{left}\n")  # one above the other


def _legend(drawings: Iterable[Drawing], look: _Look) -> "list[Patch]":
    from matplotlib.patches import Patch

    boxes = (box for drawing in drawings for box in drawing.boxes)
    return [
        Patch(
            facecolor=mark.colour,
            edgecolor="white" if mark.pattern == "hatched" else mark.colour,
            linewidth=0,
            hatch=_HATCH if mark.pattern == "hatched" else None,
            label=mark.label,
        )
        for mark in legend_of(boxes, look.palette)
    ]


def _draw_memory(axes: "Axes", timeline: Timeline, costs: Costs) -> None:
    """Draw memory over time, one curve a stage, above what is there all the time.

    GiB |     _      _              a pass may hold more inside than it leaves
        |  __| |____| |__ ______
        | |                     |
        |_|_____________________|_  dotted: fixed of a stage; grey: of all stages
        |#########################
    """
    from matplotlib import colormaps

    origin, n_stages = origin_of(timeline), timeline.placement.n_stages
    most = max(peak_memory(timeline, costs))
    name, unit = memory_scale(most, [costs])
    fixed = [amount / unit for amount in costs.on(timeline.placement).fixed]
    for stage, curve in enumerate(memory_over_time(timeline, costs)):
        # Of changes at the same time, the last one counts: no zero-width spikes.
        held = {0.0: fixed[stage]}
        held |= {time - origin: amount / unit for time, amount in curve}
        held.setdefault(step_time(timeline), fixed[stage])
        color = colormaps["viridis"](0.88 * stage / max(n_stages - 1, 1))
        times, amounts = list(held.keys()), list(held.values())
        label = f"stage {stage}"
        axes.step(times, amounts, where="post", color=color, lw=1.4, label=label)
        if fixed[stage]:
            axes.axhline(fixed[stage], color=color, linewidth=0.8, linestyle=":")
    if any(fixed):
        axes.axhspan(0, min(fixed), color="#dddddd", linewidth=0, label="fixed")
    if isinstance(costs.memory_limit, int | float):
        axes.axhline(costs.memory_limit / unit, color=DARK, linewidth=1, linestyle="--")
    axes.margins(x=0)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"memory ({name.replace('M_B', 'M$_B$')})" if name else "memory")
    axes.spines[["top", "right"]].set_visible(False)
    if n_stages <= 8:
        axes.legend(
            loc="upper right",
            fontsize=8 * _font_scale(),
            ncols=2,
            frameon=False,
            handlelength=1.2,
        )


def _font_scale() -> float:
    """Of the user's font size to matplotlib's default."""
    from matplotlib import rcParams

    return float(rcParams["font.size"]) / 10


def _points(axes: "Axes") -> tuple[float, float]:
    """Size of a unit of time, and of a row."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    extent, scale = axes.get_window_extent(), _POINTS / figure.dpi
    return extent.width * scale / (right - left), extent.height * scale / (bottom - top)


def picture_suffix(path: str | Path) -> str:
    """Return the format that a file's name asks for.

    Raises:
        RequestError: it is none of `FORMATS`, or matplotlib is missing.
    """
    suffix = Path(path).suffix.lower().lstrip(".")
    if suffix not in FORMATS:
        endings = ", ".join(f".{name}" for name in FORMATS)
        raise RequestError(
            f"{path}: the name of a picture must end in {endings}; the commands also "
            "write pages (.html)"
        )
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise RequestError(
            f"plots need matplotlib ({error}); install it: pip install 'zbpp[viz]', "
            "or write a page (.html), which needs nothing"
        ) from None
    return suffix


def figure_bytes(figure: "Figure", suffix: str) -> bytes:
    """A figure as the content of a file, the same bytes each time."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(suffix)
    with rc_context({"svg.hashsalt": "zbpp", "svg.fonttype": "none"}):
        figure.savefig(buffer, format=suffix, dpi=160, metadata=metadata)
    return buffer.getvalue()
