"""Collectives as boxes on matplotlib axes: a thin lane below the jobs of each stage."""

from typing import TYPE_CHECKING

from zbpp.core import Collective, CollectiveKind, Timeline
from zbpp.simulator.palette import COLOURS, legs, shade

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_lanes", "rectangle"]

_LANE = (0.23, 0.43)  # top and bottom, in rows


def draw_lanes(axes: "Axes", timeline: Timeline, start: float) -> None:
    """Draw what each stage gathers and adds up beside its jobs; times from a start."""
    from matplotlib.collections import PolyCollection

    leg_of = legs(timeline.placement)
    groups: dict[tuple[CollectiveKind, int], list[list[tuple[float, float]]]] = {}
    for stage, lane in enumerate(timeline.collectives):
        for slot in lane:
            assert isinstance(slot.job, Collective)
            key = (slot.job.kind, leg_of[slot.job.chunk])
            box = rectangle(stage, slot.start - start, slot.end - start, _LANE)
            groups.setdefault(key, []).append(box)
    for (kind, leg), boxes in groups.items():
        axes.add_collection(
            PolyCollection(
                boxes,
                facecolors=shade(COLOURS[kind], leg),
                edgecolors="white",
                linewidths=0.3,
                gid=f"{kind} {leg}",
            )
        )


def rectangle(
    stage: int, start: float, end: float, box: tuple[float, float]
) -> list[tuple[float, float]]:
    """Corners of a box in the row of a stage; ``box`` is its top and bottom there."""
    top, bottom = stage + box[0], stage + box[1]
    return [(start, top), (end, top), (end, bottom), (start, bottom)]
