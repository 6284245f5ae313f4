"""Repeating patterns as starting points when memory is short; V-Min and V-Half first.

Each micro-batch begins six units of time after the one before: two passes of each of
F, B and W on every stage. What remains to choose is when within its own pattern it
reaches each stage. On each of its four ways through the stages a pattern takes a fixed
number of steps per stage, after a pause:

    steps per stage of   F down  F up  B up  B down
    V-Min                   1      1     1      1      least memory, about p/3
    V-Half                  2      1     2      1      about p/2 (arXiv 2405.15362)

A pause is as short as it can be without two passes of a stage meeting, in one of a few
ways to share the waiting. Only the order of the F's and B's is taken from the pattern:
the W's are placed by `place_weights`, and times are the real ones.
"""

from collections.abc import Iterator
from itertools import product

from zbpp.schedules.wave_problem import Rows, WaveProblem

__all__ = ["pattern_rows"]

PERIOD = 6
STEPS = ((1, 1, 1, 1), (2, 1, 2, 1), (1, 2, 1, 2), (2, 1, 1, 2), (1, 2, 2, 1))
N_SHORTEST = 3  # patterns to take for each choice of steps


def pattern_rows(problem: WaveProblem) -> Iterator[Rows]:
    """Give the F's and B's of every pattern in its order."""
    for steps in STEPS:
        pauses = sorted(product((0,), *[range(PERIOD)] * 3), key=sum)
        n_found = 0
        for pause in pauses:
            starts = _starts(problem, steps, pause)
            if starts is not None:
                yield _rows(problem, starts)
                n_found += 1
                if n_found == N_SHORTEST:
                    break


def _rows(problem: WaveProblem, starts: list[int]) -> Rows:
    rows = []
    for numbers in problem.numbers:
        passes = sorted(
            (PERIOD * i + starts[q], q)
            for q in numbers
            for i in range(problem.n_microbatches)
        )
        rows.append([q for _, q in passes])
    return rows


def _starts(
    problem: WaveProblem, steps: tuple[int, ...], pauses: tuple[int, ...]
) -> list[int] | None:
    """When the first micro-batch starts each number; None if two passes meet."""
    p = problem.n_stages
    taken: list[set[int]] = [set() for _ in range(p)]
    starts: list[int] = []
    now = 0
    for way, (step, pause) in enumerate(zip(steps, pauses, strict=True)):
        for k in range(p):
            at = now + pause + k * step
            of_stage = taken[problem.stage[way * p + k]]
            if at % PERIOD in of_stage:
                return None
            of_stage.add(at % PERIOD)
            starts.append(at)
        now = starts[-1] + 1
    return starts
