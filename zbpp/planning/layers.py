"""Plans with a split of the layers, and layers, or chunks, that are recomputed.

Every placement of a mode is planned with its own best split; `auto` has several. If it
is asked to compare modes, each is planned with its own best split too: so it is never
worse than a fixed mode, but for this: predictions are not good to 1 %, and messages
take time of the host that is in no cost. Among plans within 1 % of the shortest step,
those with the fewest messages come first.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from zbpp.core import (
    Costs,
    LayerCosts,
    LimitError,
    Placement,
    RequestError,
    Schedule,
    recomputed,
)
from zbpp.core.costs.layers import chunk_layers
from zbpp.planning.answer import Plan, recomputed_layers
from zbpp.planning.modes import AUTO, BASELINE, MODES, USUAL_MODES, Mode
from zbpp.planning.request import PlanRequest
from zbpp.planning.search import (
    Candidate,
    Problem,
    best_of,
    choice_text,
    placements,
    searched_name,
)
from zbpp.schedules import Recomputing, Split, balance, even_split, plan_split
from zbpp.schedules.planner.budget import Budget, parse_effort, shares
from zbpp.schedules.planner.layers.search import SplitPlanner

__all__ = ["plan_layers"]

_TRUST = 0.01  # of a step: how far predictions are trusted
_LITTLE = 0.02  # of a step: less than this is no help


def plan_layers(mode: Mode, request: PlanRequest) -> Plan:
    """Plan a mode with a split, or with parts that are recomputed.

    Raises:
        LimitError: nothing fits the memory limit; a plan fits the limit that it names.
    """
    if isinstance(request.costs, LayerCosts):
        try:
            return _for_layers(mode, request, request.costs)
        except LimitError as error:
            raise _that_works(error, mode, request, request.costs) from None
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


def _for_layers(mode: Mode, request: PlanRequest, layers: LayerCosts) -> Plan:
    if mode.place is None and request.by_mode:
        return _best_of_modes(request, layers)
    return _best_split(mode, request)


def _that_works(
    error: LimitError, mode: Mode, request: PlanRequest, layers: LayerCosts
) -> LimitError:
    """Raise the limit that an error names until a plan fits.

    A split needs a limit for one micro-batch at a time; the orders of a mode may hold
    more of them.
    """
    limit = error.smallest
    while True:
        enough = replace(layers, memory_limit=limit)
        try:
            _for_layers(mode, replace(request, costs=enough, effort="fast"), enough)
        except LimitError as more:
            limit = max(more.smallest, limit * (1 + _TRUST))
        else:
            return LimitError(error.reason, limit)


def _best_split(mode: Mode, request: PlanRequest) -> Plan:
    """Plan every placement of a mode with its own best split; keep the best."""
    options = placements(mode, request)
    _, n_microbatches = request.sizes(mode.name)
    efforts = shares(request.effort, len(options))
    even: list[float] = []

    def plan(placement: Placement) -> Plan:
        effort = next(efforts)
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
        if layer_plan.even_step is not None:
            even.append(layer_plan.even_step)
        return Plan(
            layer_plan.schedule,
            layer_plan.costs,
            mode.name,
            split=layer_plan.schedule.split,
            ideal_step=layer_plan.ideal_step,
        )

    best = best_of(Candidate(mode.name, partial(plan, option)) for option in options)
    name = best.schedule.name.removeprefix(f"{AUTO}: ")
    return replace(best, mode=name, even_step=min(even, default=None))


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
    name = f"{AUTO}: {searched_name(placement)}"
    if kind == "fast":
        return replace(problem.plan(None, placement), name=name)
    if kind == "default":
        return problem.auto([placement]).schedule
    budget = Budget(math.inf, seconds)
    best = replace(problem, effort="default").auto([placement])
    longer = replace(problem, effort=f"best:{budget.seconds_left:g}")
    last = replace(longer.plan(None, placement), name=name)
    plan = replace(best, schedule=last)
    return last if plan.is_better_than(best) else best.schedule


def _best_of_modes(request: PlanRequest, layers: LayerCosts) -> Plan:
    """Plan all modes for the layers, and keep the best.

    Layers are recomputed where they may be and there is a limit, if nothing is said of
    it. A list as split is for one placement: modes of others are left out. 1F1B is
    always planned, to tell what zero bubble gains.
    """
    if request.recompute is None and None not in (layers.memory_limit, layers.m_r):
        request = replace(request, recompute="auto")
    plans: dict[str, Plan] = {}

    def plan(mode: Mode) -> Plan:
        plans[mode.name] = _best_split(mode, request)
        return plans[mode.name]

    def bound(mode: Mode) -> float:
        # recompute adds to the loads, and a memory limit only leaves fewer splits
        n_stages, n_microbatches = request.sizes(mode.name)
        assert mode.place is not None and mode.chunks is not None, mode.name
        unlimited = replace(layers, memory_limit=None)
        placement = mode.place(n_stages, mode.chunks)
        return balance(unlimited, placement, n_microbatches).bound

    def candidates() -> Iterator[Candidate]:
        first = plan(MODES[AUTO])
        yield Candidate(searched_name(first.schedule.placement), lambda: first)
        yield Candidate(BASELINE, partial(plan, MODES[BASELINE]))
        for mode in map(MODES.__getitem__, USUAL_MODES):
            if mode.splits:
                yield Candidate(mode.name, partial(plan, mode), partial(bound, mode))

    best = best_of(candidates(), trust=_TRUST)
    best = replace(best, schedule=replace(best.schedule, name=f"{AUTO}: {best.mode}"))
    line, joint = choice_text(best), plans.get(BASELINE)
    if joint is not None and joint.step * (1 - _LITTLE) <= best.step:
        line += f"; zero bubble will not help here: {_why_no_help(joint)}"
    return replace(best, line=line)


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
