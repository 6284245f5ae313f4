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

from zbpp.core import MemoryModel, RequestError, Timeline, format_memory
from zbpp.simulator.boxes import (
    DARK,
    IDLE,
    ROLES,
    Box,
    Style,
    boxes_of,
    legend_of,
    origin_of,
    spans_of,
    typical_duration,
)
from zbpp.simulator.metrics import memory_over_time, peak_memory, step_time, waste
from zbpp.simulator.output import memory_unit, write_file

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
_BAND_RANGE = range(901)  # points of a band's outline, along its row
_HATCH = "////"

_Shape = list[tuple[float, float]]


def plot(
    timeline: Timeline | Sequence[Timeline],
    target: "str | Path | Axes",
    *,
    memory: MemoryModel | None = None,
    time_unit: str = "",
) -> "Figure":
    """Draw a timeline into a file (png, svg, pdf by its suffix) or on axes.

    `zbpp.simulator.page` writes pages to zoom in.

    Args:
        timeline: simulated or measured; several are drawn below one another on one
            time axis (into a file only).
        target: the file to write, or axes to draw the timeline on.
        memory: adds the peak to the title and, for one timeline in a file, memory
            over time below.
        time_unit: for the label of the time axis.

    Returns:
        The figure, for further changes.

    Raises:
        RequestError: matplotlib is missing, the suffix names no known format, or
            the file cannot be written.
    """
    suffix = picture_suffix(target) if isinstance(target, str | Path) else ""
    timelines = [timeline] if isinstance(timeline, Timeline) else list(timeline)
    boxes = [boxes_of(one) for one in timelines]
    if not isinstance(target, str | Path):
        return _draw_on([target], timelines, boxes, memory)
    with_memory = memory is not None and len(timelines) == 1
    figure, panels = _layout(timelines, boxes, with_memory=with_memory)
    if memory is not None and with_memory:
        _draw_memory(panels[-1], timelines[0], memory)
    for axes in panels[:-1]:
        axes.tick_params(axis="x", length=0)
        axes.spines["bottom"].set_visible(False)
    panels[-1].set_xlabel(f"time ({time_unit})" if time_unit else "time")
    _draw_on(panels[: len(timelines)], timelines, boxes, memory)
    write_file(target, figure_bytes(figure, suffix))
    return figure


def _layout(
    timelines: Sequence[Timeline], boxes: Sequence[list[Box]], *, with_memory: bool
) -> "tuple[Figure, list[Axes]]":
    """Lay out a figure whose boxes are wide enough for their numbers, if it can."""
    from matplotlib.figure import Figure

    length = max(step_time(timeline) for timeline in timelines)
    typical = typical_duration([box for own in boxes for box in own]) or 1.0
    entries = _legend(boxes)
    legend = 1.2 + sum(0.37 + 0.065 * len(str(e.get_label())) for e in entries)
    width = min(max(0.215 * length / typical + 1.2, 8.0, legend), _WIDEST)
    stages = [timeline.placement.n_stages for timeline in timelines]
    heights = [max(n * min(0.42, max(0.16, 6.0 / n)), 0.8) for n in stages]
    heights += [_MEMORY_HEIGHT] * with_memory
    height = sum(heights) + 0.55 * len(timelines) + 0.6
    figure = Figure((width, height), layout="constrained")
    panels = figure.subplots(
        len(heights), 1, sharex=True, height_ratios=heights, squeeze=False
    )
    return figure, list(panels[:, 0])


def _draw_on(
    panels: "Sequence[Axes]",
    timelines: Sequence[Timeline],
    boxes: Sequence[list[Box]],
    memory: MemoryModel | None,
) -> "Figure":
    from matplotlib.transforms import offset_copy

    figure = panels[0].get_figure(root=True)
    assert figure is not None
    for axes, timeline, own in zip(panels, timelines, boxes, strict=True):
        _draw_timeline(axes, timeline, own)
        _write_title(axes, timeline, memory, pad=24 if axes is panels[0] else 6)
    panels[0].set_xlim(0, max(step_time(timeline) for timeline in timelines) or 1.0)
    handles = _legend(boxes)
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
    for axes, timeline, own in zip(panels, timelines, boxes, strict=True):
        _write_texts(axes, timeline, own)
    return figure


def _draw_timeline(axes: "Axes", timeline: Timeline, boxes: list[Box]) -> None:
    """Draw one row a stage and one box a job, or bands; grey is idle time."""
    n_stages = timeline.placement.n_stages
    axes.set_xlim(0, step_time(timeline) or 1.0)
    axes.set_ylim(n_stages - 0.5, -0.5)
    spans, n_lanes = spans_of(timeline), _n_lanes(boxes)
    idle = [_rectangle(i, 0, *span, n_lanes) for i, span in enumerate(spans) if span]
    _add_shapes(axes, idle, facecolors=IDLE, linewidths=0, gid="idle")
    if typical_duration(boxes) * _points_per_unit(axes) < _THINNEST:
        in_bands = [box for box in boxes if box.lane == 0 and box.is_work]
        _draw_bands(axes, in_bands, spans, n_lanes)
        boxes = [box for box in boxes if box.lane or not box.is_work]
    _draw_boxes(axes, boxes, n_lanes)
    axes.set_yticks(range(n_stages), [f"stage {stage}" for stage in range(n_stages)])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_boxes(axes: "Axes", boxes: Sequence[Box], n_lanes: int) -> None:
    """Draw boxes of one style as one thing: ten thousand then draw in seconds."""
    shortest = min((box.duration for box in boxes if box.end > box.start), default=1.0)
    edge = min(0.8, 0.1 * _points_per_unit(axes) * shortest)
    for style, members in _by_style(boxes).items():
        _add_shapes(
            axes,
            [_rectangle(b.stage, b.lane, b.start, b.end, n_lanes) for b in members],
            facecolors=style.colour,
            edgecolors="white",
            linewidths=edge,
            hatch=_HATCH if style.is_hatched else None,
            gid=f"{_gid(style)}{' recomputed' if style.is_hatched else ''}",
        )
        instants = [box for box in members if box.end == box.start]
        if instants and ROLES[style.role].at_once:
            axes.vlines(
                [box.start for box in instants],
                [box.stage - 0.5 for box in instants],
                [box.stage + 0.5 for box in instants],
                colors=style.colour,
                linewidths=2,
                gid=f"{style.role} instants",
            )


def _draw_bands(
    axes: "Axes",
    boxes: Sequence[Box],
    spans: Sequence[tuple[float, float] | None],
    n_lanes: int,
) -> None:
    """Draw the share of each style in a moving window; what is left is idle."""
    window = _BAND_JOBS * typical_duration(boxes)
    top, bottom = _extent(0, n_lanes)
    shapes: dict[Style, list[_Shape]] = {style: [] for style in _by_style(boxes)}
    members: dict[tuple[int, Style], list[Box]] = defaultdict(list)
    for box in boxes:
        members[box.stage, box.style].append(box)
    for stage, span in enumerate(spans):
        if span is None:
            continue
        times = [
            span[0] + (span[1] - span[0]) * i / _BAND_RANGE[-1] for i in _BAND_RANGE
        ]
        upper = [stage + top] * len(times)
        for style in shapes:
            own = members[stage, style]
            share = _shares(own, times, window=window, within=span)
            lower = [y + s * (bottom - top) for y, s in zip(upper, share, strict=True)]
            edges = zip(times, upper, strict=True), zip(times, lower, strict=True)
            shapes[style].append([*edges[0], *list(edges[1])[::-1]])
            upper = lower
    for style, outlines in shapes.items():
        gid = f"{_gid(style)} bands"
        _add_shapes(axes, outlines, facecolors=style.colour, linewidths=0, gid=gid)


def _shares(
    boxes: Sequence[Box],
    times: Sequence[float],
    *,
    window: float,
    within: tuple[float, float],
) -> list[float]:
    """Share of boxes in a window around each time, 0 to 1; cut at the ends of a span.

    >>> from zbpp.core import Step
    >>> boxes = [Box(0, 0, a, a + 1, Style("O"), Step(0), (0, 0)) for a in (0.0, 2.0)]
    >>> _shares(boxes, [0.5, 1.5], window=3.0, within=(0.0, 3.0))
    [0.5, 0.6666666666666666]
    """
    import numpy as np  # comes with matplotlib

    low, high = (
        np.clip(np.array(times) + shift, *within) for shift in (-window / 2, window / 2)
    )
    ends = np.array([(box.start, box.end) for box in boxes] or [within]).ravel()
    spent = np.cumsum([(0.0, box.duration) for box in boxes] or [(0.0, 0.0)])
    in_window = np.interp(high, ends, spent) - np.interp(low, ends, spent)
    shares: list[float] = (in_window / (high - low)).tolist()
    return shares


def _add_shapes(axes: "Axes", shapes: Sequence[_Shape], **look: Any) -> None:
    from matplotlib.collections import PolyCollection

    axes.add_collection(PolyCollection(shapes, **look))


def _rectangle(stage: int, lane: int, start: float, end: float, n_lanes: int) -> _Shape:
    top, bottom = (stage + y for y in _extent(lane, n_lanes))
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


def _n_lanes(boxes: Sequence[Box]) -> int:
    return max((box.lane for box in boxes), default=0) + 1


def _by_style(boxes: Sequence[Box]) -> dict[Style, list[Box]]:
    """The boxes of each style, in the order of the legend."""
    groups: dict[Style, list[Box]] = defaultdict(list)
    for box in boxes:
        groups[box.style].append(box)
    return {style: groups[style] for style in sorted(groups, key=lambda s: s.order)}


def _gid(style: Style) -> str:
    return f"{style.role} {style.leg}"


def _write_texts(axes: "Axes", timeline: Timeline, boxes: Sequence[Box]) -> None:
    """Write its text into every box that is wide enough for it."""
    points, n_lanes = _points_per_unit(axes), _n_lanes(boxes)
    digits = len(str(timeline.n_microbatches - 1))
    top, bottom = _extent(0, n_lanes)
    row = axes.get_window_extent().height / abs(axes.get_ylim()[0] + 0.5)
    largest = min(_LARGEST_FONT, 0.7 * (bottom - top) * row * _POINTS / _dpi(axes))
    for style, members in _by_style([box for box in boxes if box.text]).items():
        durations = sorted(box.duration for box in members)
        font = durations[len(durations) // 2] * points / (_DIGIT_WIDTH * digits)
        if font < _SMALLEST_FONT:
            continue
        font = min(font, largest)
        for box in members:
            if box.duration * points < 0.99 * _DIGIT_WIDTH * font * len(box.text):
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
    axes: "Axes", timeline: Timeline, memory: MemoryModel | None, *, pad: float
) -> None:
    name, share = waste(timeline)
    facts = [f"{name} {100 * share:.2f} %"]
    if memory is not None:
        peak = max(peak_memory(timeline, memory))
        unit = " M$_B$" if memory.m_b == 1.0 else ""
        facts.append(f"peak memory {format_memory(float(f'{peak:.4g}'))}{unit}")
    sizes = (
        f"{timeline.placement.n_stages} stages, {timeline.n_microbatches} micro-batches"
    )
    left = f"{timeline.name}   {sizes}"
    axes.set_title(left, loc="left", fontsize=11, fontweight="bold", pad=pad)
    axes.set_title("    ".join(facts), loc="right", fontsize=11, pad=pad)


def _legend(timelines: Iterable[Sequence[Box]]) -> "list[Patch]":
    from matplotlib.patches import Patch

    return [
        Patch(
            facecolor=mark.colour,
            edgecolor="white" if mark.pattern == "hatched" else mark.colour,
            linewidth=0,
            hatch=_HATCH if mark.pattern == "hatched" else None,
            label=mark.label,
        )
        for mark in legend_of(box for boxes in timelines for box in boxes)
    ]


def _draw_memory(axes: "Axes", timeline: Timeline, memory: MemoryModel) -> None:
    """Draw memory over time, one curve a stage, above what is there all the time.

    GiB |     _      _              a pass may hold more inside than it leaves
        |  __| |____| |__ ______
        | |                     |
        |_|_____________________|_  dotted: fixed of a stage; grey: of all stages
        |#########################
    """
    from matplotlib import colormaps

    origin, n_stages = origin_of(timeline), timeline.placement.n_stages
    most = max(peak_memory(timeline, memory))
    name, unit = memory_unit(most, [memory])
    fixed = [amount / unit for amount in memory.on(timeline.placement).fixed]
    for stage, curve in enumerate(memory_over_time(timeline, memory)):
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
    if isinstance(memory.limit, int | float):
        axes.axhline(memory.limit / unit, color=DARK, linewidth=1, linestyle="--")
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"memory ({name.replace('M_B', 'M$_B$')})" if name else "memory")
    axes.spines[["top", "right"]].set_visible(False)
    if n_stages <= 8:
        axes.legend(
            loc="upper right", fontsize=8, ncols=2, frameon=False, handlelength=1.2
        )


def _points_per_unit(axes: "Axes") -> float:
    left, right = axes.get_xlim()
    return axes.get_window_extent().width / _dpi(axes) * _POINTS / (right - left)


def _dpi(axes: "Axes") -> float:
    figure = axes.get_figure(root=True)
    assert figure is not None
    return figure.dpi


def picture_suffix(path: str | Path) -> str:
    """Return the format that a file's name asks for.

    Raises:
        RequestError: it is none of `FORMATS`, or matplotlib is missing.
    """
    suffix = Path(path).suffix.lower().lstrip(".")
    if suffix not in FORMATS:
        known = ", ".join(f".{name}" for name in FORMATS)
        raise RequestError(
            f"{path}: the name of a picture must end in {known}; the commands also "
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
