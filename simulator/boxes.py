"""A timeline as a list of boxes, which pictures, pages and traces draw.

    stage 0, lane 0   [F0][F1][F2]            [ B0 ][send][W0]     its jobs
    stage 0, lane 1   [ UNSHARD ]                   [REDUCE_GRAD]  meanwhile

Parts of passes that exchange data are in lane 1 too, in the look of their pass.

Names, colours, lanes and places of boxes are decided here for all formats.
"""

import colorsys
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from zbpp.core import (
    KINDS,
    Costs,
    Job,
    Lane,
    PassKind,
    StageKind,
    State,
    Timeline,
    format_memory,
    kind_of,
    lanes_of,
    passes_in,
    place_of,
)
from zbpp.simulator.metrics import memory_over_time, peak_memory, step_time, waste

DARK = "#222222"

LOOKS = {str(kind): row for kind, row in KINDS.items() if row.colour}
"""Looks by the text of the kind, in the order of legends."""

PALETTE = {role: look.colour or DARK for role, look in LOOKS.items()} | {
    "idle": "#E4E4E4"
}
"""Colours by role, and that of idle time."""

_LANES = list(Lane)
_MOST_CURVES = 16


class Style(NamedTuple):
    """The look of a box.

    ``leg``: the first (0), second (1), ... chunk of its stage, lighter each time;
    ``recomputes``: a backward that computes layers again, darker.
    """

    role: str
    leg: int = 0
    recomputes: bool = False

    def colour_in(self, palette: Mapping[str, str]) -> str:
        """As ``#rrggbb``."""
        white = (0.0, 0.5, 0.7, 0.8)[min(self.leg, 3)]
        black = 0.3 * self.recomputes
        mixed = (
            round(255 * (part + (1 - part) * white) * (1 - black))
            for part in _rgb(palette[self.role])
        )
        return "#" + "".join(f"{part:02x}" for part in mixed)

    @property
    def at_once(self) -> bool:
        """True if a box that takes no time is drawn as a line: a validation."""
        return State.VERDICT in LOOKS[self.role].awaits


class Box(NamedTuple):
    """A job on one lane of its stage.

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
        return str(self.job)

    @property
    def text(self) -> str:
        """Text inside the box: micro-batches, or the name of a job of the stage."""
        if self.lane:
            return ""
        microbatches = (str(part.microbatch) for part in passes_in(self.job))
        return " ".join(microbatches) or str(self.job)


@dataclass(frozen=True)
class Drawing:
    """A timeline as boxes, and figures of all of them.

    ``costs``: of its memory, where that is shown.
    """

    timeline: Timeline
    costs: Costs | None = None

    @property
    def facts(self) -> str:
        """Bubble rate and peak memory."""
        measure, share = waste(self.timeline)
        facts = f"{measure} {share:.2%}"
        if self.costs is None:
            return facts
        peak = max(peak_memory(self.timeline, self.costs))
        return f"{facts}, peak memory {_memory_text(peak, self.costs)}"

    @property
    def memory(self) -> "Memory | None":
        """Memory over time, where there are costs."""
        return None if self.costs is None else Memory(self.timeline, self.costs)

    @property
    def n_stages(self) -> int:
        """Rows."""
        return self.timeline.placement.n_stages

    @cached_property
    def length(self) -> float:
        """From the first start to the last end."""
        return step_time(self.timeline)

    @cached_property
    def boxes(self) -> list[Box]:
        """The boxes of lane 0, stage after stage, each in time order; then lane 1."""
        boxes = _boxes(self.timeline)
        return sorted(boxes, key=lambda box: (box.lane, box.stage, box.start))

    @cached_property
    def lanes(self) -> tuple[tuple[float, float], ...]:
        """Top and height of each lane in the row of a stage, which has height 1."""
        has_network = any(box.lane for box in self.boxes)
        return ((0.07, 0.61), (0.73, 0.2)) if has_network else ((0.07, 0.86),)

    @cached_property
    def typical(self) -> float:
        """Median duration of the boxes in lane 0 that take time; 0 if none does."""
        durations = sorted(
            box.duration for box in self.boxes if box.lane == 0 and box.end > box.start
        )
        return durations[len(durations) // 2] if durations else 0.0

    @cached_property
    def spans(self) -> dict[int, tuple[float, float]]:
        """From the first to the last pass of each stage: idle time there is bubble.

        Stages without passes have none.
        """
        spans: dict[int, tuple[float, float]] = {}
        for box in self.boxes:
            if box.lane == 0 and passes_in(box.job):
                start, _ = spans.get(box.stage, (box.start, box.end))
                spans[box.stage] = (start, box.end)
        return spans


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
            for lane in lanes:
                yield Box(stage, lane, start, end, style, job)


def _style(job: Job, timeline: Timeline) -> Style:
    chunk, placement = place_of(job), timeline.placement
    if isinstance(job.kind, StageKind):
        return Style(str(job.kind))
    leg = placement.chunks_of[placement.stage_of[chunk]].index(chunk)
    recomputes = PassKind.B in kind_of(job).work and chunk in timeline.recomputing
    return Style(str(job.kind), leg, recomputes)


def origin_of(timeline: Timeline) -> float:
    """Start of the first job, in the timeline's clock."""
    slots = chain.from_iterable(timeline.lines)
    return min((slot.start for slot in slots), default=0.0)


def drawings_of(
    timelines: Timeline | Sequence[Timeline],
    costs: Costs | Sequence[Costs | None] | None = None,
) -> list[Drawing]:
    """Drawings of timelines with the same costs, or with different costs each."""
    several = [timelines] if isinstance(timelines, Timeline) else timelines
    of_each = [costs] * len(several) if isinstance(costs, Costs | None) else costs
    return [Drawing(*both) for both in zip(several, of_each, strict=True)]


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
        peak = max(peak_memory(timeline, costs))
        limit = costs.memory_limit
        self.top = 1.06 * peak or 1.0
        """Of the axis."""
        self.limit: float | None = None
        """One for all stages, unless it is far away."""
        if isinstance(limit, int | float) and limit < 1.5 * self.top:
            self.limit, self.top = limit, max(self.top, 1.06 * limit)
        self.labels = {0.0: "0", peak: _memory_text(peak, costs)}
        """Texts at the axis, by the amounts where they are."""
        origin, curves = origin_of(timeline), memory_over_time(timeline, costs)
        self.curves: dict[str, list[tuple[float, float]]] = {}
        """Times and amounts by colour."""
        for stage in range(0, len(curves), math.ceil(len(curves) / _MOST_CURVES)):
            amount, points = fixed[stage], [(0.0, fixed[stage])]
            for time, memory in dict(curves[stage]).items():  # the last of one time
                points += [(time - origin, amount), (time - origin, memory)]
                amount = memory
            points.append((step_time(timeline), amount))
            self.curves[_stage_colour(stage, len(curves))] = points


def _memory_text(amount: float, costs: Costs) -> str:
    """Write a memory in four digits; in M_B where F leaves 1."""
    text = format_memory(float(f"{amount:.4g}"))
    return f"{text} M_B" if costs.m_b == 1.0 else text


def _stage_colour(stage: int, n_stages: int) -> str:
    """From violet over green to yellow, bright enough for a dark page."""
    share = stage / max(n_stages - 1, 1)
    rgb = colorsys.hls_to_rgb((275 - 215 * share) / 360, 0.42 + 0.08 * share, 0.6)
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)


def legend_of(
    boxes: Iterable[Box], palette: Mapping[str, str] = PALETTE
) -> dict[str, str]:
    """Texts and colours of the legend: visible properties of boxes, and idle time."""
    styles = {box.style for box in boxes if box.end > box.start or box.style.at_once}
    roles = {style.role for style in styles}
    marks = {
        f"{role}  {look.summary}": Style(role).colour_in(palette)
        for role, look in LOOKS.items()
        if role in roles
    }
    marks["idle"] = palette["idle"]
    for style in sorted(styles):
        if style.recomputes:
            darker = Style(style.role, recomputes=True).colour_in(palette)
            marks.setdefault("darker: recomputes", darker)
    if any(style.leg for style in styles):
        later = Style("F", 1).colour_in(palette)
        marks["lighter: later chunk of a stage"] = later
    return marks


def ink_on(colour: str) -> str:
    """Dark or white letters, whichever stand out from a colour."""
    red, green, blue = _rgb(colour)
    return DARK if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"


def _rgb(colour: str) -> tuple[float, float, float]:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red, green, blue
