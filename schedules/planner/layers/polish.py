"""Move layers between chunks while the planned step gets shorter.

The least largest load is not all: where memory is short, early stages that hold many
micro-batches want few layers, and of the splits with the same largest load some plan
better than others. Each trial is a plan of its own, with effort fast.

A move takes a layer from a chunk and gives one to another; the chunks between them
shift. The stages with the longest spans give first, and those with the least load take
first. A split whose lower bound is not below the best plan is not planned.
"""

from collections.abc import Iterator
from itertools import product
from random import Random

from zbpp.schedules.planner.budget import Budget
from zbpp.schedules.planner.layers.candidates import BOUND
from zbpp.schedules.planner.layers.many_chunks import moved
from zbpp.schedules.planner.layers.trials import Trial, Trials

__all__ = ["perturb_and_polish", "polish"]

_ROUNDING = 1e-9  # relative
_MOST_IN_VAIN = 1000  # splits drawn that were known, or too long


def polish(
    trials: Trials,
    start: Trial,
    budget: Budget,
    *,
    target: float = 0.0,
    by_bound: bool = False,
) -> Trial:
    """Move layers while that is better; the first better split is taken.

    Args:
        trials: what plans the splits.
        start: a split and its plan.
        budget: in passes placed; see `Trials.price`.
        target: a lower bound of the step: the end where it is reached.
        by_bound: try the splits with the lowest bounds first, not those that take from
            the critical stage.
    """
    best = start
    while best.step > target * (1 + _ROUNDING) and budget.is_left:
        found = _better_neighbour(trials, best, budget, by_bound=by_bound)
        if found is None:
            break
        best = found
    return best


def perturb_and_polish(
    trials: Trials, best: Trial, budget: Budget, *, target: float = 0.0
) -> Trial:
    """Polish from splits near the best one, until the budget is spent.

    The budget must have an end in time. The moves are drawn at random, always in the
    same order.
    """
    rng = Random(0)
    chunks = range(len(best.split))
    in_vain = 0
    while (
        best.step > target * (1 + _ROUNDING)
        and budget.is_left
        and len(chunks) > 1
        and in_vain < _MOST_IN_VAIN
    ):
        split = best.split
        for _ in range(rng.choice((2, 2, 3, 4))):
            split = moved(split, *rng.sample(chunks, 2)) or split
        if trials.is_done(split) or trials.load(split) > 1.1 * best.step:
            in_vain += 1
            continue
        in_vain = 0
        start = _planned(trials, split, budget)
        if start is None:
            continue
        other = polish(trials, start, budget, target=target)
        if other.is_better_than(best):
            best = other
    return best


def _better_neighbour(
    trials: Trials, best: Trial, budget: Budget, *, by_bound: bool
) -> Trial | None:
    """The first neighbour in order that is better."""
    neighbours = _neighbours(trials, best, budget)
    if by_bound:
        neighbours = iter(sorted(neighbours, key=trials.outlook))
    for split in neighbours:
        if not budget.is_left:
            return None
        trial = _planned(trials, split, budget)
        if trial is not None and trial.is_better_than(best):
            return trial
    return None


def _neighbours(
    trials: Trials, best: Trial, budget: Budget
) -> Iterator[tuple[int, ...]]:
    """Splits a move away that may be better, in the order of the moves."""
    for source, target in _moves(trials, best):
        split = moved(best.split, source, target)
        if split is None or trials.load(split) > best.step:
            continue
        budget.spend(BOUND * trials.price)
        if trials.bound(split) <= best.step * (1 + _ROUNDING):
            yield split


def _moves(trials: Trials, best: Trial) -> list[tuple[int, int]]:
    """Chunks that give and take: from the critical stage to the idle one first."""
    stage_of = trials.placement.stage_of
    busy, _ = trials.loads.by_stage(best.split)
    steps = best.steps
    chunks = range(len(stage_of))
    givers = sorted(chunks, key=lambda c: (-steps[stage_of[c]], -busy[stage_of[c]], c))
    takers = sorted(chunks, key=lambda c: (busy[stage_of[c]], c))
    return [(a, b) for a, b in product(givers, takers) if a != b]


def _planned(trials: Trials, split: tuple[int, ...], budget: Budget) -> Trial | None:
    if not trials.is_done(split):
        budget.spend(trials.price)
    return trials.of(split)
