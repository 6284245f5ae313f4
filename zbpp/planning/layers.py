"""Plans with a split of the layers, and layers, or chunks, that are recomputed.

Every placement of a mode is planned with its own best split; `auto` has several. If it
is asked to compare modes, each is planned with its own best split too: so it is never
worse than a fixed mode, but for this: predictions are not good to 1 %, and messages
take time of the host that is in no cost. Among plans within 1 % of the shortest step,
those with the fewest messages come first.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from zbpp.core import (
    Costs,
    LayerCosts,
    LimitError,
    Placement,
    RequestError,
    Schedule,
    format_memory,
    recomputed,
)
from zbpp.core.costs.layers import chunk_layers
from zbpp.planning.answer import Plan, Rejected, recomputed_layers
from zbpp.planning.modes import AUTO, BASELINE, MODES, USUAL_MODES, Mode
from zbpp.planning.request import PlanRequest
from zbpp.planning.search import Problem, placements, searched_name
from zbpp.schedules import Recomputing, Split, balance, even_split, plan_split
from zbpp.schedules.planner.budget import Budget, parse_effort, shares
from zbpp.schedules.planner.figures import ROUNDING, Contest
from zbpp.schedules.planner.layers.search import SplitPlanner

__all__ = ["line_of", "plan_layers", "rejected"]

_FAR = 0.05  # of a step: splits are not worth as much as that
_SMALL = 128  # stages times micro-batches: larger ones take minutes to search
_TRUST = 0.01  # of a step: how far predictions are trusted
_LITTLE = 0.02  # of a step: less than this is no help


def plan_layers(mode: Mode, request: PlanRequest) -> Plan:
    """Plan a mode with a split, or with parts that are recomputed.

    Raises:
        LimitError: nothing fits the limit; it names the smallest that works.
        RequestError: the layers cannot be split so, there is no such part to be
            recomputed, or what auto needs for that is missing.
    """
    if isinstance(request.costs, LayerCosts):
        if mode.place is None and request.by_mode:
            return _best_of_modes(request, request.costs)
        return _best_split(mode, request)
    preset = request.schedule if isinstance(request.schedule, Schedule) else None
    if preset is not None and request.recompute == "auto":
        raise RequestError(
            f"recompute auto plans anew, but the orders of {preset.name} are given; "
            "give a mode, or plan a file with zbpp plan --recompute auto"
        )
    schedule = _best_split(mode, request).schedule
    if not schedule.recomputing and request.chunk_costs.parts is not None:
        # layers join parts, and without recompute the costs are those of the chunks
        _, m = request.sizes(mode.name)
        planner = _planner(mode, schedule.placement, m)
        again = planner(request.chunk_costs, request.effort)
        schedule = replace(again, split=schedule.split, recompute=None)
    if not callable(request.split):
        schedule = replace(schedule, split=None if preset is None else preset.split)
    costs = recomputed(request.chunk_costs, schedule)
    has_costs = request.costs is not None
    return Plan(schedule, costs, mode.name, has_costs, split=schedule.split)


def _best_split(mode: Mode, request: PlanRequest) -> Plan:
    """Plan every placement of a mode with its own best split; keep the best."""
    options = placements(mode, request)
    _, n_microbatches = request.sizes(mode.name)
    contest: Contest[Plan] = Contest()
    efforts = shares(request.effort, len(options))
    for placement, effort in zip(options, efforts, strict=True):
        with contest.attempt(mode.name):
            layers, split, recompute = _asked(placement, request)
            layer_plan = plan_split(
                _planner(mode, placement, n_microbatches),
                layers,
                placement,
                n_microbatches,
                recompute=recompute,
                split=split,
                effort=effort,
            )
            plan = Plan(
                layer_plan.schedule,
                layer_plan.costs,
                layer_plan.schedule.name.removeprefix(f"{AUTO}: "),
                split=layer_plan.schedule.split,
                ideal_step=layer_plan.ideal_step,
                even_step=layer_plan.even_step,
            )
            contest.offer(mode.name, plan)
    _, best = contest.winner()
    plans = [entry.plan for entry in contest.entries if entry.plan is not None]
    even = [plan.even_step for plan in plans if plan.even_step is not None]
    return replace(best, even_step=min(even, default=None))


def _asked(
    placement: Placement, request: PlanRequest
) -> tuple[LayerCosts, Split, Recomputing]:
    """Costs of layers, their split and what is recomputed, on a placement.

    Costs of chunks are dealt to their layers, one each if these are not known.
    """
    preset = request.schedule if isinstance(request.schedule, Schedule) else None
    split, recompute = request.split, request.recompute
    if not isinstance(request.costs, LayerCosts):
        parts: Sequence[int] = (1,) * placement.n_chunks
        if callable(split):
            planned = None if preset is None else preset.split
            parts = split(placement) if planned is None else planned
        what, n = "layer" if callable(split) else "chunk", sum(parts)
        for part in () if isinstance(recompute, str) else recompute or ():
            if not 0 <= part < n:
                raise RequestError(
                    f"{what} {part} shall be recomputed; the {what}s are 0 to {n - 1}"
                )
        layers = chunk_layers(request.chunk_costs, placement, parts)
        return layers, parts, recompute or ()
    layers = request.costs
    assert not callable(split), "costs of layers need no rule"
    if preset is not None and preset.split is not None and split is None:
        split = preset.split
        if sum(split) != layers.n_layers:
            raise RequestError(
                f"the schedule's split {list(split)} is for {sum(split)} layers, but "
                f"the costs are for {layers.n_layers}; plan again, or give another "
                "split"
            )
    if preset is not None and preset.recompute is not None and recompute is None:
        if split is None or isinstance(split, str):
            split = even_split(layers.n_layers, placement.n_chunks)
        recompute = recomputed_layers(preset, split)
    return layers, split, () if recompute is None else recompute


def _planner(mode: Mode, placement: Placement, n_microbatches: int) -> SplitPlanner:
    """Return the planner of a mode on a placement, for the costs of any split."""

    def planner(costs: Costs, effort: str) -> Schedule:
        problem = Problem(n_microbatches, costs, effort)
        if mode.place is None:
            return _plan_auto(problem, placement)
        return problem.plan(mode, placement)

    return planner


def _plan_auto(problem: Problem, placement: Placement) -> Schedule:
    """Plan a placement: with effort fast by itself, else by every mode.

    The seconds of best are for the placement alone, after every mode by default.
    """
    kind, seconds = parse_effort(problem.effort)
    if kind == "fast":
        only = problem.plan(None, placement)
        return replace(only, name=f"{AUTO}: {searched_name(placement)}")
    budget = Budget(math.inf, seconds)
    if kind == "best":
        problem = replace(problem, effort="default")
    contest = problem.contest([placement])
    if kind == "best" and contest.best is not None:
        problem = replace(problem, effort=f"best:{budget.seconds_left:g}")
        last = problem.plan(None, placement)
        contest.offer(searched_name(placement), Plan(last, problem.costs, AUTO))
    name, best = contest.winner()
    return replace(best.schedule, name=f"{AUTO}: {name}", costs=problem.limited)


def _best_of_modes(request: PlanRequest, layers: LayerCosts) -> Plan:
    """Plan all modes for the layers, and keep the best.

    Layers are recomputed where they may be and there is a limit, if nothing is said of
    it. A list as split is for one placement: modes of others are left out.
    """
    if request.recompute is None and None not in (layers.memory_limit, layers.m_r):
        request = replace(request, recompute="auto")
    first = _best_split(MODES[AUTO], request)
    contest: Contest[Plan] = Contest()
    contest.offer(searched_name(first.schedule.placement), first)
    usual = (MODES[name] for name in USUAL_MODES)
    for mode in (MODES[BASELINE], *(mode for mode in usual if mode.splits)):
        with contest.attempt(mode.name):
            _enter(contest, mode, first, request, layers)
    name, best = contest.winner(trust=_TRUST)
    schedule = replace(best.schedule, name=f"{AUTO}: {name}")
    lost = rejected(contest, name, best)
    plan = replace(best, schedule=schedule, mode=name, rejected=lost)
    joint = next((e.plan for e in contest.entries if e.name == BASELINE), None)
    return replace(plan, line=line_of(plan, joint))


def _enter(
    contest: Contest[Plan],
    mode: Mode,
    first: Plan,
    request: PlanRequest,
    layers: LayerCosts,
) -> None:
    """Plan a mode: with splits that are at hand, and if that comes close, its best.

    One whose busiest stage alone takes longer than the first plan, and more than is
    trusted, is not planned; but 1F1B is, to tell what zero bubble gains.
    """
    n_stages, n_microbatches = request.sizes(mode.name)
    assert mode.place is not None and mode.chunks is not None, mode.name
    placement = mode.place(n_stages, mode.chunks)
    if mode.name != BASELINE:
        # recompute adds to the loads, and a memory limit only leaves fewer splits
        least = balance(replace(layers, memory_limit=None), placement, n_microbatches)
        if least.bound > first.step * (1 + _TRUST):
            reason = f"{least.bound / first.step - 1:+.1%} at least"
            contest.reject(mode.name, reason)
            return
    if request.split in (None, "balanced"):
        is_large = n_stages * n_microbatches > _SMALL
        quick = _quick_plan(mode, placement, layers, first, request, is_large=is_large)
        far = first.step * (1 + (0 if is_large else _FAR))
        if quick is not None and quick.step > far:
            contest.offer(mode.name, quick)
            return
    contest.offer(mode.name, _best_split(mode, request))


def _quick_plan(
    mode: Mode,
    placement: Placement,
    layers: LayerCosts,
    first: Plan,
    request: PlanRequest,
    *,
    is_large: bool,
) -> Plan | None:
    """Plan with the balanced split and, on the same placement, that of the first plan.

    None if neither fits.
    """
    splits = [first.split] if placement == first.schedule.placement else []
    plans: list[Plan] = []
    with suppress(LimitError):
        _, n_microbatches = request.sizes(mode.name)
        splits.append(balance(layers, placement, n_microbatches).split)
        for split in dict.fromkeys(splits):
            quick = replace(request, split=split, effort="fast")
            if request.recompute == "auto" and is_large:
                again = first.recompute if split == first.split else frozenset()
                quick = replace(quick, recompute=again)
            plans.append(_best_split(mode, quick))
    return min(plans, key=lambda plan: plan.step, default=None)


def rejected(contest: Contest[Plan], name: str, best: Plan) -> tuple[Rejected, ...]:
    """Say of all others of a contest why they lost against the best plan."""
    return tuple(
        Rejected(entry.name, entry.reason)
        if entry.plan is None
        else Rejected(entry.name, _beside(best, entry.plan), is_planned=True)
        for entry in contest.entries
        if entry.plan is not best and entry.name != name
    )


def _beside(best: Plan, lost: Plan) -> str:
    """Say how much more than the best plan another one takes."""
    if abs(lost.time - best.time) > best.time * ROUNDING:
        more = " with more messages" if lost.time < best.time else ""
        return f"{lost.time / best.time - 1:+.1%}{more}"
    if lost.barrier_step > best.barrier_step * (1 + ROUNDING):
        return f"{lost.barrier_step / best.barrier_step - 1:+.1%} (O)"
    return f"as fast with {format_memory(lost.peak)}"


def line_of(plan: Plan, joint: Plan | None = None) -> str:
    """Say in one line what auto has chosen, what it promises, and why others lost.

    Args:
        plan: that has won.
        joint: of 1F1B, where layers were split for it.
    """
    split = plan.split or ()
    chosen = plan.mode
    if split:
        chosen += f", layers {'-'.join(map(str, split))}"
    if plan.recompute:
        chosen += f", {len(plan.recompute)} of {sum(split)} layers recomputed"
    memory = format_memory(plan.peak)
    line = (
        f"auto: {chosen}; predicted step {plan.step:.4g}, memory {memory}; "
        f"{', '.join(map(str, plan.rejected))}"
    )
    if joint is None or joint.step * (1 - _LITTLE) > plan.step:
        return line
    return f"{line}; zero bubble will not help here: {_why_no_help(joint)}"


def _why_no_help(joint: Plan) -> str:
    """Say why zero bubble gains little over a plan of 1F1B."""
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
    left = f"{m} micro-batches on {p} stages leave 1F1B a bubble of {bubble:.1%}"
    if bubble > 2 * _LITTLE:
        left += ", and the memory limit leaves the others no less"
    return left
