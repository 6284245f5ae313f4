"""Jobs as coloured boxes on matplotlib axes, and their numbers.

All boxes of one colour are one collection, so that ten thousand jobs draw in seconds.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from zbpp.core import Check, Job, Pass, PassKind, Slot, Timeline
from zbpp.simulator.bands import shares
from zbpp.simulator.lanes import draw_lanes, rectangle
from zbpp.simulator.metrics import step_time
from zbpp.simulator.palette import COLOURS, IDLE, NAMES, ink_on, legs, letter_of, shade

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

__all__ = ["draw_jobs", "durations", "legend_handles", "origin", "write_numbers"]

_BOX = (-0.43, 0.43)  # top and bottom, in rows; 0 is the middle
_ABOVE_LANE = (-0.43, 0.18)
_POINTS = 72.0  # per inch
_DIGIT_WIDTH = 0.7  # of the font size, with some air
_LARGEST_FONT, _SMALLEST_FONT = 9.0, 4.5  # points

_THINNEST = 4.0  # points; boxes that are thinner become bands
_SMOOTH = 12  # boxes in the window of a band: whole rounds of 2, 3, 4 or 6 jobs
_BAND_POINTS = 900  # of a band's outline, along its row

_HATCH = "////"  # B's that compute layers again

_Group = tuple[str, int]  # letter; first (0), second (1), ... chunk of its stage
_Member = tuple[int, Slot]  # with its stage


def draw_jobs(axes: "Axes", timeline: Timeline) -> None:
    """Draw one row a stage and one box a job; grey is idle time within a span."""
    from matplotlib.collections import PolyCollection

    start = origin(timeline)
    n_stages = timeline.placement.n_stages
    spans = [timeline.passes(stage) for stage in range(n_stages)]
    box = _box(timeline)
    bubbles = [
        rectangle(stage, passes[0].start - start, passes[-1].end - start, box)
        for stage, passes in enumerate(spans)
        if passes
    ]
    axes.add_collection(
        PolyCollection(bubbles, facecolors=IDLE, linewidths=0, gid="idle")
    )
    axes.set_xlim(0, step_time(timeline) or 1.0)
    axes.set_ylim(n_stages - 0.5, -0.5)
    if is_banded(axes, timeline):
        _draw_bands(axes, timeline)
    else:
        _draw_boxes(axes, timeline)
    _draw_instants(axes, timeline)
    draw_lanes(axes, timeline, start)
    axes.set_yticks(range(n_stages), [f"stage {stage}" for stage in range(n_stages)])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def is_banded(axes: "Axes", timeline: Timeline) -> bool:
    """True if most jobs are so thin that bands take their place."""
    lasting = sorted(durations(timeline))
    if not lasting:
        return False
    return lasting[len(lasting) // 2] * _points_per_unit(axes) < _THINNEST


def _draw_boxes(axes: "Axes", timeline: Timeline) -> None:
    from matplotlib.collections import PolyCollection

    start, box = origin(timeline), _box(timeline)
    shortest = min(durations(timeline), default=1.0)
    edge = min(0.8, 0.1 * _points_per_unit(axes) * shortest)
    for (letter, leg), members in _groups(timeline).items():
        for hatch, own in _by_hatch(timeline, members).items():
            axes.add_collection(
                PolyCollection(
                    [
                        rectangle(stage, slot.start - start, slot.end - start, box)
                        for stage, slot in own
                    ],
                    facecolors=shade(COLOURS[letter], leg),
                    edgecolors="white",
                    linewidths=edge,
                    hatch=hatch or None,
                    gid=f"{letter} {leg}{' recomputed' if hatch else ''}",
                )
            )


def _draw_bands(axes: "Axes", timeline: Timeline) -> None:
    """Draw the share of each colour in a moving window; what is left is idle."""
    from matplotlib.collections import PolyCollection

    start, lasting = origin(timeline), sorted(durations(timeline))
    window = _SMOOTH * lasting[len(lasting) // 2]
    box = _box(timeline)
    groups = _groups(timeline)
    outlines: dict[_Group, list[list[tuple[float, float]]]] = {
        key: [] for key in groups
    }
    for stage in range(timeline.placement.n_stages):
        passes = timeline.passes(stage)
        if not passes:
            continue
        span = (passes[0].start, passes[-1].end)
        times = [
            span[0] + (span[1] - span[0]) * i / _BAND_POINTS
            for i in range(_BAND_POINTS + 1)
        ]
        own = {
            key: [slot for of, slot in members if of == stage]
            for key, members in groups.items()
            if key[0] not in "OV"
        }
        top = [stage + box[0]] * len(times)
        for key, share in shares(own, times, window=window, within=span).items():
            height = box[1] - box[0]
            below = [y + height * part for y, part in zip(top, share, strict=True)]
            edge = zip(times, top, strict=True), zip(times, below, strict=True)
            upper, lower = ([(x - start, y) for x, y in line] for line in edge)
            outlines[key].append([*upper, *reversed(lower)])
            top = below
    for (kind, leg), shapes in outlines.items():
        if kind in "OV":
            shapes = [
                rectangle(stage, slot.start - start, slot.end - start, box)
                for stage, slot in groups[kind, leg]
            ]
        axes.add_collection(
            PolyCollection(
                shapes,
                facecolors=shade(COLOURS[kind], leg),
                linewidths=0,
                gid=f"{kind} {leg} bands",
            )
        )


def _draw_instants(axes: "Axes", timeline: Timeline) -> None:
    """Draw a V that takes no time as a line."""
    from matplotlib.collections import LineCollection

    start = origin(timeline)
    lines = [
        [(slot.start - start, stage - 0.5), (slot.start - start, stage + 0.5)]
        for stage, slot in _slots(timeline)
        if isinstance(slot.job, Check) and slot.duration == 0
    ]
    if lines:
        axes.add_collection(
            LineCollection(lines, colors=COLOURS["V"], linewidths=2, gid="V instants")
        )


def write_numbers(axes: "Axes", timeline: Timeline) -> None:
    """Write the micro-batch into every box that is wide enough for it."""
    start, box = origin(timeline), _box(timeline)
    points = _points_per_unit(axes)
    digits = len(str(timeline.n_microbatches - 1))
    row = axes.get_window_extent().height / abs(axes.get_ylim()[0] + 0.5)
    share = 0.7 * (box[1] - box[0])
    largest = min(_LARGEST_FONT, share * row * _POINTS / _dpi(axes))
    for (letter, leg), members in _groups(timeline).items():
        ink = ink_on(shade(COLOURS[letter], leg))
        lasting = sorted(slot.duration for _, slot in members)
        font = lasting[len(lasting) // 2] * points / (_DIGIT_WIDTH * digits)
        if font < _SMALLEST_FONT or letter == "SEND":
            continue
        font = min(font, largest)
        for stage, slot in members:
            job = slot.job
            text = str(job.microbatch) if isinstance(job, Pass) else str(job)
            if slot.duration * points < 0.99 * _DIGIT_WIDTH * font * len(text):
                continue
            axes.text(
                (slot.start + slot.end) / 2 - start,
                stage + sum(box) / 2,
                text,
                color=ink,
                fontsize=font,
                ha="center",
                va="center_baseline",
                clip_on=True,
            )


def legend_handles(timelines: Sequence[Timeline]) -> "list[Artist]":
    """Make a legend entry for each kind of box that can be seen."""
    from matplotlib.patches import Patch

    seen = {
        key
        for timeline in timelines
        for key, members in _groups(timeline).items()
        if key[0] == "V" or any(slot.duration > 0 for _, slot in members)
    }
    seen |= {
        (letter_of(slot.job), 0)
        for timeline in timelines
        for lane in timeline.collectives
        for slot in lane
        if slot.duration > 0
    }
    handles: list[Artist] = [
        Patch(color=COLOURS[letter], label=name)
        for letter, name in NAMES.items()
        if (letter, 0) in seen
    ]
    handles.append(Patch(color=IDLE, label="idle"))
    if any(timeline.recomputing for timeline in timelines):
        again = Patch(
            facecolor=COLOURS["B"],
            edgecolor="white",
            linewidth=0,
            hatch=_HATCH,
            label="hatched: recomputes",
        )
        handles.append(again)
    if any(leg > 0 for _, leg in seen):
        lighter = shade(COLOURS["F"], 1)
        handles.append(Patch(color=lighter, label="lighter: later chunk of a stage"))
    return handles


def origin(timeline: Timeline) -> float:
    """Start of the first job; pictures count time from there."""
    rows = (*timeline.rows, *timeline.collectives)
    return min((slot.start for row in rows for slot in row), default=0.0)


def durations(timeline: Timeline) -> list[float]:
    """Durations of the jobs that take time at all."""
    return [slot.duration for _, slot in _slots(timeline) if slot.duration > 0]


def _slots(timeline: Timeline) -> Iterator[tuple[int, Slot]]:
    for stage, row in enumerate(timeline.rows):
        for slot in row:
            yield stage, slot


def _groups(timeline: Timeline) -> dict[_Group, list[tuple[int, Slot]]]:
    """Slots with their stages: the boxes of one colour, in the order of the legend.

    What a stage only sends at the end of a pass is a box of its own.
    """
    placement = timeline.placement
    leg_of = legs(placement)
    groups: dict[_Group, list[tuple[int, Slot]]] = {
        (key, leg): []
        for key in COLOURS
        for leg in range(max(map(len, placement.chunks_of)))
    }
    for stage, slot in _slots(timeline):
        sends = timeline.sending_of(slot.job)
        if sends:
            ends = slot.end - sends
            groups["SEND", 0].append((stage, Slot(slot.job, ends, slot.end)))
            slot = Slot(slot.job, slot.start, ends)
        leg = leg_of[slot.job.chunk] if isinstance(slot.job, Pass) else 0
        groups[letter_of(slot.job), leg].append((stage, slot))
    return {key: members for key, members in groups.items() if members}


def _by_hatch(timeline: Timeline, members: list[_Member]) -> dict[str, list[_Member]]:
    """Boxes of one colour, those apart that compute layers again."""
    found: dict[str, list[_Member]] = {}
    for stage, slot in members:
        found.setdefault(_hatch(timeline, slot.job), []).append((stage, slot))
    return found


def _hatch(timeline: Timeline, job: Job) -> str:
    if not isinstance(job, Pass) or job.kind not in (PassKind.B, PassKind.BW):
        return ""
    return _HATCH if job.chunk in timeline.recomputing else ""


def _box(timeline: Timeline) -> tuple[float, float]:
    """Top and bottom of the boxes in their row; collectives have a lane below them."""
    return _ABOVE_LANE if timeline.collectives else _BOX


def _points_per_unit(axes: "Axes") -> float:
    left, right = axes.get_xlim()
    return axes.get_window_extent().width / _dpi(axes) * _POINTS / (right - left)


def _dpi(axes: "Axes") -> float:
    figure = axes.get_figure(root=True)
    assert figure is not None
    return figure.dpi
