"""Splits with low lower bounds: where a polish may begin, beside balanced ones.

Many splits have about the least largest load, but differ in what the pipeline can do
with them: how long it takes to reach a stage, and to come back to it, what must be done
in that time, and whether memory lasts. Lower bounds know of all that, and cost a small
part of a plan. So splits are drawn at random, a few moves of layers from those with the
lowest mean of bounds so far; the highest bound alone says less (rank correlation with
plans .1 to .6; the mean .6 to .7).
"""

from bisect import insort
from collections.abc import Sequence
from random import Random

from zbpp.schedules.planner.budget import Budget
from zbpp.schedules.planner.layers.many_chunks import moved
from zbpp.schedules.planner.layers.trials import Trials

__all__ = ["BOUND", "low_bounds"]

BOUND = 1 / 60  # of a plan's price: a lower bound
_LIKELY = 20  # splits that moves begin from, by their outlook
_IN_VAIN = 8  # draws for each that is new and has no higher load


def low_bounds(
    trials: Trials,
    starts: Sequence[tuple[int, ...]],
    budget: Budget,
    *,
    below: float,
    number: int,
) -> list[tuple[int, ...]]:
    """Draw splits, those with the lowest mean of bounds first; always the same ones.

    Args:
        trials: what bounds the splits.
        starts: splits to begin with; they are not given back.
        budget: in passes placed; see `Trials.price`.
        below: the step of a plan that there is; higher bounds are of no use.
        number: of bounds.
    """
    rng = Random(0)
    chunks = range(len(starts[0]))
    known = set(starts)
    ranked = sorted((trials.outlook(split), split) for split in starts)
    for _ in range(_IN_VAIN * number if len(chunks) > 1 else 0):
        if len(known) - len(starts) >= number or not budget.is_left:
            break
        _, split = rng.choice(ranked[:_LIKELY])
        for _ in range(rng.choice((1, 1, 2, 3, 4))):
            split = moved(split, *rng.sample(chunks, 2)) or split
        if split in known or trials.load(split) >= below:
            continue
        known.add(split)
        budget.spend(BOUND * trials.price)
        if trials.bound(split) < below:
            insort(ranked, (trials.outlook(split), split))
    return [split for _, split in ranked if split not in starts]
