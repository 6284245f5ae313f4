"""A timeline as a list of boxes: what pictures, pages and traces draw.

    stage 0, lane 0   [F0][F1][F2]            [ B0 ][send][W0]     its jobs
    stage 0, lane 1   [ UNSHARD ]                   [REDUCE_GRAD]  beside them

Parts of passes that exchange data are in lane 1 too, in the look of their pass.

What a box is called, its colour, its lane and its place are decided here for all media.
"""

import colorsys
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from zbpp.core import (
    KINDS,
    Costs,
    Job,
    JobKind,
    Lane,
    PassKind,
    Scope,
    State,
    Timeline,
    kind_of,
    lanes_of,
    passes_in,
    place_of,
)
from zbpp.simulator.metrics import (
    memory_over_time,
    memory_scale,
    peak_memory,
    step_time,
)

__all__ = [
    "DARK",
    "IDLE",
    "LOOKS",
    "PALETTE",
    "SEND",
    "Box",
    "Drawing",
    "Mark",
    "Memory",
    "Rectangle",
    "Style",
    "ink_on",
    "legend_of",
    "origin_of",
    "shade",
]

IDLE = "#E4E4E4"
DARK = "#222222"
SEND = "SEND"
"""Role of the end of a job in which its stage only sends."""


LOOKS = {row.text: row for row in KINDS.values() if row.colour} | {
    SEND: JobKind(SEND, Scope.MICROBATCH, "only sends", colour="#8A8A8A")
}
"""Looks by the text of the kind, in the order of legends."""

PALETTE = {role: look.colour or DARK for role, look in LOOKS.items()} | {"idle": IDLE}
"""Colours by role, and that of idle time."""

_LANES = list(Lane)
_TOP, _BOTTOM = 0.07, 0.93  # of the row of a stage
_JOBS_SHARE = 0.71  # of a row, for lane 0 where a stage has others too
_MOST_CURVES = 16


class Style(NamedTuple):
    """The look of a box.

    ``leg``: the first (0), second (1), ... chunk of its stage, lighter each time;
    ``recomputes``: a B that computes layers again.
    """

    role: str
    leg: int = 0
    recomputes: bool = False

    def colour_in(self, palette: Mapping[str, str]) -> str:
        """As ``#rrggbb``."""
        return shade(palette[self.role], self.leg)

    @property
    def at_once(self) -> bool:
        """True if a box that takes no time is drawn as a line: a validation."""
        return State.VERDICT in LOOKS[self.role].awaits

    @property
    def order(self) -> tuple[int, int, bool]:
        """Place among all styles: that of the legend."""
        return list(LOOKS).index(self.role), self.leg, self.recomputes


class Box(NamedTuple):
    """A job, or the end of one in which its stage only sends.

    Times are in the unit of the timeline, and count from its first start. A job has a
    box on each lane of its stage that it occupies; lane 0 computes.
    """

    stage: int
    lane: int
    start: float
    end: float
    style: Style
    job: Job

    @property
    def duration(self) -> float:
        """``end - start``."""
        return self.end - self.start

    @property
    def name(self) -> str:
        """Text of the job: ``3B7``."""
        return f"send of {self.job}" if self.style.role == SEND else str(self.job)

    @property
    def microbatches(self) -> list[int]:
        """Of its passes; of none, one, or the two of a pair."""
        return [part.microbatch for part in passes_in(self.job)]

    @property
    def text(self) -> str:
        """Text inside the box: micro-batches, or the name of a job of the stage."""
        if self.lane or self.style.role == SEND:
            return ""
        return " ".join(map(str, self.microbatches)) or str(self.job)

    @property
    def is_work(self) -> bool:
        """True within the span of a stage, which steps and validations are not."""
        return bool(passes_in(self.job))


class Rectangle(NamedTuple):
    """A box, or the ground of a span (``box`` is None); a stage's row has height 1."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    box: Box | None = None

    @property
    def strip(self) -> "Rectangle":
        """The lower quarter, which marks passes that compute layers again."""
        return self._replace(y=self.y + 0.75 * self.height, height=0.25 * self.height)


@dataclass(frozen=True)
class Drawing:
    """A timeline as boxes, and what media ask about all of them."""

    timeline: Timeline

    @property
    def n_stages(self) -> int:
        """Rows."""
        return self.timeline.placement.n_stages

    @cached_property
    def length(self) -> float:
        """From the first start to the last end."""
        return step_time(self.timeline)

    def rectangles(self, palette: Mapping[str, str]) -> Iterator[Rectangle]:
        """The idle time within each stage's span, and above it the boxes, by style."""
        top, height = self.extent(0)
        for stage, span in enumerate(self.spans):
            if span is not None:
                start, end = span
                yield Rectangle(
                    start, stage + top, end - start, height, palette["idle"]
                )
        for box in sorted(self.boxes, key=lambda box: box.style.order):
            top, height = self.extent(box.lane)
            colour = box.style.colour_in(palette)
            y = box.stage + top
            yield Rectangle(box.start, y, box.duration, height, colour, box)

    def extent(self, lane: int) -> tuple[float, float]:
        """Top and height of a lane in a row; lane 0 is the widest."""
        whole = _BOTTOM - _TOP
        jobs = whole * (_JOBS_SHARE if self.n_lanes > 1 else 1.0)
        if lane == 0:
            return _TOP, jobs
        each = (whole - jobs) / (self.n_lanes - 1)
        return _TOP + jobs + (lane - 1) * each + 0.05, each - 0.05

    @cached_property
    def boxes(self) -> list[Box]:
        """The boxes of lane 0, stage after stage, each in time order; then lane 1."""
        boxes = _boxes(self.timeline)
        return sorted(boxes, key=lambda box: (box.lane, box.stage, box.start))

    @cached_property
    def n_lanes(self) -> int:
        """Rows of boxes that each stage has."""
        return max((box.lane for box in self.boxes), default=0) + 1

    @cached_property
    def typical(self) -> float:
        """Median duration of what takes time in lane 0; 0 if nothing does."""
        durations = sorted(
            box.duration for box in self.boxes if box.lane == 0 and box.end > box.start
        )
        return durations[len(durations) // 2] if durations else 0.0

    @cached_property
    def spans(self) -> list[tuple[float, float] | None]:
        """From the first to the last pass of each stage: what is idle there is bubble.

        None: the stage has no passes.
        """
        spans: dict[int, tuple[float, float]] = {}
        for box in self.boxes:
            if box.lane == 0 and box.is_work:
                start, _ = spans.get(box.stage, (box.start, box.end))
                spans[box.stage] = (start, box.end)
        return [spans.get(stage) for stage in range(self.n_stages)]


def _boxes(timeline: Timeline) -> Iterator[Box]:
    origin, n_stages = origin_of(timeline), timeline.placement.n_stages
    looks: dict[object, tuple[Style, list[int]]] = {}
    for line, slots in enumerate(timeline.lines):
        stage = line % n_stages
        for slot in slots:
            job = slot.job
            key = (job.kind, place_of(job), lanes_of(job))
            if key not in looks:
                lanes = [_LANES.index(lane) for lane in lanes_of(job)]
                looks[key] = _style(job, timeline), lanes
            style, lanes = looks[key]
            start, end = slot.start - origin, slot.end - origin
            sends = timeline.sending_of(job)
            for lane in lanes:
                yield Box(stage, lane, start, end - sends, style, job)
                if sends:
                    yield Box(stage, lane, end - sends, end, Style(SEND), job)


def _style(job: Job, timeline: Timeline) -> Style:
    kind, chunk, placement = kind_of(job), place_of(job), timeline.placement
    if kind.scope is Scope.STAGE:
        return Style(kind.text)
    leg = placement.chunks_of[placement.stage_of[chunk]].index(chunk)
    recomputes = PassKind.B in kind.work and chunk in timeline.recomputing
    return Style(kind.text, leg, recomputes)


def origin_of(timeline: Timeline) -> float:
    """Start of the first job, in the timeline's own clock."""
    slots = chain.from_iterable(timeline.lines)
    return min((slot.start for slot in slots), default=0.0)


class Memory:
    """Memory over time as curves, one a stage; of many stages some.

    |      _    _
    |   __| |__| |__ ____
    |--|- - - - - - - - -|--   the limit
    |##########################   what is fixed on every stage
    """

    def __init__(self, timeline: Timeline, costs: Costs) -> None:
        fixed = costs.on(timeline.placement).fixed
        self.base = min(fixed)
        self.peak = max(peak_memory(timeline, costs))
        self.length = step_time(timeline)
        limit = costs.memory_limit
        self.top = 1.06 * self.peak or 1.0
        """Of the axis."""
        self.limit: float | None = None
        """One for all stages, unless it is far away."""
        if isinstance(limit, int | float) and limit < 1.5 * self.top:
            self.limit, self.top = limit, max(self.top, 1.06 * limit)
        name, unit = memory_scale(self.peak, [costs])
        self.labels = {0.0: "0", self.peak: f"{self.peak / unit:.4g} {name}".strip()}
        """Texts at the axis, by the amounts where they are."""
        origin, curves = origin_of(timeline), memory_over_time(timeline, costs)
        self.curves: dict[str, list[tuple[float, float]]] = {}
        """Times and amounts by colour."""
        for stage in range(0, len(curves), math.ceil(len(curves) / _MOST_CURVES)):
            amount, points = fixed[stage], [(0.0, fixed[stage])]
            for time, held in dict(curves[stage]).items():  # the last of one time
                points += [(time - origin, amount), (time - origin, held)]
                amount = held
            points.append((self.length, amount))
            self.curves[_stage_colour(stage, len(curves))] = points


def _stage_colour(stage: int, n_stages: int) -> str:
    """From violet over green to yellow, bright enough for a dark page."""
    share = stage / max(n_stages - 1, 1)
    rgb = colorsys.hls_to_rgb((275 - 215 * share) / 360, 0.42 + 0.08 * share, 0.6)
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)


class Mark(NamedTuple):
    """An entry of a legend; ``is_strip``: with a strip in the colour of F."""

    label: str
    colour: str
    is_strip: bool = False


def legend_of(boxes: Iterable[Box], palette: Mapping[str, str] = PALETTE) -> list[Mark]:
    """Explain what can be seen of boxes, and the ground that idle time leaves."""
    styles = {box.style for box in boxes if box.end > box.start or box.style.at_once}
    roles = {style.role for style in styles}
    marks = [
        Mark(f"{role}  {look.summary}", Style(role).colour_in(palette))
        for role, look in LOOKS.items()
        if role in roles
    ]
    marks.append(Mark("idle", palette["idle"]))
    if any(style.recomputes for style in styles):
        marks.append(Mark("strip: recomputes", palette["B"], is_strip=True))
    if any(style.leg for style in styles):
        later = Style("F", 1).colour_in(palette)
        marks.append(Mark("lighter: later chunk of a stage", later))
    return marks


def shade(colour: str, leg: int) -> str:
    """Lighten a colour for the second chunk of a stage, more so for later ones."""
    white = (0.0, 0.5, 0.7, 0.8)[min(leg, 3)]
    mixed = (round(255 * (part + (1 - part) * white)) for part in _rgb(colour))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def ink_on(colour: str) -> str:
    """Dark or white letters, whichever stand out from a colour."""
    red, green, blue = _rgb(colour)
    return DARK if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"


def _rgb(colour: str) -> tuple[float, float, float]:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red, green, blue
