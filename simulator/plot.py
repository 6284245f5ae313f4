"""Timelines as a picture: svg by our writer, png and pdf by matplotlib.

One row a stage, one box a job with its micro-batch number where it fits. Grey is idle
time within a stage's span: the bubble. Memory over time goes below.

    ZBH1   2 stages, 3 micro-batches        bubble rate 9.09 %
    [] F forward  [] B input gradient  ...
    stage 0  |F F F B W B ...
    stage 1  |  F B F B W ...
              0    5    10
"""

import colorsys
import io
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zbpp.core import Costs, RequestError, Timeline, format_memory
from zbpp.core.files.json_text import write_file
from zbpp.simulator.arguments import takes_timelines
from zbpp.simulator.boxes import (
    LOOKS,
    PALETTE,
    Box,
    Drawing,
    Style,
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
from zbpp.simulator.svg import PAPER, Area, Bars, Curve, Dot, Picture, Text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "FORMATS",
    "memory_shapes",
    "picture_suffix",
    "plot",
    "timeline_shapes",
    "write_picture",
]

FORMATS = ("png", "svg", "pdf")

_POINTS = 72.0  # of an inch
_WIDEST = 18.0  # inches
_JOB_INCHES = 0.215  # of a typical job, if the picture is not too wide then
_MEMORY_HEIGHT = 80.0  # points
_TOP, _BOTTOM = 0.07, 0.93  # of the row of a stage
_JOBS_SHARE = 0.71  # of a row, for lane 0 where a stage has others too
_THINNEST = 4.0  # points of a box that has an outline
_MOST_CURVES = 16
_MICROBATCH = re.compile(r"(?<=[A-Z])\d+")  # in the name of a job


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
    title: bool = True,
    legend: bool = True,
) -> Picture:
    """Draw timelines below one another on one time axis.

    Args:
        timeline: simulated or measured.
        path: of a file to write: .svg, or by matplotlib .png and .pdf.
        costs: of the schedule; adds the peak of the memory to the title and, for one
            timeline, memory over time below.
        time_unit: for the label of the time axis.
        colors: as ``#rrggbb``, by kind of job (``F``, ``B``, ``W``, ``BW``, ``O``,
            ``V``, ...) and for ``idle``; later chunks of a stage are lighter.
        font: family of all texts.
        font_size: in points.
        size: width and height in inches; None: wide enough for the numbers in boxes.
        title: write mode, sizes, bubble rate and peak above each timeline.
        legend: explain the colours at the top.

    Returns:
        The picture, which notebooks show.

    Raises:
        RequestError: matplotlib is missing, the suffix names no known format, the file
            cannot be written, or a colour is for no kind of job.
    """
    if path is not None:
        picture_suffix(path)
    timelines = [timeline] if isinstance(timeline, Timeline) else timeline
    layout = _Layout(
        drawings=[Drawing(each) for each in timelines],
        costs=costs,
        palette=_palette(colors),
        font=font_size,
        time_unit=time_unit,
        has_titles=title,
        has_legend=legend,
    )
    picture = layout.picture() if size is None else layout.fitted(*size)
    if path is not None:
        write_picture(picture, path, font=font)
    return picture


def _palette(colors: Mapping[str, str] | None) -> dict[str, str]:
    for kind, colour in (colors or {}).items():
        if kind not in PALETTE:
            raise RequestError(
                f"colors has {kind!r}; the kinds are {', '.join(PALETTE)}"
            )
        if not re.fullmatch(r"#[0-9a-fA-F]{6}", colour):
            raise RequestError(f"colors has {colour!r} for {kind}; write #rrggbb")
    return PALETTE | dict(colors or {})


def timeline_shapes(
    drawing: Drawing, palette: Mapping[str, str], *, is_outlined: bool = False
) -> list[Bars | Curve]:
    """Draw boxes in time and rows of height 1; those of one name are one shape.

    Its labels are the name with * for micro-batches, these, and the colour of letters
    inside. A strip in the colour of F marks passes that compute layers again.
    """
    extents = [_extent(lane, drawing.n_lanes) for lane in range(drawing.n_lanes)]
    top, height = extents[0]
    idle = [
        (span[0], stage + top, span[1] - span[0], height)
        for stage, span in enumerate(drawing.spans)
        if span is not None
    ]
    shapes: list[Bars | Curve] = [Bars(palette["idle"], idle)]
    groups: dict[tuple[Style, int, str], list[Box]] = defaultdict(list)
    for box in drawing.boxes:
        name = _MICROBATCH.sub("*", box.name)
        groups[box.style, box.lane, name].append(box)
    for key in sorted(groups, key=lambda key: key[0].order):
        style, lane, name = key
        top, height = extents[lane]
        rows = [(b.start, b.stage + top, b.duration, height) for b in groups[key]]
        colour = style.colour_in(palette)
        numbers = (" ".join(map(str, box.microbatches)) for box in groups[key])
        labels = {
            "name": name,
            "numbers": ",".join(numbers),
            "about": LOOKS[style.role].summary,
            "ink": ink_on(colour) if groups[key][0].text else "",
        }
        shapes.append(Bars(colour, rows, labels, is_outlined))
        if style.recomputes:
            strips = [(x, y + 0.75 * h, w, 0.25 * h) for x, y, w, h in rows]
            shapes.append(Bars(palette["F"], strips))
        if style.at_once:
            shapes += [
                Curve(colour, [(x, y), (x, y + h)], 2.0) for x, y, w, h in rows if not w
            ]
    return shapes


def _extent(lane: int, n_lanes: int) -> tuple[float, float]:
    """Top and height of a lane in a row of height 1; lane 0 is the widest."""
    whole = _BOTTOM - _TOP
    jobs = whole * (_JOBS_SHARE if n_lanes > 1 else 1.0)
    if lane == 0:
        return _TOP, jobs
    each = (whole - jobs) / (n_lanes - 1)
    return _TOP + jobs + (lane - 1) * each + 0.05, each - 0.05


def memory_shapes(timeline: Timeline, costs: Costs) -> tuple[float, list[Bars | Curve]]:
    """Draw memory over time, downward, one curve a stage; return its height too.

    |     _      _
    |  __| |____| |__ ______
    |_|                     |_   grey: what is fixed on every stage
    |#########################   dashed: the limit
    """
    origin, length = origin_of(timeline), step_time(timeline)
    fixed = costs.on(timeline.placement).fixed
    limit = costs.memory_limit
    top = 1.06 * max(peak_memory(timeline, costs)) or 1.0
    if isinstance(limit, int | float) and limit < 1.5 * top:
        top = max(top, 1.06 * limit)
    shapes: list[Bars | Curve] = []
    if base := min(fixed):
        shapes.append(Bars("idle", [(0.0, top - base, length, base)]))
    curves = memory_over_time(timeline, costs)
    for stage in range(0, len(curves), math.ceil(len(curves) / _MOST_CURVES)):
        amount, points = fixed[stage], [(0.0, top - fixed[stage])]
        for time, held in dict(curves[stage]).items():  # at one time the last counts
            points += [(time - origin, top - amount), (time - origin, top - held)]
            amount = held
        points.append((length, top - amount))
        shapes.append(Curve(_stage_colour(stage, len(curves)), points))
    if isinstance(limit, int | float) and limit <= top:
        line = [(0.0, top - limit), (length, top - limit)]
        shapes.append(Curve("ink", line, 1.0, "5 4"))
    return top, shapes


def _stage_colour(stage: int, n_stages: int) -> str:
    """From violet over green to yellow, bright enough for a dark page."""
    share = stage / max(n_stages - 1, 1)
    rgb = colorsys.hls_to_rgb((275 - 215 * share) / 360, 0.42 + 0.08 * share, 0.6)
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)


@dataclass(kw_only=True)
class _Layout:
    """Where the rows, axes and texts of a picture are, from top to bottom."""

    drawings: Sequence[Drawing]
    costs: Costs | None
    palette: Mapping[str, str]
    font: float
    time_unit: str
    has_titles: bool
    has_legend: bool

    def fitted(self, width: float, height: float) -> Picture:
        """A picture of this size in inches: texts leave the rest to rows."""
        width, n_rows = _POINTS * width, sum(map(_stages_of, self.drawings))
        other = self.picture(width, 1.0).height - n_rows
        row = max((_POINTS * height - other) / n_rows, 1.0)
        return self.picture(width, row)

    def picture(self, width: float | None = None, row: float | None = None) -> Picture:
        """Lay out; width and height of a row in points, or the usual ones."""
        font, line = self.font, 1.6 * self.font
        self._areas: list[Area] = []
        self._marks: list[Text | Dot] = []
        self._length = max(step_time(d.timeline) for d in self.drawings) or 1.0
        self._left = 5.4 * font
        width = width or self._usual_width()
        self._width = width - self._left - font
        if row is None:
            row = min(30.0, max(10.0, 430.0 / max(map(_stages_of, self.drawings))))
        y = 0.4 * line
        if self.has_legend:
            y = self._write_legend(y)
        for drawing in self.drawings:
            if self.has_titles:
                for text in self._title(drawing.timeline):
                    self._marks.append(text._replace(y=y + text.y + line / 2))
                y = self._marks[-1].y + line / 2
            y = self._draw_rows(drawing, y, row)
        y = self._draw_axis(y)
        if self.costs is not None and len(self.drawings) == 1:
            y = self._draw_memory(self.drawings[0].timeline, self.costs, y)
        return Picture(width, y + 0.4 * line, self._areas, self._marks)

    def _usual_width(self) -> float:
        typical = min(drawing.typical for drawing in self.drawings) or 1.0
        inches = _JOB_INCHES * self._length / typical + 1.2
        return _POINTS * min(max(inches, 8.0), _WIDEST)

    def _text(self, x: float, y: float, text: str, anchor: str = "start") -> Text:
        return Text(x, y, text, self.font, anchor)

    def _write_legend(self, y: float) -> float:
        font, x = self.font, self._left
        line = 1.6 * font
        boxes = [box for drawing in self.drawings for box in drawing.boxes]
        for mark in legend_of(boxes, self.palette):
            text = self._text(x + 1.4 * font, y + line / 2, mark.label)
            if text.x + text.width > self._left + self._width and x > self._left:
                x, y = self._left, y + line
                text = text._replace(x=x + 1.4 * font, y=y + line / 2)
            square = Bars(mark.colour, [(0.0, 0.0, 1.0, 1.0)])
            shapes = [square]
            if mark.is_strip:
                shapes.append(Bars(self.palette["F"], [(0.0, 0.75, 1.0, 0.25)]))
            top = y + (line - font) / 2
            self._areas.append(Area(x, top, font, font, (0, 0, 1, 1), shapes))
            self._marks.append(text)
            x = text.x + text.width + font
        return y + 1.2 * line

    def _title(self, timeline: Timeline) -> Iterator[Text]:
        """Name and sizes, and the figures: on one line if both fit."""
        measure, share = waste(timeline)
        facts = [f"{measure} {100 * share:.2f} %"]
        if self.costs is not None:
            peak = max(peak_memory(timeline, self.costs))
            unit = " M_B" if self.costs.m_b == 1.0 else ""
            facts.append(f"peak memory {format_memory(float(f'{peak:.4g}'))}{unit}")
        n_stages, m = timeline.placement.n_stages, timeline.n_microbatches
        sizes = f"{timeline.name}   {n_stages} stages, {m} micro-batches"
        name = Text(self._left, 0, sizes, 1.1 * self.font, weight="bold")
        figures = self._text(0, 0, "    ".join(facts))
        yield name
        if name.width + figures.width < self._width:
            yield figures._replace(x=self._left + self._width, anchor="end")
        else:
            yield figures._replace(x=self._left, y=1.6 * self.font)

    def _draw_rows(self, drawing: Drawing, y: float, row: float) -> float:
        n_stages = drawing.timeline.placement.n_stages
        per_unit = self._width / self._length
        outlined = drawing.typical * per_unit > _THINNEST
        shapes = timeline_shapes(drawing, self.palette, is_outlined=outlined)
        view = (0.0, 0.0, self._length, float(n_stages))
        area = Area(self._left, y, self._width, n_stages * row, view, shapes)
        self._areas.append(area)
        for stage in range(0, n_stages, math.ceil(self.font / row)):
            middle = y + (stage + 0.5) * row
            x = self._left - 0.6 * self.font
            self._marks.append(self._text(x, middle, f"stage {stage}", "end"))
        top, height = _extent(0, drawing.n_lanes)
        for box in drawing.boxes:
            wide = box.duration * per_unit / max(1.15, 0.7 * len(box.text))
            size = min(self.font, 0.8 * height * row, wide)
            if not box.text or size < 4.5:
                continue
            x = self._left + (box.start + box.end) / 2 * per_unit
            ink = ink_on(box.style.colour_in(self.palette))
            middle = y + (box.stage + top + height / 2) * row
            self._marks.append(Text(x, middle, box.text, size, "middle", ink))
        return y + n_stages * row

    def _draw_axis(self, y: float) -> float:
        font = self.font
        step = nice_step(self._length / max(self._width / (8 * font), 1))
        for k in range(int(self._length / step * (1 + 1e-9)) + 1):
            x = self._left + k * step / self._length * self._width
            text = self._text(x, y + 1.1 * font, f"{k * step:.6g}", "middle")
            self._marks.append(text)
        label = f"time ({self.time_unit})" if self.time_unit else "time"
        middle = self._left + self._width / 2
        self._marks.append(self._text(middle, y + 2.6 * font, label, "middle"))
        return y + 3.4 * font

    def _draw_memory(self, timeline: Timeline, costs: Costs, y: float) -> float:
        top, shapes = memory_shapes(timeline, costs)
        view = (0.0, 0.0, self._length, top)
        line = Bars("muted", [(0.0, 0.995 * top, self._length, 0.005 * top)])
        y += 0.6 * self.font
        self._areas.append(
            Area(self._left, y, self._width, _MEMORY_HEIGHT, view, [*shapes, line])
        )
        for text, height in memory_labels(timeline, costs):
            place = y + (1 - height / top) * _MEMORY_HEIGHT
            x = self._left - 0.6 * self.font
            self._marks.append(self._text(x, place, text, "end"))
        return y + _MEMORY_HEIGHT


def _stages_of(drawing: Drawing) -> int:
    return drawing.timeline.placement.n_stages


def memory_labels(timeline: Timeline, costs: Costs) -> list[tuple[str, float]]:
    """Texts at the axis of the memory, and the amounts where they are."""
    peak = max(peak_memory(timeline, costs))
    name, unit = memory_scale(peak, [costs])
    return [
        ("0", 0.0),
        ("memory", peak / 2),
        (f"{peak / unit:.4g} {name}".strip(), peak),
    ]


def nice_step(rough: float) -> float:
    """The next of 1, 2, 5, 10, ... at or above a number."""
    power = 10.0 ** math.floor(math.log10(rough))
    return power * next(x for x in (1, 2, 5, 10) if x * power >= rough * (1 - 1e-9))


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
    if suffix == "svg":
        return suffix
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise RequestError(
            f".{suffix} needs matplotlib ({error}); install it: pip install "
            "'zbpp[viz]', or write .svg or .html, which need nothing"
        ) from None
    return suffix


def write_picture(
    picture: Picture, path: str | Path, *, font: str = "sans-serif"
) -> None:
    """Write a picture into a file, the same bytes each time.

    Raises:
        RequestError: as `picture_suffix`, or the file cannot be written.
    """
    suffix = picture_suffix(path)
    if suffix == "svg":
        ground = '<rect width="100%" height="100%" fill="white"/>'
        text = picture.svg(font=font).replace(">\n", f">\n{ground}\n", 1)
        write_file(path, text)
        return
    from matplotlib import rc_context

    buffer = io.BytesIO()
    metadata = {"CreationDate": None} if suffix == "pdf" else None
    with rc_context({"font.family": font}):
        figure = _figure(picture)
        figure.savefig(buffer, format=suffix, dpi=160, metadata=metadata)
    write_file(path, buffer.getvalue())


def _figure(picture: Picture) -> "Figure":
    """The same shapes by matplotlib: an area is axes without a frame."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Circle

    width, height = picture.width, picture.height
    figure = Figure((width / _POINTS, height / _POINTS))
    whole = Area(0, 0, width, height, (0, 0, width, height), [])
    for area in (*picture.areas, whole):
        place = (area.x, height - area.y - area.height, area.width, area.height)
        left, bottom, across, up = place
        axes = figure.add_axes(
            (left / width, bottom / height, across / width, up / height)
        )
        x, y, w, h = area.view
        axes.set(xlim=(x, x + w), ylim=(y + h, y))
        axes.axis("off")
        for shape in area.shapes:
            _paint(axes, shape)
    for mark in picture.marks:
        colour = PAPER.get(mark.colour, mark.colour)
        if isinstance(mark, Dot):
            filled = "none" if mark.is_ring else colour
            circle = Circle((mark.x, mark.y), mark.radius, ec=colour, fc=filled)
            axes.add_patch(circle)
            continue
        axes.text(
            mark.x,
            mark.y,
            mark.text,
            color=colour,
            fontsize=mark.size,
            fontweight=mark.weight,
            ha={"start": "left", "middle": "center", "end": "right"}[mark.anchor],
            va="center_baseline",
        )
    return figure


def _paint(axes: "Axes", shape: Bars | Curve) -> None:
    from matplotlib.collections import PolyCollection

    colour = PAPER.get(shape.colour, shape.colour)
    if isinstance(shape, Curve):
        dashes = "--" if shape.dashes else "-"
        axes.plot(*zip(*shape.points, strict=True), dashes, c=colour, lw=shape.width)
        return
    corners = [
        [(x, y), (x + w, y), (x + w, y + h), (x, y + h)] for x, y, w, h in shape.boxes
    ]
    edge = "white" if shape.is_outlined else "none"
    axes.add_collection(
        PolyCollection(corners, facecolors=colour, edgecolors=edge, linewidths=0.6)
    )
