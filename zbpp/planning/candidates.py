"""Candidates of a request, planned one by one; the best one, and why the others lost.

A mode has one candidate. `auto` plans each placement under as much memory as it may
have. Where several orders take the same time, some may use less memory, and a plan must
not be worse than a hand-made order. So every mode is planned too, under the
memory that it promises, unless its lower bound shows that it is slower.

======================  =============
placement               memory, M_B
======================  =============
one chunk a stage       2p, or limit
wave (V), 2 chunks      p, or limit
interleaved, 2 chunks   2p, or limit
======================  =============

With costs of layers every placement has its best split, and 1F1B is the last
candidate. Predictions are not good to 1 %, and messages take time of the host that is
in no cost: among plans within 1 % of the shortest step, those with the fewest messages
come first. On the split that wins, every mode is then planned.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import pairwise, product
from typing import NoReturn

from zbpp.core import (
    ChunkCosts,
    Costs,
    LayerCosts,
    LimitError,
    Parts,
    Placement,
    RequestError,
    Schedule,
    even_split,
    format_memory,
    lower_bound_on,
    recomputed,
)
from zbpp.core.layers import chunk_layers
from zbpp.planning.answer import Plan, Rejected, check_fits
from zbpp.planning.layers import plan_split
from zbpp.planning.modes import AUTO, BASELINE, CHUNKED_MODES, MODES, Mode
from zbpp.planning.request import (
    PlanRequest,
    Recomputing,
    Split,
    at_least_one,
    split_of,
    split_on,
)
from zbpp.schedules import lay_out, plan_placement
from zbpp.schedules.planner.problem import ROUNDING, capped, shares

_IN_TURN = sorted(
    (mode for mode in MODES.values() if mode.place is not None),
    key=lambda mode: mode.order is not None,
)
"""Searches first: hand-made orders that their bounds exclude are then skipped."""

_TRUST = 0.01  # of a step: how far predictions are trusted
_LITTLE = 0.02  # of a step: less than this is no help
_MOST_JOBS = 2**24  # with effort fast, minutes and some GB of memory
_MOST_CHUNKS = 2**13  # the time of lower bounds grows with their square


def best_plan(mode: Mode, request: PlanRequest) -> Plan:
    """Plan the candidates of a mode; return the best plan.

    Raises:
        LimitError: nothing fits the memory limit; a plan fits the limit that it names.
        RequestError: costs, split and recompute do not fit the request.
    """
    if isinstance(request.costs, LayerCosts):
        try:
            return _of_layers(mode, request)
        except LimitError as error:
            raise _that_works(error, mode, request, request.costs) from None
    if request.recompute is not None:
        return _recomputed(mode, request)
    orders, costs = _orders(request), request.chunk_costs
    costs = costs if orders is None else recomputed(costs, orders)
    options = placements(mode, request)
    if mode.place is None:
        plan = _auto(costs, options, request)
        return replace(plan, line=_choice_text(plan))
    schedule = _schedule(mode, costs, options[0], request)
    return Plan(schedule, costs, mode.name)


@dataclass(frozen=True)
class _Candidate:
    """A plan that may be the best, and a lower bound of its time."""

    name: str
    plan: Callable[[], Plan]
    bound: Callable[[], float] = lambda: 0.0


def _best_of(candidates: Iterable[_Candidate], *, trust: float = 0.0) -> Plan:
    """Plan the candidates that may win; return the best, and why the others lost.

    Args:
        candidates: in the order in which they are planned; of equal plans the first
            one wins.
        trust: share of the time to which predictions are trusted: of plans that are
            as near to the shortest one, those with the fewest messages win.
    """
    best: Plan | None = None
    entries: list[tuple[str, Plan | str]] = []
    errors: list[RequestError] = []
    for candidate in candidates:
        entry: Plan | str
        try:
            bound = candidate.bound()
            if best is not None and bound > best.time * (1 + ROUNDING):
                entry = f"{bound / best.time - 1:+.1%} at least"
            else:
                entry = candidate.plan()
                if best is None or entry.is_better_than(best):
                    best = entry
        except RequestError as error:
            errors.append(error)
            entry = str(error).partition(";")[0].partition("\n")[0]
        entries.append((candidate.name, entry))
    if best is None:
        limits = [error for error in errors if isinstance(error, LimitError)]
        raise min(limits, key=lambda error: error.smallest) if limits else errors[0]
    if trust:
        plans = [entry for _, entry in entries if isinstance(entry, Plan)]
        near = [plan for plan in plans if plan.time <= best.time * (1 + trust)]
        fewest = min(map(_n_messages, near))
        few = [plan for plan in near if _n_messages(plan) == fewest]
        best = reduce(lambda a, b: b if b.is_better_than(a) else a, few)
    winner = next(name for name, entry in entries if entry is best)
    rejected = [
        Rejected(name, entry)
        if isinstance(entry, str)
        else Rejected(name, _difference(best, entry), is_planned=True)
        for name, entry in entries
        if name != winner
    ]
    return replace(best, mode=winner, rejected=tuple(rejected))


def _n_messages(plan: Plan) -> int:
    """Edges between chunks that cross stages, for each micro-batch and direction."""
    return sum(a != b for a, b in pairwise(plan.schedule.placement.stage_of))


def _difference(best: Plan, lost: Plan) -> str:
    """Describe how much more than the best plan another one takes."""
    if abs(lost.time - best.time) > best.time * ROUNDING:
        more = " with more messages" if lost.time < best.time else ""
        return f"{lost.time / best.time - 1:+.1%}{more}"
    if lost.barrier_step > best.barrier_step * (1 + ROUNDING):
        return f"{lost.barrier_step / best.barrier_step - 1:+.1%} (O)"
    return f"as fast with {format_memory(lost.peak)}"


def _choice_text(plan: Plan) -> str:
    """Describe in one line the choice of auto, and why others lost."""
    split = plan.split or ()
    chosen = plan.mode
    if split:
        chosen += f", layers {'-'.join(map(str, split))}"
    if plan.recompute:
        chosen += f", {len(plan.recompute)} of {sum(split)} layers recomputed"
    memory = format_memory(plan.peak)
    return (
        f"auto: {chosen}; predicted step {plan.step:.4g}, memory {memory}; "
        f"{', '.join(map(str, plan.rejected))}"
    )


# ---- Costs of chunks.


def _schedule(
    mode: Mode, costs: Costs, placement: Placement, request: PlanRequest
) -> Schedule:
    """Plan a mode for costs of chunks on one of its placements."""
    return _planned(mode, _limited(mode, costs.on(placement)), request)


def _planned(mode: Mode, costs: ChunkCosts, request: PlanRequest) -> Schedule:
    """Search for an order, or make that of the mode, within the limits of the costs."""
    _, m = request.sizes(mode.name)
    if mode.order is None:
        return plan_placement(costs, m, effort=request.effort, name=mode.name)
    schedule = mode.order_on(costs.placement, m)
    if mode.pairs and costs.parts:
        schedule = lay_out(schedule, costs)
    check_fits(schedule, costs)
    return schedule


def _limited(mode: Mode, costs: ChunkCosts, *, is_rival: bool = False) -> ChunkCosts:
    """Lower the limits to the memory that a mode promises, or may have without one.

    As a rival of others that `auto` plans, every mode keeps to its memory.
    """
    if mode.order is not None and not is_rival:
        return costs
    placement = costs.placement
    rule = mode.promise or (mode.default if is_rival else None)
    return capped(
        costs,
        memory_cap=rule(placement.n_stages) if rule else math.inf,
        default_limit=_allowance(placement),
    )


def _auto(costs: Costs, placements: Sequence[Placement], request: PlanRequest) -> Plan:
    """The best of all modes on these placements."""
    best = _best_of(_rivals(costs, placements, request))
    name = f"{AUTO}: {best.mode}"
    return replace(best, schedule=replace(best.schedule, name=name))


def _rivals(
    costs: Costs, placements: Sequence[Placement], request: PlanRequest
) -> Iterator[_Candidate]:
    """Every placement under all its memory, then every mode under its limit.

    A search that has been planned for another name is left out.
    """
    _, m = request.sizes(AUTO)
    searched: set[object] = set()
    for mode, placement in product((MODES[AUTO], *_IN_TURN), placements):
        in_vain = mode.pairs and costs.fb is None and costs.parts is None
        if mode.place is not None and (in_vain or not _has(mode, placement)):
            continue
        name = mode.name if mode.place else _searched_name(placement)
        try:
            limited = _limited(mode, costs.on(placement), is_rival=True)
        except RequestError as error:
            yield _Candidate(name, partial(_refuse, error))
            continue
        if mode.order is None:
            if (placement, limited.limit) in searched:
                continue
            searched.add((placement, limited.limit))
        plan = partial(_as_plan, mode, limited, request, costs)
        yield _Candidate(name, plan, partial(lower_bound_on, limited, m))


def _as_plan(
    mode: Mode, limited: ChunkCosts, request: PlanRequest, costs: Costs
) -> Plan:
    """Plan within these limits, for costs with others."""
    return Plan(_planned(mode, limited, request), costs, AUTO)


def _refuse(error: RequestError) -> NoReturn:
    raise error


def placements(mode: Mode, request: PlanRequest) -> list[Placement]:
    """Placements that a mode is planned on; auto has several, of few chunks first."""
    n_stages, n_microbatches = request.sizes(mode.name)
    chunks = request.chunks_per_stage
    if chunks is not None and mode.chunks is not None:
        raise RequestError(
            f"chunks_per_stage is {chunks}, but {mode.name} has a fixed number; leave "
            f"it out, or choose one of {', '.join(CHUNKED_MODES)}"
        )
    if chunks is not None:
        at_least_one(mode.name, "chunks_per_stage", chunks)
    if mode.place is not None:
        chunks = mode.chunks or chunks or 2
        _check_sizes(n_stages, n_microbatches, chunks)
        return [mode.place(n_stages, chunks)]
    _check_sizes(n_stages, n_microbatches, chunks or 1)
    if request.placement is not None:
        return [request.placement]
    options = [Placement.single(n_stages)] if chunks in (None, 1) else []
    if chunks != 1:
        for n in [chunks] if chunks else [2, *_more_chunks(request)]:
            options.append(Placement.wave(n_stages, n))
            options.append(Placement.interleaved(n_stages, n))
    return options


def _check_sizes(n_stages: int, n_microbatches: int, chunks_per_stage: int) -> None:
    """Refuse sizes that would be planned for hours."""
    n_chunks = n_stages * chunks_per_stage
    n_jobs = 3 * n_chunks * n_microbatches
    if n_jobs > _MOST_JOBS:
        raise RequestError(
            f"{n_stages} stages with {chunks_per_stage} chunks each and "
            f"{n_microbatches} micro-batches are {n_jobs:,} jobs (F, B and W of each "
            f"chunk and micro-batch); at most {_MOST_JOBS:,} are planned: take fewer "
            "stages or micro-batches"
        )
    if n_chunks > _MOST_CHUNKS:
        raise RequestError(
            f"{n_stages} stages with {chunks_per_stage} chunks each are {n_chunks:,} "
            f"chunks; at most {_MOST_CHUNKS:,} are planned: take fewer stages or chunks"
        )


def _more_chunks(request: PlanRequest) -> list[int]:
    """Chunks a stage that are tried beyond 2: 4, where costs tell parts of layers.

    Layers that exchange data in between take long on their way through the model, and
    smaller chunks let more of them overlap.
    """
    costs = request.costs
    parts = costs.parts if isinstance(costs, Costs) else None
    return [4] if isinstance(parts, Parts) and parts.layers % 4 == 0 else []


def _searched_name(placement: Placement) -> str:
    """Name the search of a placement under all its memory."""
    if placement.n_chunks == placement.n_stages:
        return "ZB"
    return "ZBV" if placement.stage_of[-1] == 0 else "interleaved ZB"


def _allowance(placement: Placement) -> int:
    """Memory of a stage in M_B that a placement may have without a limit."""
    n_stages = placement.n_stages
    chunks = placement.n_chunks // n_stages
    is_wave = chunks > 1 and placement == Placement.wave(n_stages, chunks)
    return n_stages if is_wave else 2 * n_stages


def _has(mode: Mode, placement: Placement) -> bool:
    """True if a mode plans a placement."""
    chunks = placement.n_chunks // placement.n_stages
    if mode.place is None or mode.chunks not in (None, chunks):
        return False
    if mode.order is not None and mode.chunks is None and chunks == 1:
        return False  # VPP of one chunk a stage is 1F1B
    return mode.place(placement.n_stages, chunks) == placement


# ---- Costs of layers, and recompute.


def _of_layers(mode: Mode, request: PlanRequest) -> Plan:
    """Plan every placement of a mode with its best split; keep the best."""
    n_stages, _ = request.sizes(mode.name)
    is_auto = mode.place is None
    candidates = [(mode, placement) for placement in placements(mode, request)]
    if is_auto and request.chunks_per_stage in (None, 1):
        candidates.append((MODES[BASELINE], Placement.single(n_stages)))
    efforts = shares(request.effort, len(candidates))
    plans: dict[str, Plan] = {}

    def plan(name: str, mode: Mode, placement: Placement) -> Plan:
        limited = replace(request, effort=next(efforts))
        plans[name] = _split(mode, placement, limited)
        return plans[name]

    def candidate(mode: Mode, placement: Placement) -> _Candidate:
        name = mode.name if mode.place else _searched_name(placement)
        return _Candidate(name, partial(plan, name, mode, placement))

    trust = _TRUST if is_auto else 0.0
    best = _best_of((candidate(*each) for each in candidates), trust=trust)
    if not is_auto:
        return best
    if request.effort != "fast":
        quick = replace(request, effort="default")
        contest = _auto(best.costs, [best.schedule.placement], quick)
        orders = contest.schedule
        rival = replace(
            best,
            schedule=replace(best.schedule, orders=orders.orders, parts=orders.parts),
            mode=contest.mode,
        )
        best = rival if rival.is_better_than(best) else best
    best = replace(best, schedule=replace(best.schedule, name=f"{AUTO}: {best.mode}"))
    line, joint = _choice_text(best), plans.get(BASELINE)
    if joint is not None and joint.step * (1 - _LITTLE) <= best.step:
        line += f"; zero bubble gains less than {_LITTLE:.0%} over {BASELINE} here"
    return replace(best, line=line)


def _split(mode: Mode, placement: Placement, request: PlanRequest) -> Plan:
    """Plan a mode on a placement with its best split and recompute."""
    _, m = request.sizes(mode.name)
    layers, split, recompute = _asked(placement, request)
    return plan_split(
        lambda costs, effort: _schedule(
            mode, costs, placement, replace(request, effort=effort)
        ),
        layers,
        placement,
        m,
        mode=mode.name,
        split=split,
        recompute=recompute,
        effort=request.effort,
    )


def _that_works(
    error: LimitError, mode: Mode, request: PlanRequest, layers: LayerCosts
) -> LimitError:
    """Raise the limit that an error names until a plan fits.

    A split needs a limit for one micro-batch at a time; the orders of a mode may have
    more in flight.
    """
    limit = error.smallest
    while True:
        enough = replace(layers, memory_limit=limit)
        try:
            _of_layers(mode, replace(request, costs=enough, effort="fast"))
        except LimitError as more:
            limit = max(more.smallest, limit * (1 + _TRUST))
        else:
            return LimitError(error.reason, limit)


def _orders(request: PlanRequest) -> Schedule | None:
    """Orders that a request has itself."""
    return request.schedule if isinstance(request.schedule, Schedule) else None


def _recomputed(mode: Mode, request: PlanRequest) -> Plan:
    """Plan a mode with costs of chunks, of which some parts are recomputed."""
    orders = _orders(request)
    if orders is not None and request.recompute == "auto":
        raise RequestError(
            f"recompute auto plans again, but the orders of {orders.name} are given; "
            "give a mode, or plan a file with zbpp plan --recompute auto"
        )
    plans = (
        _Candidate(mode.name, partial(_split, mode, option, request))
        for option in placements(mode, request)
    )
    schedule = _best_of(plans).schedule
    if not schedule.recomputing and request.chunk_costs.parts is not None:
        # layers join parts, and without recompute the costs are those of the chunks
        costs, placement = request.chunk_costs, schedule.placement
        again = _schedule(mode, costs, placement, request)
        schedule = replace(again, split=schedule.split, recompute=None)
    if request.n_layers is None:
        schedule = replace(schedule, split=None if orders is None else orders.split)
    costs = recomputed(request.chunk_costs, schedule)
    return Plan(schedule, costs, mode.name)


def _asked(
    placement: Placement, request: PlanRequest
) -> tuple[LayerCosts, Split, Recomputing]:
    """Costs of layers, their split and the recomputed layers, on a placement.

    Costs of chunks are divided among their layers, one each if these are not known.
    """
    preset, split, recompute = _orders(request), request.split, request.recompute
    if not isinstance(request.costs, LayerCosts):
        parts: Sequence[int] = (1,) * placement.n_chunks
        if request.n_layers is not None:
            planned = None if preset is None else preset.split
            parts = planned or split_on(split, request.n_layers, placement)
        what, n = "chunk" if request.n_layers is None else "layer", sum(parts)
        for part in () if isinstance(recompute, str) else recompute or ():
            if not 0 <= part < n:
                raise RequestError(
                    f"{what} {part} is to be recomputed; the {what}s are 0 to {n - 1}"
                )
        layers = chunk_layers(request.chunk_costs, placement, parts)
        return layers, parts, recompute or ()
    layers = request.costs
    if preset is not None and preset.split is not None and split is None:
        split = split_of(preset, None, layers.n_layers)
    if preset is not None and preset.recompute is not None and recompute is None:
        if split is None or isinstance(split, str):
            split = even_split(layers.n_layers, placement.n_chunks)
        recompute = preset.recomputed_layers(split)
    return layers, split, () if recompute is None else recompute
