"""Parts of passes: computations, and exchanges of data between them, in order.

A layer with experts sends its tokens to the experts' processes (dispatch) and back
(combine). Its F, B and W, of attention a, experts e and exchanges d, c:

    F  compute  a     e             B  compute     e'    a'      W  compute  e'' a''
       network     d     c             network  c'    d'

Each part occupies one lane of its stage; the parts of a pass run one after the other,
and those of other passes may run at the same time (`Schedule.parts`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from zbpp.core.columns import checked_time, whole_number
from zbpp.core.errors import RequestError
from zbpp.core.jobs import KINDS, Lane, PassKind

PartTimes = tuple[tuple[Lane, float], ...]
"""The lane and the time of each part of a pass."""

_LANES = (Lane.COMPUTE, Lane.NETWORK)


@dataclass(frozen=True)
class Parts:
    """Parts of the passes of some layers that are all alike.

    Args:
        f: the parts of a layer's F.
        b: the parts of its B.
        w: the parts of its W; none: the backward is in one piece.
        layers: how many there are; a pass has the parts of all, one after the other.

    Raises:
        RequestError: a time is negative or not finite, a lane is none of compute and
            network, f or b has no part, or there is no layer.
    """

    f: PartTimes
    b: PartTimes
    w: PartTimes = ()
    layers: int = 1

    def __post_init__(self) -> None:
        if whole_number("parts: layers", self.layers) < 1:
            raise RequestError(f"parts: layers is {self.layers}; it must be at least 1")
        for name in ("f", "b", "w"):
            object.__setattr__(self, name, _times(name, getattr(self, name)))
        if not (self.f and self.b):
            name = "b" if self.f else "f"
            raise RequestError(f"parts: {name} has no part; give at least one")

    def of(self, kind: PassKind) -> PartTimes:
        """The parts of a pass: of BW, those of B, then those of W."""
        times: PartTimes = ()
        for name in KINDS[kind].times:
            part: PartTimes = getattr(self, name)
            times += part * self.layers
        return times

    def flat(self) -> "Parts":
        """The same parts as those of one layer."""
        f, b, w = map(self.of, (PassKind.F, PassKind.B, PassKind.W))
        return Parts(f, b, w)

    def divided(self, n: int) -> "Parts":
        """The parts of each of n chunks that share the layers."""
        if self.layers % n:
            raise RequestError(
                f"parts: the {self.layers} layers of a stage do not divide evenly "
                f"among {n} chunks; give parts of more, shorter layers, or a list with "
                "an entry for each chunk"
            )
        return replace(self, layers=self.layers // n)

    def at_speed(self, speed: float) -> "Parts":
        """The same parts with their times divided by a speed."""
        f, b, w = (
            tuple((lane, time / speed) for lane, time in parts)
            for parts in (self.f, self.b, self.w)
        )
        return Parts(f, b, w, self.layers)

    def joined(self, *, splits: bool, loss: float) -> "Parts":
        """The parts that a stage runs: W's end its B where the two cannot be split.

        In F and B, parts that compute one after the other are one part, and those that
        take no time are left out. The loss ends F.
        """
        f = merged((*self.of(PassKind.F), (Lane.COMPUTE, loss)))
        if not splits:
            return Parts(f, merged(self.of(PassKind.BW)))
        return Parts(f, merged(self.of(PassKind.B)), self.of(PassKind.W))

    def time(self, kind: PassKind) -> float:
        """The time of a pass whose parts run in a row."""
        return sum(time for _, time in self.of(kind))

    def on_lane(self, kind: PassKind, lane: Lane) -> float:
        """The time of a pass on one lane."""
        return sum(time for on, time in self.of(kind) if on is lane)


def _times(name: str, pairs: Any) -> PartTimes:
    """Check the pairs of a lane, or its name, and a time."""
    times = []
    for pair in pairs if isinstance(pairs, list | tuple) else [None]:
        match pair:
            case [str(lane), time] if lane in _LANES:
                times.append(
                    (Lane(lane), checked_time(f"parts: a time of {name}", time))
                )
            case _:
                raise RequestError(
                    f"parts: {name} is {pairs!r:.60}, not a list of pairs such as "
                    '["compute", 1.5] and ["network", 0.5]'
                )
    return tuple(times)


def merged(parts: Iterable[tuple[Lane, float]]) -> PartTimes:
    """Join parts that compute one after the other; leave out those that take no time.

    >>> c, n = Lane.COMPUTE, Lane.NETWORK
    >>> [(str(lane), time) for lane, time in merged([(c, 1), (c, 2), (n, 1), (n, 1)])]
    [('compute', 3), ('network', 1), ('network', 1)]
    """
    joined: list[tuple[Lane, float]] = []
    for lane, time in parts:
        if lane is Lane.COMPUTE and joined and joined[-1][0] is lane:
            joined[-1] = lane, joined[-1][1] + time
        elif time:
            joined.append((lane, time))
    return tuple(joined) or ((Lane.COMPUTE, 0.0),)


def add_up_parts(costs: Any) -> None:
    """Let f, b and w of new costs be the sums of their parts; refuse others."""
    if not isinstance(costs.parts, Parts):
        object.__setattr__(costs, "parts", tuple(costs.parts))
    every = costs.parts
    for kind in (PassKind.F, PassKind.B, PassKind.W):
        (name,) = KINDS[kind].times
        time = getattr(costs, name)
        total = (
            every.time(kind)
            if isinstance(every, Parts)
            else tuple(parts.time(kind) for parts in every)
        )
        is_near = np.shape(time) == np.shape(total) and np.allclose(
            time, total, _MARGIN, 0.0
        )
        if time != _NOT_GIVEN and not is_near:
            raise RequestError(
                f"{name} is {time!r}, but its parts sum up to {total!r}; leave it out"
            )
        object.__setattr__(costs, name, total)


_NOT_GIVEN = 1.0
_MARGIN = 1e-9  # relative, for sums that were rounded
