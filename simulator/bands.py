"""Rows of jobs too thin to be seen, as bands: shares of time, one above the other.

A moving window of several jobs takes the place of each of them, so that the phases of
a schedule are seen, and no moire of its bars:

    F F F F F F B W F B W F B W      FFFFFFFFF\\___FFFFFFF
                                              \\__BBBBBBB
                                               \\_WWWWWWW
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

from zbpp.core import Slot

if TYPE_CHECKING:
    from collections.abc import Hashable

__all__ = ["shares"]

Key = TypeVar("Key", bound="Hashable")


def shares(
    members: Mapping[Key, Sequence[Slot]],
    times: Sequence[float],
    *,
    window: float,
    within: tuple[float, float],
) -> dict[Key, list[float]]:
    """Share of each group of slots in a window around each time, 0 to 1.

    Args:
        members: slots of one stage by group, each in time order.
        times: at which to look.
        window: width of the window; it is cut at the ends of ``within``.
        within: start and end of the stage's span.

    >>> from zbpp.core import Step
    >>> slots = [Slot(Step(0), 0.0, 1.0), Slot(Step(0), 2.0, 3.0)]
    >>> shares({"O": slots}, [1.5], window=3.0, within=(0.0, 3.0))
    {'O': [0.6666666666666666]}
    """
    windows = [
        (max(time - window / 2, within[0]), min(time + window / 2, within[1]))
        for time in times
    ]
    return {
        key: [
            (_until(slots, spent, high) - _until(slots, spent, low)) / (high - low)
            if high > low
            else 0.0
            for low, high in windows
        ]
        for key, slots in members.items()
        for spent in [list(accumulate((s.duration for s in slots), initial=0.0))]
    }


def _until(slots: Sequence[Slot], spent: Sequence[float], time: float) -> float:
    """Time spent in slots before a time; ``spent`` has it before each slot."""
    index = bisect_right(slots, time, key=lambda slot: slot.start) - 1
    if index < 0:
        return 0.0
    slot = slots[index]
    return spent[index] + min(time, slot.end) - slot.start
