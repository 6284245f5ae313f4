"""Choose the layers that are recomputed, with the planner in the loop.

A recomputed layer leaves less memory from F to B, and its B takes f longer: more
micro-batches in flight against more work.

1. Profiles along the chunks (`choice_search`), those with the least lower bound first,
   are planned with effort fast.
2. From the best one, a layer more or less in a chunk, or moved to another chunk.
3. The best few, none and all are planned with the effort that is wanted. So the plan
   is never worse than without recompute, or with all layers, where these fit.
4. With effort default, the passes of the plan with the least lower bound are moved for
   longer: often that without recompute, where a better order gains more.

A choice whose lower bound is not below the best step is not planned.
"""

import math
from collections.abc import Collection
from functools import reduce
from typing import Literal

from zbpp.core import LayerCosts, LimitError, Placement, RequestError, lower_bound
from zbpp.core.recomputed import with_m_r
from zbpp.schedules.planner.budget import LONG, Budget, parse_effort
from zbpp.schedules.planner.layers.choice_search import ChoiceSearch
from zbpp.schedules.planner.layers.choices import Choices
from zbpp.schedules.planner.layers.loads import even_split
from zbpp.schedules.planner.layers.plan import LayerPlan, Split, plan_split
from zbpp.schedules.planner.layers.trials import SplitPlanner

__all__ = ["Recomputing", "plan_recompute"]

_PASSES = {"fast": 6e4, "default": 4e5, "best": math.inf}
_LEAST_PLANS, _MOST_PLANS = 10, 200
_FINALISTS = {"fast": 1, "default": 3, "best": 3}
_N_LAST, _LAST_SHARE = 2, 0.75  # of best: plans at the end, their share of the time
_ROUNDING = 1e-9  # relative
_NEAR = 0.05  # of a step: longer plans are not moved for longer


Recomputing = Literal["auto", "all", "none"] | Collection[int]
"""Layers of the whole model that are recomputed, or how to choose them."""


def plan_recompute(
    planner: SplitPlanner,
    layers: LayerCosts,
    placement: Placement,
    n_microbatches: int,
    *,
    recompute: Recomputing = "auto",
    split: Split = None,
    effort: str = "default",
) -> LayerPlan:
    """Plan one placement with layers that are recomputed.

    Args:
        planner: a mode with its sizes.
        layers: times, memories and limit; ``m_r`` says what F leaves of a layer that
            is recomputed.
        placement: chunk to stage, of the planner's schedules.
        n_microbatches: in a step.
        recompute: see `Recomputing`.
        split: as for `plan_split`; where it is free, ``"auto"`` tries those that are
            best with no recompute and with all.
        effort: of the plans at the end; ``best:SECONDS`` is shared by all.

    Raises:
        LimitError: no choice fits the memory limits.
        RequestError: m_r or the limit is missing.
    """
    if recompute == "auto":
        _check_auto(layers)
        return _Choice(planner, layers, placement, n_microbatches, effort).best(split)
    if isinstance(recompute, str):
        recompute = range(layers.n_layers) if recompute == "all" else ()
    if recompute:
        layers = with_m_r(layers)
    return plan_split(
        *(planner, layers, placement, n_microbatches),
        split=split,
        recompute=recompute,
        effort=effort,
    )


class _Choice:
    """The best of none, all, and what `ChoiceSearch` finds on their splits."""

    def __init__(
        self,
        planner: SplitPlanner,
        layers: LayerCosts,
        placement: Placement,
        n_microbatches: int,
        effort: str,
    ) -> None:
        self._sized = planner, layers, placement, n_microbatches
        self._kind, seconds = parse_effort(effort)
        self._effort = "default" if self._kind == "best" else effort
        self._seconds = seconds
        self._found: list[LayerPlan] = []
        self._errors: list[LimitError] = []

    def best(self, split: Split) -> LayerPlan:
        """Search, and plan what deserves it with the effort that is wanted.

        Raises:
            LimitError: nothing fits.
        """
        _, layers, placement, _ = self._sized
        for again in ((), range(layers.n_layers)):
            self._plan(split, again, self._effort)
        splits = [one.split for one in self._found]
        if split is None or isinstance(split, str):
            splits.append(even_split(layers.n_layers, placement.n_chunks))
        else:
            splits.append(tuple(split))
        for own in (unique := list(dict.fromkeys(splits))):
            self._search(own, share=1 / len(unique))
        if not self._found:
            raise min(self._errors, key=lambda error: error.smallest)
        if self._kind == "best":
            last = f"best:{self._seconds * _LAST_SHARE / _N_LAST:g}"
            for one in sorted(self._found, key=lambda one: one.figures)[:_N_LAST]:
                self._plan(one.split, one.recompute, last)
        best = reduce(lambda a, b: b if b.is_better_than(a) else a, self._found)
        if self._kind == "default" and placement.n_chunks > placement.n_stages:
            self._move_longer(best)
        return reduce(lambda a, b: b if b.is_better_than(a) else a, self._found)

    def _move_longer(self, best: LayerPlan) -> None:
        """Spend more on the plan that could become shortest, if any could."""
        near = [one for one in self._found if one.step <= best.step * (1 + _NEAR)]
        bounds = [(_bound(one), one) for one in near]
        bound, chosen = min(bounds, key=lambda pair: pair[0])
        if bound < best.step * (1 - _ROUNDING):
            self._plan(chosen.split, chosen.recompute, LONG)

    def _plan(self, split: Split, again: Collection[int], effort: str) -> None:
        try:
            one = plan_split(*self._sized, split=split, recompute=again, effort=effort)
        except LimitError as error:
            self._errors.append(error)
        else:
            self._found.append(one)

    def _search(self, split: tuple[int, ...], *, share: float) -> None:
        choices = Choices(*self._sized, split)
        least, most = (n * choices.price for n in (_LEAST_PLANS, _MOST_PLANS))
        passes = max(least, min(share * _PASSES[self._kind], most))
        seconds = share * (1 - _LAST_SHARE) * self._seconds
        search = ChoiceSearch(
            choices,
            Budget(passes if self._kind != "best" else math.inf, seconds),
            below=min((one.step for one in self._found), default=math.inf),
        )
        for counts in search.run()[: _FINALISTS[self._kind]]:
            self._plan(split, choices.layers_of(counts), self._effort)


def _bound(found: LayerPlan) -> float:
    """Lower bound of the step of any order for what a plan recomputes."""
    schedule = found.schedule
    return lower_bound(
        schedule.placement, schedule.n_microbatches, found.costs, found.memory
    )


def _check_auto(layers: LayerCosts) -> None:
    """Refuse what leaves no choice.

    Raises:
        RequestError: m_r or the limit is missing.
    """
    if layers.m_r is None:
        raise RequestError(
            "recompute auto needs m_r: what F leaves of a part that is recomputed (its "
            "input, as a rule); add it to the costs, or choose all or none"
        )
    if layers.limit is None:
        raise RequestError(
            "recompute auto needs a memory limit: without one it is best to recompute "
            "nothing; give a memory_limit"
        )
