"""The orders of V-Min and V-Half, two repeating patterns (arXiv 2405.15362).

A micro-batch begins six units of time after the one before: two passes of each of F, B
and W on every stage. These are the times at which the first one begins its F's and B's
on stage s; the waits keep two passes of a stage from meeting:

             F down   F up             B down             B up              memory
    V-Min    s        2p - 1 - s       2p + s + wait      4p - 1 - s + wait    about p/3
             wait: 2 if 3 divides p
    V-Half   2s       3p - 2 - s       3p - 1 + 2s + wait 6p - 2 - s + wait    about p/2
             wait: 3 if p is even

Only the order of the F's and B's is taken from them; the times are the real ones, and
the W's are placed by the list scheduler of `planner.search`.
"""

from collections.abc import Sequence

__all__ = ["v_half_rows", "v_min_rows"]

PERIOD = 6

Numbers = Sequence[Sequence[int]]
"""Per stage the numbers that name its four F's and B's, in the order of the table."""


def v_min_rows(numbers: Numbers, n_microbatches: int) -> list[list[int]]:
    """Order the F's and B's of every stage as V-Min does."""
    p = len(numbers)
    wait = 0 if p % 3 else 2
    return _rows(
        numbers,
        n_microbatches,
        [(s, 2 * p - 1 - s, 2 * p + s + wait, 4 * p - 1 - s + wait) for s in range(p)],
    )


def v_half_rows(numbers: Numbers, n_microbatches: int) -> list[list[int]]:
    """Order the F's and B's of every stage as V-Half does."""
    p = len(numbers)
    wait = 0 if p % 2 else 3
    return _rows(
        numbers,
        n_microbatches,
        [
            (2 * s, 3 * p - 2 - s, 3 * p - 1 + 2 * s + wait, 6 * p - 2 - s + wait)
            for s in range(p)
        ],
    )


def _rows(
    numbers: Numbers, n_microbatches: int, starts: list[tuple[int, int, int, int]]
) -> list[list[int]]:
    rows = []
    for stage_numbers, first in zip(numbers, starts, strict=True):
        passes = sorted(
            (PERIOD * i + start, q)
            for q, start in zip(stage_numbers, first, strict=True)
            for i in range(n_microbatches)
        )
        rows.append([q for _, q in passes])
    return rows
