"""Choose the layers that are recomputed, with the planner in the loop.

A recomputed layer leaves less memory from F to B, and its B takes f longer: more
micro-batches in flight against more work. Of a chunk those layers come first that save
most memory, m_b - m_r, for their time f; of equal ones the first, whose backward runs
last, when the others have given back what they held. So a choice is a number of layers
for each chunk.

1. Profiles along the chunks, those with the least lower bound first, are planned with
   effort fast.
2. From the best one, a layer more or less in a chunk, or moved to another chunk.
3. The best few, none and all are planned with the effort that is wanted. So the plan
   is never worse than without recompute, or with all layers, where these fit.
4. With effort default, the passes of the plan with the least lower bound are moved for
   longer: often that without recompute, where a better order gains more.

A choice whose lower bound is not below the best step is not planned.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from functools import partial, reduce
from itertools import accumulate, pairwise, product
from typing import Literal

from zbpp.core import LayerCosts, LimitError, Placement, RequestError
from zbpp.schedules.planner.budget import LONG, Budget, parse_effort
from zbpp.schedules.planner.figures import ROUNDING
from zbpp.schedules.planner.layers.search import (
    Choice,
    LayerPlan,
    Split,
    SplitPlanner,
    Trial,
    Trials,
    best_split,
    better,
    climb,
    finished,
    plan_split,
)

__all__ = ["Recomputing", "plan_recompute"]

_PASSES = {"fast": 6e4, "default": 4e5, "best": math.inf}
_LEAST_PLANS, _MOST_PLANS = 10, 200
_FINALISTS = {"fast": 1, "default": 3, "best": 3}
_N_LAST, _LAST_SHARE = 2, 0.75  # of best: plans at the end, their share of the time
_NEAR = 0.05  # of a step: longer plans are not moved for longer
_AT_FIRST = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0)
_AT_LAST = (1.0, 0.75, 0.5, 0.25, 0.0, -0.5, -1.0, -2.0, -4.0, -8.0)


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
        if layers.m_r is None:
            raise RequestError(
                "recompute auto needs m_r: what F leaves of a part that is recomputed "
                "(its input, as a rule); add it to the costs, or choose all or none"
            )
        if layers.memory_limit is None:
            raise RequestError(
                "recompute auto needs a memory limit: without one it is best to "
                "recompute nothing; give a memory_limit"
            )
        trials = Trials(planner, layers, placement, n_microbatches)
        return finished(trials, _best_choice(trials, split, effort), effort)
    if isinstance(recompute, str):
        recompute = range(layers.n_layers) if recompute == "all" else ()
    return plan_split(
        planner,
        layers,
        placement,
        n_microbatches,
        split=split,
        recompute=recompute,
        effort=effort,
    )


def _best_choice(trials: Trials, split: Split, effort: str) -> Trial:
    """The best of none, all, and what a search finds on their splits."""
    kind, seconds = parse_effort(effort)
    usual = "default" if kind == "best" else effort
    planned: list[Trial] = []
    errors: list[LimitError] = []
    for recompute in (frozenset[int](), frozenset(range(trials.layers.n_layers))):
        try:
            planned.append(best_split(trials, split, recompute, usual))
        except LimitError as error:
            errors.append(error)
    fixed = trials.even if split is None or isinstance(split, str) else tuple(split)
    splits = list(dict.fromkeys([*(plan.choice.split for plan in planned), fixed]))
    share = 1 / len(splits)
    for chunks in splits:
        passes = max(share * _PASSES[kind], _LEAST_PLANS * trials.price)
        if kind != "best":
            passes = min(passes, _MOST_PLANS * trials.price)
        budget = Budget(passes, share * (1 - _LAST_SHARE) * seconds)
        below = min((trial.step for trial in planned), default=math.inf)
        finalists = _search(trials, chunks, budget, below)[: _FINALISTS[kind]]
        plans = [trials.of(choice, usual) for choice in finalists]
        planned += [plan for plan in plans if plan is not None]
    if not planned:
        raise min(errors, key=lambda error: error.smallest)
    if kind == "best":
        planned.sort(key=lambda trial: (trial.step, trial.barrier_step, trial.peak))
        last = f"best:{seconds * _LAST_SHARE / _N_LAST:g}"
        planned += [trials.best([t.choice], last) for t in planned[:_N_LAST]]
    best = reduce(better, planned)
    if kind == "default" and trials.placement.n_chunks > trials.placement.n_stages:
        return _move_longer(trials, best, planned)
    return best


def _search(
    trials: Trials, split: tuple[int, ...], budget: Budget, below: float
) -> list[Choice]:
    """Choices of a split that deserve the effort that is wanted, best first.

    Steps that are not ``below`` that of a plan that there is are of no use.
    """
    ranked = _ranked(trials.layers, split)
    profiles = (_choice(split, ranked, counts) for counts in _profiles(ranked))
    best: Trial | None = None
    for choice in trials.by_bound(profiles, budget):
        if not budget.is_left or trials.bound(choice) >= below * (1 - ROUNDING):
            break
        trial = trials.within(choice, budget)
        if trial is not None:
            best = trial if best is None else better(best, trial)
            below = best.step
    if best is not None:
        climb(trials, best, partial(_neighbours, trials, ranked), budget)
    fast = [trial.choice for trial in trials.fast() if trial.choice.recompute]
    return [choice for choice in fast if choice.split == split]


def _move_longer(trials: Trials, best: Trial, planned: Sequence[Trial]) -> Trial:
    """Spend more on the plan that could become shortest, if any could."""
    near = [trial for trial in planned if trial.step <= best.step * (1 + _NEAR)]
    chosen = min((trial.choice for trial in near), key=trials.bound)
    if trials.bound(chosen) >= best.step * (1 - ROUNDING):
        return best
    return better(best, trials.best([chosen], LONG))


def _ranked(layers: LayerCosts, split: Sequence[int]) -> list[list[int]]:
    """Layers of each chunk that save memory, those that save most for their time first.

    Of equal ones the first, whose backward runs last, when the others have given back
    what they held.
    """
    m_b, m_r, f = (layers.of(name) for name in ("m_b", "m_r", "f"))

    def worth(layer: int) -> float:
        saved = m_b[layer] - m_r[layer]
        return saved / f[layer] if f[layer] > 0 else math.inf

    return [
        sorted(
            (i for i in range(first, end) if m_b[i] > m_r[i]),
            key=lambda i: (-worth(i), i),
        )
        for first, end in pairwise(accumulate(split, initial=0))
    ]


def _choice(
    split: tuple[int, ...], ranked: Sequence[Sequence[int]], counts: Sequence[int]
) -> Choice:
    """The choice of so many layers of each chunk."""
    pairs = zip(ranked, counts, strict=True)
    return Choice(split, frozenset(layer for chunk, n in pairs for layer in chunk[:n]))


def _profiles(ranked: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Numbers of layers along the chunks; of few and many layers those of few first.

    Early chunks hold their micro-batches longest, so most profiles fall.
    """
    most = [len(chunk) for chunk in ranked]
    profiles = {
        tuple(round(n * share) for n, share in zip(most, shares, strict=True))
        for shares in [*_slopes(len(most)), *_first_chunks(len(most))]
    }
    return sorted(profiles, key=lambda counts: (sum(counts), counts))


def _slopes(n_chunks: int) -> Iterator[list[float]]:
    """Shares y of a chunk's layers that fall, or rise, along the model::

    1 |------.
      |       `-.               from y of the first to y of the last chunk,
    0 |__________`-.____        cut at 0 and 1
       first       last chunk
    """
    for start, end in product(_AT_FIRST, _AT_LAST):
        slope = (end - start) / max(1, n_chunks - 1)
        yield [min(1.0, max(0.0, start + slope * c)) for c in range(n_chunks)]


def _first_chunks(n_chunks: int) -> Iterator[list[float]]:
    """All layers of the first chunks, none of the others."""
    for n in range(n_chunks + 1):
        yield [1.0] * n + [0.0] * (n_chunks - n)


def _neighbours(
    trials: Trials, ranked: Sequence[Sequence[int]], best: Trial
) -> Iterator[Choice]:
    """A layer more or less in a chunk, or moved to a chunk nearby."""
    stage_of = trials.placement.stage_of
    counts = [len(best.choice.recompute.intersection(chunk)) for chunk in ranked]
    chunks = range(len(counts))
    steps = sorted({1, max(1, max(map(len, ranked)) // 4)})
    moves = [{c: sign * step} for step in steps for c in chunks for sign in (-1, 1)]
    moves += [
        {a: -1, b: 1}
        for a in chunks
        for b in chunks
        if a != b and (abs(a - b) == 1 or abs(stage_of[a] - stage_of[b]) <= 1)
    ]
    for move in moves:
        changed = [n + move.get(c, 0) for c, n in enumerate(counts)]
        pairs = zip(changed, ranked, strict=True)
        if all(0 <= n <= len(chunk) for n, chunk in pairs):
            yield _choice(best.choice.split, ranked, changed)
