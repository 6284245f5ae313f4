"""Plan a mode and the split of the layers together.

1. `balance`: the least largest load, within the memory limits, by exact methods.
2. `polish`: layers move while plans with effort fast get shorter.
3. The same from another split, the best of those that `candidates` finds by their lower
   bounds (not with effort fast).
4. The best few splits, the balanced one and the even one are planned with the effort
   that is wanted; the best plan is kept. So it is never longer than the even one's.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal

from zbpp.core import (
    Costs,
    LayerCosts,
    LimitError,
    MemoryModel,
    Placement,
    RequestError,
    Schedule,
)
from zbpp.schedules.planner.budget import LONG, Budget, parse_effort
from zbpp.schedules.planner.figures import is_below
from zbpp.schedules.planner.layers.balance import balance
from zbpp.schedules.planner.layers.candidates import low_bounds
from zbpp.schedules.planner.layers.loads import even_split
from zbpp.schedules.planner.layers.polish import perturb_and_polish, polish
from zbpp.schedules.planner.layers.trials import (
    SplitPlanner,
    Trial,
    Trials,
    better,
    recompute_by_chunk,
)

__all__ = ["LayerPlan", "Split", "plan_split"]

Split = Literal["balanced", "even"] | Sequence[int] | None
"""Layers of each chunk, or how to choose them; None: balanced."""

_PASSES = {"fast": 3e4, "default": 2e5, "best": math.inf}
_LEAST_PLANS = {"fast": 3, "default": 8, "best": 0}
_IN_FLIGHT = (1.0, 0.5, 0.25, 0.75)  # of what the mode holds without a limit
_FINALISTS = {"fast": 1, "default": 3}
_LARGE = 5e4  # passes: one finalist is enough
_ROUNDING = 1e-9  # relative
_N_DRAWN, _N_PLANNED = 200, 8  # splits with low bounds
_SHARES = (0.4, 0.6)  # of the seconds of best: polish; plans at the end


@dataclass(frozen=True)
class LayerPlan:
    """A schedule, the split that it is for, and what even chunks would take."""

    schedule: Schedule
    """With ``split`` and ``recompute`` in it."""
    costs: Costs
    """Of the chunks."""
    memory: MemoryModel
    """Of the chunks."""
    split: tuple[int, ...]
    """Layers of each chunk."""
    recompute: frozenset[int]
    """Layers that are recomputed, of the whole model."""
    step: float
    """Longest span of a stage with its optimizer, in the unit of the costs."""
    barrier_step: float
    """Time of a step among many, behind a barrier."""
    peak: float
    """Largest memory of a stage."""
    ideal_step: float
    """Work of a step, shared evenly by the stages."""
    even_step: float | None
    """``step`` of even chunks, with the same mode; None: they do not fit."""

    @property
    def gain(self) -> float | None:
        """Share by which the step is shorter than that of even chunks."""
        if not self.even_step:
            return None
        return 1 - self.step / self.even_step

    def is_better_than(self, other: "LayerPlan") -> bool:
        """Compare ``step``, then ``barrier_step``, then ``peak``."""
        return is_below(self.figures, other.figures)

    @property
    def figures(self) -> tuple[float, float, float]:
        """``step``, ``barrier_step`` and ``peak``."""
        return self.step, self.barrier_step, self.peak


def plan_split(
    planner: SplitPlanner,
    layers: LayerCosts,
    placement: Placement,
    n_microbatches: int,
    *,
    split: Split = None,
    recompute: Collection[int] = (),
    effort: str = "default",
) -> LayerPlan:
    """Plan one placement with the best split, or with the one that is wanted.

    Args:
        planner: a mode with its sizes.
        layers: times, memories and limit.
        placement: chunk to stage, of the planner's schedules.
        n_microbatches: in a step.
        split: see `Split`.
        recompute: layers that are recomputed.
        effort: of the plans at the end; ``best:SECONDS`` also of the polish.

    Raises:
        LimitError: no split that was tried fits the memory limits.
        RequestError: split or layers do not fit the placement.
    """
    kind, seconds = parse_effort(effort)
    trials = Trials(planner, layers, placement, n_microbatches, recompute=recompute)
    even = even_split(layers.n_layers, placement.n_chunks)
    if split is None or split == "balanced":
        finalists = _polished(trials, even, kind, seconds)
    elif split == "even":
        finalists = [even]
    elif isinstance(split, str):
        raise RequestError(
            f"split is {split!r}; choose balanced or even, or give the layers of each "
            "chunk"
        )
    else:
        finalists = [tuple(split)]
    last = effort
    if kind == "best":
        share = _SHARES[1] if split in (None, "balanced") else 1.0
        last = f"best:{share * seconds / len({*finalists, even}):g}"
    found = [one for own in finalists if (one := trials.of(own, last)) is not None]
    if not found:
        assert trials.last_error is not None
        raise trials.last_error
    is_long = kind == LONG and even not in finalists
    of_even = trials.of(even, "default" if is_long else last)
    best = reduce(better, found)
    return _finished(trials, best, of_even)


def _polished(
    trials: Trials, even: tuple[int, ...], kind: str, seconds: float
) -> list[tuple[int, ...]]:
    """Splits that deserve the effort that is wanted, best first."""
    budget = Budget(
        max(_PASSES[kind], _LEAST_PLANS[kind] * trials.price),
        seconds if kind != "best" else seconds * _SHARES[0],
    )
    splits, target = _starts(trials, even)
    starts: list[Trial] = []
    for split in splits:
        if starts and not budget.is_left:
            break
        budget.spend(trials.price)
        trial = trials.of(split)
        starts += [] if trial is None else [trial]
    if not starts:
        return splits
    first = reduce(better, starts)
    best = polish(trials, first, budget, target=target)
    polished = best.split
    if kind != "fast" and best.step > target * (1 + _ROUNDING):
        wide = Budget(budget.passes, budget.seconds_left)
        best = better(best, _by_bounds(trials, first, splits, wide, target))
    if kind == "best":
        best = perturb_and_polish(trials, best, budget, target=target)
        return list(dict.fromkeys([best.split, even]))
    ranked = sorted(trials.fast(), key=lambda one: (one.step, one.barrier_step))
    n_last = 1 if trials.price > _LARGE else _FINALISTS[kind]
    few = [one.split for one in ranked[:n_last]]
    return list(dict.fromkeys([best.split, polished, *few, splits[0], even]))


def _by_bounds(
    trials: Trials,
    first: Trial,
    splits: Sequence[tuple[int, ...]],
    budget: Budget,
    target: float,
) -> Trial:
    """Plan the splits with low bounds that are drawn, and polish the best one."""
    drawn = low_bounds(trials, splits, budget, below=first.step, number=_N_DRAWN)
    best: Trial | None = None
    for split in drawn[:_N_PLANNED]:
        if not budget.is_left:
            break
        budget.spend(trials.price)
        trial = trials.of(split)
        if trial is not None:
            best = trial if best is None else better(best, trial)
    if best is None:
        return first
    return polish(trials, best, budget, target=target, by_bound=True)


def _starts(
    trials: Trials, even: tuple[int, ...]
) -> tuple[list[tuple[int, ...]], float]:
    """Balanced splits, the even one, and a lower bound of the step of all.

    Under a memory limit also those with room for more micro-batches in flight.
    """
    layers, placement, m = trials.layers, trials.placement, trials.n_microbatches
    first = balance(layers, placement, m, recompute=trials.recompute)
    splits = [first.split]
    if layers.limit is not None and layers.n_layers > placement.n_chunks:
        most = trials.in_flight(even)
        for share in _IN_FLIGHT:
            try:
                found = balance(
                    *(layers, placement, m),
                    recompute=trials.recompute,
                    in_flight=[1 + share * (n - 1) for n in most],
                )
            except LimitError:
                continue
            splits.append(found.split)
    target = first.load if first.is_proved else trials.loads.least
    return list(dict.fromkeys([*splits, even])), target


def _finished(trials: Trials, best: Trial, even: Trial | None) -> LayerPlan:
    schedule = replace(
        best.schedule,
        split=best.split,
        recompute=recompute_by_chunk(best.split, best.recompute),
    )
    return LayerPlan(
        schedule=schedule,
        costs=best.costs,
        memory=best.memory,
        split=best.split,
        recompute=best.recompute,
        step=best.step,
        barrier_step=best.barrier_step,
        peak=best.peak,
        ideal_step=trials.loads.total / trials.placement.n_stages,
        even_step=None if even is None else even.step,
    )
