"""Starting points for the list scheduler: few rules that are good in different places.

A row says how many forwards run ahead of the backwards: ``slope * x + offset``, where x
is either of

    d   the stages p - s from here to the end: d is 1F1B and ZB-H1, 2d - 1 is ZB-H2
    r   the F's that fill the time until the first B can arrive, for the given times;
        equal to 2d - 1 if all times are equal

Then the temper of W: by which share of itself it may be late, and for which share of
the work in total; or that W is fair: see `list_scheduler`.

The rows were chosen one by one out of 336: each is the one that shortens the plans of
some 50 requests most (equal and unequal stages, limits from p/2 to 2p).
"""

import math
from collections.abc import Iterator
from itertools import pairwise

from zbpp.schedules.planner.single.list_scheduler import Rules
from zbpp.schedules.planner.single.problem import B, F, Kinds, Line, W

__all__ = ["hand_made", "seeds"]

_ANY = math.inf
_FAIR = -1.0
_SCALE = {"d": 1, "r": 2}
_ROWS = (
    # slope, of, offset, early, late, slack
    (2.0, "d", -1.0, 0, 0.75, _ANY),
    (0.75, "r", -0.25, 0, 0.25, _ANY),
    (0.5, "r", 0.0, 0, 0.5, _ANY),
    (2.0, "d", -1.0, 0, _FAIR, _ANY),
    (1.0, "d", -1.0, 0, 0.75, _ANY),
    (0.35, "r", 0.0, 0, _FAIR, _ANY),
    (1.5, "d", 0.0, 0, 0.75, _ANY),
    (1.0, "d", 0.0, 0, 0.75, _ANY),
    (0.75, "d", 0.0, 0, 0.0, _ANY),
    (0.0, "d", 1.0, 0, 0.0, _ANY),
    (1.0, "r", 0.0, 0, 1.0, _ANY),
    (1.0, "d", 0.0, 0, 1.0, _ANY),
    (1.0, "d", -1.0, 0, _FAIR, _ANY),
    (1.0, "r", -1.0, 0, 0.25, _ANY),
    (2.0, "d", -1.0, 1, 0.0, _ANY),
    (0.5, "d", 0.0, 0, 0.0, _ANY),
    (2.0, "d", -1.0, 0, 0.5, _ANY),
    (1.0, "r", -0.5, 1, _FAIR, _ANY),
    (1.2, "d", 1.0, 0, 0.5, _ANY),
    (2.0, "d", -1.0, 0, 1.0, 0.05),
    (0.5, "r", 0.5, 0, 0.5, _ANY),
    (1.0, "d", 0.0, 0, _FAIR, _ANY),
    (1.0, "r", -1.0, 0, _FAIR, _ANY),
    (1.0, "d", -1.0, 0, 1.0, 0.005),
    (0.5, "r", 0.5, 0, 0.75, _ANY),
    (1.0, "r", 0.0, 0, _FAIR, _ANY),
    (0.75, "r", 0.25, 0, _FAIR, _ANY),
    (0.75, "r", 0.75, 1, 1.0, _ANY),
    (1.25, "d", 0.0, 1, 1.0, 0.05),
    (0.0, "d", 1.0, 1, 0.0, _ANY),
    (1.5, "d", 0.0, 0, 0.25, _ANY),
    (1.0, "d", 0.0, 0, 0.25, _ANY),
    (1.0, "d", 0.0, 0, 0.0, _ANY),
)


def seeds(line: Line) -> Iterator[Rules]:
    """Yield the rules of all rows, the most useful first.

    Below p M_B those of at most d forwards come first.
    """
    p, m = line.n_stages, line.n_microbatches
    held = zip(line.limit, line.beyond, line.m_b, strict=True)
    little = any(limit - more < p * m_b for limit, more, m_b in held)
    rows = sorted(_ROWS, key=lambda row: little and row[0] * _SCALE[row[1]] > 1)
    work = max(line.work(stage) for stage in range(p))
    below = {"d": [float(p - stage) for stage in range(p)], "r": _returns(line)}
    for slope, of, offset, early, late, slack in rows:
        numbers = (slope * x + offset - 1e-9 for x in below[of])
        yield Rules(
            tuple(math.ceil(min(m, max(1.0, number))) for number in numbers),
            (early,) * p,
            (max(0.0, late),) * p,
            (slack * work if work else _ANY,) * p,
            is_fair=late == _FAIR,
        )


def _returns(line: Line) -> list[float]:
    """Count the F's of a stage that take the time until its first B can arrive."""
    counts = []
    way = 0.0  # from the end of the stage's F to the start of its B
    for stage in reversed(range(line.n_stages)):
        f = line.f[stage]
        counts.append(1 + way / f if f > 0 else math.inf)
        way += f + line.b[stage] + (2 * line.hop[stage - 1] if stage else 0.0)
    return counts[::-1]


def hand_made(line: Line) -> Iterator[Kinds]:
    """Yield the orders of ZB-H2, ZB-H1 and 1F1B; they may not fit the memory."""
    p = line.n_stages
    for arm, put_off in ((2, 2), (1, 1), (1, 0)):
        yield [
            _put_off_row(line, stage, arm * (p - stage) - (arm - 1), put_off * stage)
            for stage in range(p)
        ]


def _put_off_row(line: Line, stage: int, n_ahead: int, n_put_off: int) -> bytearray:
    """F runs ahead of B, and W follows a later B; see `patterns.zb_h1`."""
    m, splits = line.n_microbatches, line.splits[stage]
    n_warm_up = min(n_ahead, m)
    row = bytearray([F] * n_warm_up)
    for i, end in pairwise(sorted({0, min(n_put_off, m), m - n_warm_up, m})):
        weight = [W] if splits and i >= n_put_off else []
        forward = [F] if n_warm_up + i < m else []
        row += bytes([B, *weight, *forward]) * (end - i)
    if splits:
        row += bytearray([W] * min(n_put_off, m))
    return row
