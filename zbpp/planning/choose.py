"""Choose placement, split, recompute and order for the layers of a model.

Every mode that can be had is planned with its own best split. The best plan has the
shortest step, then the shortest step behind a barrier, then the least memory, as in
`zbpp.modes.auto`; so it is never worse than a fixed mode, but for this: predictions
are not good to 1 %, and messages take time of the host that is in no cost. Among plans
within 1 % of the shortest step, those with the fewest messages come first.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Required, TypedDict, Unpack

from zbpp.core import LayerCosts, LimitError, Placement, RequestError, format_memory
from zbpp.planning.layer_plans import plan_layers
from zbpp.schedules import LayerPlan, Recomputing, Split, balance

__all__ = ["Choice", "LayerRequest", "Other", "choose"]

_MODES = ("1F1B", "ZBH1", "ZBH2", "ZBV", "VHalf", "VMin")
_WAVES = ("ZBV", "VHalf", "VMin")
_FAR = 0.05  # of a step: splits are not worth as much as that
_SMALL = 128  # stages times micro-batches: larger ones take minutes to search
_TRUST = 0.01  # of a step: how far predictions are trusted
_LITTLE = 0.02  # of a step: less than this is no help


class LayerRequest(TypedDict, total=False):
    """The keywords of `plan_layers`."""

    n_stages: Required[int]
    n_microbatches: Required[int]
    split: Split
    recompute: Recomputing | None
    effort: str


@dataclass(frozen=True)
class Other:
    """A mode that was not chosen."""

    mode: str
    plan: LayerPlan | None
    reason: str = ""
    """Of a mode that cannot be had."""


@dataclass(frozen=True)
class Choice:
    """The best plan, the mode that gives it, and those that lost."""

    mode: str
    plan: LayerPlan
    others: tuple[Other, ...]

    @property
    def line(self) -> str:
        """Say in one line what was chosen, what it promises, and why others lost."""
        plan = self.plan
        chosen = f"{self.mode}, layers {'-'.join(map(str, plan.split))}"
        if plan.recompute:
            chosen += f", {len(plan.recompute)} of {sum(plan.split)} layers recomputed"
        said = ", ".join(self._compared(other) for other in self.others)
        return (
            f"auto: {chosen}; predicted step {plan.step:.4g} ms, memory "
            f"{format_memory(plan.peak)}; {said}{self.no_help}"
        )

    @property
    def no_help(self) -> str:
        """Say why zero bubble gains little here; empty if it gains."""
        every = (Other(self.mode, self.plan), *self.others)
        joint = next((o.plan for o in every if o.mode == "1F1B"), None)
        if joint is None or joint.step * (1 - _LITTLE) > self.plan.step:
            return ""
        return f"; zero bubble will not help here: {self._why(joint)}"

    def _why(self, joint: LayerPlan) -> str:
        placement, m = joint.schedule.placement, joint.schedule.n_microbatches
        p = placement.n_stages
        if p == 1:
            return "one stage has no bubble"
        times = joint.costs.on(placement)
        if sum(times.w) < 0.05 * sum(times.b):
            return "W has next to nothing to do; see zbpp doctor --model"
        load = [times.f[c] + times.b[c] + times.w[c] for c in range(p)]
        bubble = 1 - m * max(load) / joint.step
        if max(load) > 1.5 * sum(load) / p:
            slow = load.index(max(load))
            return (
                f"stage {slow} works {max(load) * p / sum(load):.1f} times as long as "
                "the mean, and the others wait for it; cut its layers smaller"
            )
        return (
            f"{m} micro-batches on {p} stages leave 1F1B a bubble of {bubble:.1%}, and "
            "the memory limit leaves the others no less"
            if bubble > 2 * _LITTLE
            else f"{m} micro-batches on {p} stages leave 1F1B a bubble of {bubble:.1%}"
        )

    def _compared(self, other: Other) -> str:
        if other.plan is None:
            return f"{other.mode}: {other.reason}"
        mine, its = self.plan, other.plan
        if abs(its.step - mine.step) > mine.step * 1e-9:
            more = " with more messages" if its.step < mine.step else ""
            return f"{other.mode} {its.step / mine.step - 1:+.1%}{more}"
        if its.barrier_step > mine.barrier_step * (1 + 1e-9):
            return f"{other.mode} {its.barrier_step / mine.barrier_step - 1:+.1%} (O)"
        return f"{other.mode} as fast with {format_memory(its.peak)}"


def choose(layers: LayerCosts, **request: Unpack[LayerRequest]) -> Choice:
    """Plan all modes for the layers, and keep the best.

    Args:
        layers: times in ms, memories, and the limit of a stage.
        request: as for `zbpp.planning.layer_plans.plan_layers`, but that effort is fast
            and recompute is auto, where there is a limit and a choice, if left out. A
            list as split is for one placement: modes of others are left out.

    Raises:
        LimitError: nothing fits the limit; it names the smallest that works.
        RequestError: the layers cannot be split so.
    """
    request.setdefault("effort", "fast")
    if request.get("recompute") is None and None not in (layers.limit, layers.m_r):
        request["recompute"] = "auto"
    first = plan_layers("auto", layers, **request)
    tried = [Other(_name(first), first)]
    tried += [_other(name, layers, first, request) for name in _MODES]
    planned = [(o.mode, o.plan) for o in tried if o.plan is not None]
    best = planned[0]
    for one in planned:
        if one[1].is_better_than(best[1]):
            best = one
    close = [o for o in planned if o[1].step <= best[1].step * (1 + _TRUST)]
    for one in close:
        if _n_messages(one[1]) < _n_messages(best[1]):
            best = one
    for one in close:
        if _n_messages(one[1]) == _n_messages(best[1]):
            best = one if one[1].is_better_than(best[1]) else best
    mode, plan = best
    left = tuple(o for o in tried if o.plan is not plan and o.mode != mode)
    return Choice(mode, plan, left)


def _n_messages(plan: LayerPlan) -> int:
    """Edges between chunks that cross stages, for each micro-batch and direction."""
    return sum(a != b for a, b in pairwise(plan.schedule.placement.stage_of))


def _other(
    mode: str, layers: LayerCosts, best: LayerPlan, request: LayerRequest
) -> Other:
    """Plan a mode: with splits that are at hand, and if that comes close, its best.

    One whose busiest stage alone takes longer than the best step, and more than is
    trusted, is not planned; but 1F1B is, to tell what zero bubble gains.
    """
    try:
        bound = _least_load(mode, layers, request) if mode != "1F1B" else 0.0
        if bound > best.step * (1 + _TRUST):
            return Other(mode, None, f"{bound / best.step - 1:+.1%} at least")
        if request.get("split") in (None, "balanced"):
            quick = _quick_plan(mode, layers, best, request)
            is_large = request["n_stages"] * request["n_microbatches"] > _SMALL
            far = best.step * (1 + (0 if is_large else _FAR))
            if quick is not None and quick.step > far:
                return Other(mode, quick)
        return Other(mode, plan_layers(mode, layers, **request))
    except RequestError as error:
        reason = str(error).partition(";")[0].partition("\n")[0]
        return Other(mode, None, reason)


def _least_load(mode: str, layers: LayerCosts, request: LayerRequest) -> float:
    """Load of the busiest stage that no split and no recompute make less; 0: unknown.

    Recompute adds to the loads, and a memory limit only leaves fewer splits.
    """
    free = replace(layers, limit=None)
    placement = _placement(mode, request["n_stages"])
    found = balance(free, placement, request["n_microbatches"])
    return found.load if found.is_proved else 0.0


def _placement(mode: str, n_stages: int) -> Placement:
    return Placement.wave(n_stages) if mode in _WAVES else Placement.single(n_stages)


def _quick_plan(
    mode: str, layers: LayerCosts, best: LayerPlan, request: LayerRequest
) -> LayerPlan | None:
    """Plan with the balanced split and, on the same placement, that of the best plan.

    None if neither fits.
    """
    p, m = request["n_stages"], request["n_microbatches"]
    placement = _placement(mode, p)
    splits = [best.split] if placement == best.schedule.placement else []
    found: list[LayerPlan] = []
    try:
        splits.append(balance(layers, placement, m).split)
        for split in dict.fromkeys(splits):
            asked = request.copy()
            asked["split"], asked["effort"] = split, "fast"
            if asked.get("recompute") == "auto" and p * m > _SMALL:
                asked["recompute"] = best.recompute if split == best.split else "none"
            found.append(plan_layers(mode, layers, **asked))
    except LimitError:
        pass
    return min(found, key=lambda plan: plan.step, default=None)


def _name(plan: LayerPlan) -> str:
    """The mode whose placement the planner of `auto` has chosen."""
    placement = plan.schedule.placement
    if placement.n_chunks == placement.n_stages:
        return "ZB"
    return "ZBV" if placement.stage_of[-1] == 0 else "interleaved ZB"
