"""Exact balance of two chunks a stage: is there a split with no load above T?

Stages take their two chunks in turn, from stage 0 on. What is left of the layers is
two numbers, i and j:

    V             0 1 2 2 1 0     [0, i) and [j, L) are taken; at the end i = j
    interleaved   0 1 2 0 1 2     [0, i) and [k, j) are taken, from a guess k of where
                                  the second round begins; at the end i = k, j = L

For every i the reachable j's are the bits of one integer, for interleaved chunks of
all guesses k side by side (bit k (L+1) + j). A stage's chunk of r more layers is then
a shift by r of those bits whose r layers fit into what its first chunk leaves of T. So
all j's, and all guesses, go in one operation. T is found by bisection to 1e-9.
"""

from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property

from zbpp.core import Placement
from zbpp.schedules.planner.layers.loads import Loads, roomy

__all__ = ["TwoChunks", "is_two_chunks"]


def is_two_chunks(placement: Placement) -> bool:
    """True if a placement is a V or two interleaved rounds, in any order of stages."""
    p, stage_of = placement.n_stages, placement.stage_of
    first, second = stage_of[:p], stage_of[p:]
    return len(set(first)) == p and second in (first, first[::-1])


class _Windows:
    """For r layers in a row: the places where a sum of them is at most a number.

    Places are j's, as bits: the layers j-r..j-1 (V), or j..j+r-1.
    """

    def __init__(self, sums: list[float], *, ends: bool, repeat: int) -> None:
        self._repeat = repeat
        n = len(sums) - 1
        self._rows: list[tuple[list[float], list[int]]] = [([], [0])]
        for r in range(1, n + 1):
            found = sorted(
                (sums[i + r] - sums[i], i + r if ends else i) for i in range(n - r + 1)
            )
            masks = [0]
            for _, place in found:
                masks.append(masks[-1] | 1 << place)
            self._rows.append(([value for value, _ in found], masks))
        self._wide: dict[tuple[int, int], int] = {}

    def at_most(self, r: int, number: float) -> int:
        """Places where r layers sum up to at most a number."""
        values, masks = self._rows[r]
        count = bisect_right(values, number)
        if self._repeat == 1 or count == 0:
            return masks[count]
        key = r, count
        if key not in self._wide:
            self._wide[key] = masks[count] * self._repeat
        return self._wide[key]


class TwoChunks:
    """Splits of one set of loads on a placement that `is_two_chunks`."""

    def __init__(self, loads: Loads) -> None:
        self.loads = loads
        placement = loads.placement
        self._p = placement.n_stages
        self._stages = placement.stage_of[: self._p]
        self._is_v = placement.stage_of[self._p :] != self._stages or self._p == 1
        n = loads.n_layers
        self._width = n + 1
        guesses = range(self._p, n - self._p + 1)
        self._repeat = 1 if self._is_v else sum(1 << k * self._width for k in guesses)
        self._start = (
            1 << n if self._is_v else sum(1 << k * self._width + k for k in guesses)
        )
        self._held: dict[float, _Windows] = {}

    @cached_property
    def _busy(self) -> _Windows:
        return _Windows(list(self.loads.time), ends=self._is_v, repeat=self._repeat)

    def split(self, most: float) -> tuple[int, ...] | None:
        """A split in which no stage's load is above ``most``; None if there is none."""
        reached = [{0: self._start}]
        for turn in range(self._p):
            reached.append(self._after(turn, reached[-1], most))
            if not reached[-1]:
                return None
        n = self.loads.n_layers
        for i, mask in sorted(reached[-1].items()):
            bit = i if self._is_v else i * self._width + n
            if mask >> bit & 1:
                return self._way_back(reached, i, bit, most)
        return None

    def _after(self, turn: int, reached: dict[int, int], most: float) -> dict[int, int]:
        """States reached when the stage in this turn has taken its two chunks."""
        after: dict[int, int] = {}
        for i, mask in reached.items():
            for first, r, places in self._choices(turn, i, most):
                taken = mask & places
                if taken:
                    moved = taken >> r if self._is_v else taken << r
                    after[first] = after.get(first, 0) | moved
        return {
            i: kept
            for i, mask in after.items()
            if (kept := self._with_room(turn, i, mask))
        }

    def _with_room(self, turn: int, i: int, mask: int) -> int:
        """Drop the places that leave too few layers for the stages to come."""
        rest = self._p - 1 - turn
        least = i + 2 * rest if self._is_v else (i + rest) * self._width
        return mask >> least << least

    def _choices(
        self, turn: int, i: int, most: float
    ) -> Iterator[tuple[int, int, int]]:
        """End of the first chunk, layers of the second, and where these fit."""
        loads, stage, p = self.loads, self._stages[turn], self._p
        second = 2 * p - 1 - turn if self._is_v else p + turn
        limit = roomy(loads.limit[stage])
        rest = p - 1 - turn
        held = self._memory(second) if loads.is_limited else None
        for end in range(i + 1, loads.n_layers - p - rest + 1):
            room = most - loads.busy(i, end) - loads.each
            space = limit - loads.held(turn, i, end)
            if room < 0 or space < 0:
                break
            for r in range(1, loads.n_layers - end - 2 * rest + 1):
                places = self._busy.at_most(r, room)
                if held is not None and places:
                    places &= held.at_most(r, space)
                if not places:
                    break
                yield end, r, places

    def _memory(self, chunk: int) -> _Windows:
        need = self.loads.in_flight[chunk]
        if need not in self._held:
            pairs = zip(self.loads.fixed, self.loads.left, strict=True)
            sums = [fixed + need * left for fixed, left in pairs]
            self._held[need] = _Windows(sums, ends=self._is_v, repeat=self._repeat)
        return self._held[need]

    def _way_back(
        self, reached: list[dict[int, int]], i: int, bit: int, most: float
    ) -> tuple[int, ...]:
        split = [0] * (2 * self._p)
        for turn in reversed(range(self._p)):
            i, bit, one, two = self._came_from(turn, reached[turn], i, bit, most)
            split[turn] = one
            split[2 * self._p - 1 - turn if self._is_v else self._p + turn] = two
        return tuple(split)

    def _came_from(
        self, turn: int, reached: dict[int, int], i: int, bit: int, most: float
    ) -> tuple[int, int, int, int]:
        for before in sorted(reached, reverse=True):
            for end, r, places in self._choices(turn, before, most):
                place = bit + r if self._is_v else bit - r
                if end == i and place >= 0 and (reached[before] & places) >> place & 1:
                    return before, place, i - before, r
        raise AssertionError("a place that is reached has a way to it")
