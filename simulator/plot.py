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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zbpp.core import Costs, RequestError, Timeline, format_memory, passes_in
from zbpp.core.files.json_text import write_file
from zbpp.simulator.boxes import (
    DARK,
    IDLE,
    Box,
    Drawing,
    Style,
    by_style,
    legend_of,
    origin_of,
)
from zbpp.simulator.metrics import (
    memory_over_time,
    memory_unit,
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
_THINNEST = 4.0  # points; where the typical box is thinner, bands take its place
_BAND_JOBS = 12  # typical jobs in the window of a band: whole rounds of 2, 3, 4 or 6
_BAND_POINTS = 901  # of a band's outline, along its row
_HATCH = "////"


def plot(
    timeline: Timeline | Sequence[Timeline],
    target: "str | Path | Axes",
    *,
    costs: Costs | None = None,
    time_unit: str = "",
) -> "Figure":
    """Draw a timeline into a file (png, svg, pdf by its suffix) or on axes.

    `zbpp.simulator.page` writes pages to zoom in.

    Args:
        timeline: simulated or measured; several are drawn below one another on one
            time axis (into a file only).
        target: the file to write, or axes to draw the timeline on.
        costs: of the schedule; adds the peak of the memory to the title and, for one
            timeline in a file, memory over time below.
        time_unit: for the label of the time axis.

    Returns:
        The figure, for further changes.

    Raises:
        RequestError: matplotlib is missing, the suffix names no known format, or
            the file cannot be written.
    """
    suffix = picture_suffix(target) if isinstance(target, str | Path) else ""
    timelines = [timeline] if isinstance(timeline, Timeline) else timeline
    drawings = [Drawing(line) for line in timelines]
    if not isinstance(target, str | Path):
        return _draw_on([target], drawings, costs)
    with_memory = costs is not None and len(drawings) == 1
    figure, panels = _layout(drawings, with_memory=with_memory)
    if costs is not None and with_memory:
        _draw_memory(panels[-1], timelines[0], costs)
    for axes in panels[:-1]:
        axes.tick_params(axis="x", length=0)
        axes.spines["bottom"].set_visible(False)
    panels[-1].set_xlabel(f"time ({time_unit})" if time_unit else "time")
    _draw_on(panels[: len(drawings)], drawings, costs)
    write_file(target, figure_bytes(figure, suffix))
    return figure


def _layout(
    drawings: Sequence[Drawing], *, with_memory: bool
) -> "tuple[Figure, list[Axes]]":
    """Lay out a figure whose boxes are wide enough for their numbers, if it can."""
    from matplotlib.figure import Figure

    length = max(step_time(drawing.timeline) for drawing in drawings)
    typical = min(drawing.typical for drawing in drawings) or 1.0
    labels = [str(entry.get_label()) for entry in _legend(drawings)]
    legend = 1.2 + sum(0.37 + 0.065 * len(label) for label in labels)
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
    panels: "Sequence[Axes]", drawings: Sequence[Drawing], costs: Costs | None
) -> "Figure":
    from matplotlib.transforms import offset_copy

    figure = panels[0].get_figure(root=True)
    assert figure is not None
    for axes, drawing in zip(panels, drawings, strict=True):
        _draw_timeline(axes, drawing)
        pad = 24 if axes is panels[0] else 6
        _write_title(axes, drawing.timeline, costs, pad=pad)
    panels[0].set_xlim(
        0, max(step_time(drawing.timeline) for drawing in drawings) or 1.0
    )
    handles = _legend(drawings)
    above = offset_copy(panels[0].transAxes, figure, y=5, units="points")
    panels[0].legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        bbox_transform=above,
        borderpad=0,
        borderaxespad=0,
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        handlelength=1.0,
        handleheight=1.0,
        columnspacing=1.4,
        handletextpad=0.5,
    )
    figure.draw_without_rendering()  # only the finished layout tells what fits
    for axes, drawing in zip(panels, drawings, strict=True):
        _write_texts(axes, drawing)
    return figure


def _draw_timeline(axes: "Axes", drawing: Drawing) -> None:
    """Draw one row a stage and one box a job, or bands; grey is idle time."""
    n_stages = drawing.timeline.placement.n_stages
    axes.set_xlim(0, step_time(drawing.timeline) or 1.0)
    axes.set_ylim(n_stages - 0.5, -0.5)
    top, bottom = _extent(0, drawing.n_lanes)
    idle = [
        _rectangle(*span, stage + top, stage + bottom)
        for stage, span in enumerate(drawing.spans)
        if span is not None
    ]
    _add_shapes(axes, idle, facecolors=IDLE, linewidths=0, gid="idle")
    boxes: list[Box] = drawing.boxes
    if 0 < drawing.typical * _points(axes)[0] < _THINNEST:
        in_bands = [box for box in boxes if box.lane == 0 and box.is_work]
        _draw_bands(axes, drawing, in_bands)
        boxes = [box for box in boxes if box.lane or not box.is_work]
    _draw_boxes(axes, boxes, drawing.n_lanes)
    axes.set_yticks(range(n_stages), [f"stage {stage}" for stage in range(n_stages)])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_boxes(axes: "Axes", boxes: Sequence[Box], n_lanes: int) -> None:
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
            facecolors=style.colour,
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
                colors=style.colour,
                linewidths=2,
                gid=f"{style.role} instants",
            )


def _draw_bands(axes: "Axes", drawing: Drawing, boxes: Sequence[Box]) -> None:
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
        _add_shapes(axes, outlines, facecolors=style.colour, linewidths=0, gid=gid)


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


def _write_texts(axes: "Axes", drawing: Drawing) -> None:
    """Write its text into every box that is wide enough for it."""
    per_unit, per_row = _points(axes)
    digits = len(str(drawing.timeline.n_microbatches - 1))
    top, bottom = _extent(0, drawing.n_lanes)
    largest = min(_LARGEST_FONT, 0.7 * (bottom - top) * per_row)
    boxes = [box for box in drawing.boxes if box.text]
    for style, members in by_style(boxes).items():
        durations = sorted(box.duration for box in members)
        n_numbers = max(1, len(passes_in(members[0].job)))  # two in a pair
        letters = n_numbers * (digits + 1) - 1
        font = durations[len(durations) // 2] * per_unit / (_DIGIT_WIDTH * letters)
        if font < _SMALLEST_FONT:
            continue
        font = min(font, largest)
        for box in members:
            if box.duration * per_unit < 0.99 * _DIGIT_WIDTH * font * len(box.text):
                continue
            axes.text(
                (box.start + box.end) / 2,
                box.stage + (top + bottom) / 2,
                box.text,
                color=style.ink,
                fontsize=font,
                ha="center",
                va="center_baseline",
                clip_on=True,
            )


def _write_title(
    axes: "Axes", timeline: Timeline, costs: Costs | None, *, pad: float
) -> None:
    name, share = waste(timeline)
    facts = [f"{name} {100 * share:.2f} %"]
    if costs is not None:
        peak = max(peak_memory(timeline, costs))
        unit = " M$_B$" if costs.m_b == 1.0 else ""
        amount = format_memory(float(f"{peak:.4g}"), costs.memory_unit)
        facts.append(f"peak memory {amount}{unit}")
    sizes = (
        f"{timeline.placement.n_stages} stages, {timeline.n_microbatches} micro-batches"
    )
    left = f"{timeline.name}   {sizes}"
    axes.set_title(left, loc="left", fontsize=11, fontweight="bold", pad=pad)
    axes.set_title("    ".join(facts), loc="right", fontsize=11, pad=pad)


def _legend(drawings: Iterable[Drawing]) -> "list[Patch]":
    from matplotlib.patches import Patch

    return [
        Patch(
            facecolor=mark.colour,
            edgecolor="white" if mark.pattern == "hatched" else mark.colour,
            linewidth=0,
            hatch=_HATCH if mark.pattern == "hatched" else None,
            label=mark.label,
        )
        for mark in legend_of(box for drawing in drawings for box in drawing.boxes)
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
    name, unit = memory_unit(most, [costs])
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
    if isinstance(costs.limit, int | float):
        axes.axhline(costs.limit / unit, color=DARK, linewidth=1, linestyle="--")
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"memory ({name.replace('M_B', 'M$_B$')})" if name else "memory")
    axes.spines[["top", "right"]].set_visible(False)
    if n_stages <= 8:
        axes.legend(
            loc="upper right", fontsize=8, ncols=2, frameon=False, handlelength=1.2
        )


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
